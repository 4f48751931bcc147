"""Parts of stored batches: lines of any file, faults by line, the order of lines, records that are put in order."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktqueue.batches.errors import BatchFault
from ktqueue.batches.input import MAX_LINE_BYTES
from ktqueue.batches.line_runner import InFlight
from ktqueue.batches.stored import merge as merge_module
from ktqueue.batches.stored.index import LineIndex, beginning_key
from ktqueue.batches.stored.lines import stored_lines
from ktqueue.batches.stored.merge import merge
from ktqueue.batches.stored.segments import FIRST_READ_BYTES, READS_AT_ONCE, Segments, StoredRecord
from ktqueue.batches.stored.speed import Speed
from ktqueue.batches.stored.validation import MAX_FAULTS, check_input
from ktqueue.batches.stored.window import MAX_BYTES, Window
from ktqueue.broker.batches import BatchSpeed, BatchUsage
from ktqueue.storage.folder import FolderStore
from ktqueue.storage.store import Store, read_whole

COMPLETIONS = "/v1/completions"


def line(custom_id: str = "a", **changes: Any) -> bytes:
    body = {"model": "demo", "prompt": "Once", **changes.pop("body", {})}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": body, **changes}).encode()


async def put(store: Store, name: str, data: bytes) -> None:
    async with store.create(name) as writing:
        await writing.write(data)


async def served(model: str) -> str | None:
    return None if model == "demo" else f"no worker serves the model {model!r}; served: demo"


@given(data=st.lists(st.sampled_from([b"a", b"\n", b" ", b"\r\n", b"bcd"]), max_size=12), size=st.integers(1, 5))
def test_lines_are_where_the_index_says(data: list[bytes], size: int) -> None:
    whole = b"".join(data)

    class Parts:
        async def read(self, name: str) -> Any:
            for start in range(0, len(whole), size):
                yield whole[start : start + size]

    async def read() -> list[Any]:
        return [found async for found in stored_lines(Parts(), "x")]  # type: ignore[arg-type]

    found = asyncio.run(read())
    expected = [(number, text) for number, text in enumerate(whole.split(b"\n"), 1) if text.strip()]
    assert [(each.number, each.data.rstrip(b"\n")) for each in found] == expected
    assert [whole[each.offset : each.offset + each.length] for each in found] == [each.data for each in found]


async def test_every_fault_names_its_line(store: Store) -> None:
    lines = [
        b"\xef\xbb\xbf" + line("bom") + b"\r", b"", line("a"), line("a"), b"{", b"[1]", b"\xff", line(""), line(7),  # type: ignore[arg-type]
        line("m", method="GET"), line("u", url="/v1/chat/completions"), line("b", body={"stream": True}),
        line("n", body={"model": None}), line("o", body={"model": "other"}), json.dumps({"prompt": "plain"}).encode(),
        line("y", body={"model": "demo"}), line("z")[:-1], line("w", body={"model": 7}),
    ]  # fmt: skip
    await put(store, "x", b"\n".join(lines))
    findings = await check_input(store, "x", COMPLETIONS, served)
    assert [(fault["line"], fault["code"], fault["param"]) for fault in findings.faults] == [
        (4, "duplicate_custom_id", "custom_id"),
        (5, "invalid_json_line", None),
        (6, "invalid_json_line", None),
        (7, "invalid_json_line", None),
        (8, "invalid_custom_id", "custom_id"),
        (9, "invalid_custom_id", "custom_id"),
        (10, "invalid_method", "method"),
        (11, "invalid_url", "url"),
        (12, "unsupported_parameter", "body.stream"),
        (13, "missing_model", "body.model"),
        (14, "mismatched_model", "body.model"),
        (15, "invalid_custom_id", "custom_id"),
        (17, "invalid_json_line", None),
        (18, "invalid_model", "body.model"),
    ]
    assert findings.faults[1]["message"].startswith("not JSON: ")
    assert findings.faults[11]["message"].endswith("plain lines are for `ktqueue batch run`")
    assert findings.faults[1]["message"].endswith(", at character 3")  # of the line, with its newline
    assert findings.model == "demo"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "empty_file"),
        (b"\n \r\n", "empty_file"),
        (line("a", body={"model": "other"}), "model_not_found"),
        (b"x" * (MAX_LINE_BYTES + 2) + b"\n" + line(), "line_too_long"),
        (None, "file_not_found"),
    ],
)
async def test_a_file_that_cannot_run_says_why(store: Store, data: bytes | None, code: str) -> None:
    await put(store, "other", b"")
    if data is not None:
        await put(store, "x", data)
    (fault,) = (await check_input(store, "x", COMPLETIONS, served)).faults
    assert fault["code"] == code


async def test_too_many_lines_and_faults_are_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await put(store, "x", b"{\n" * 3 * MAX_FAULTS)
    assert len((await check_input(store, "x", COMPLETIONS, served)).faults) == MAX_FAULTS
    await put(store, "x", b"\n".join(line(str(number)) for number in range(50_001)))
    (fault,) = (await check_input(store, "x", COMPLETIONS, served)).faults
    assert (fault["code"], fault["line"]) == ("too_many_lines", 50_001)


def test_lines_with_one_beginning_run_together() -> None:
    prompts = ["A" * 300 + "x", "B" * 5000 + "1", "C", "A" * 300 + "y", "B" * 1500, "C", "B" * 5000 + "2"]
    index = LineIndex()
    for number, prompt in enumerate(prompts, 1):
        index.add(100 * number, 90, number, beginning_key({"prompt": prompt}))
    assert list(index.order()) == [0, 3, 1, 6, 4, 2, 5]
    again = LineIndex.decode(index.encode())
    assert list(again.order()) == list(index.order())
    assert [(again.span(place), again.number(place)) for place in range(7)] == [
        ((100 * number, 90), number) for number in range(1, 8)
    ]
    for damaged in (b"", index.encode()[:-1], b"x" + index.encode()):
        with pytest.raises(BatchFault):
            LineIndex.decode(damaged)


async def test_records_are_put_into_the_order_of_the_input(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_module, "MAX_RECORDS_BYTES", 100)  # several ranges
    count, draw = 60, random.Random(1)
    await put(store, "in", b"\n\n".join(line(f"c{place}\u2028") for place in range(count)))
    findings = await check_input(store, "in", COMPLETIONS, served)
    assert [findings.index.number(place) for place in range(3)] == [1, 3, 5]
    places = draw.sample(range(count), 50)
    segments = Segments(store, "b/", count)
    for number in range(5):
        await segments.write(f"out-{number}", [
            StoredRecord(place, place % 3 > 0, b"%d first\n" % place, BatchUsage(prompt=1, completion=place))
            for place in places[10 * number : 10 * number + 10]
        ])  # fmt: skip
    await segments.write("out-again", [StoredRecord(places[0], True, b"second\n", BatchUsage(prompt=1))])
    again = Segments(store, "b/", count)
    assert await again.load(["out-0", "out-1", "out-2", "out-3", "out-4", "out-again"]) == []
    assert (again.answered, again.failed, again.usage) == (segments.answered, segments.failed, segments.usage)
    assert segments.usage == BatchUsage(prompt=50, completion=sum(places))
    answered = [place for place in range(count) if place in places and place % 3]
    for name, known in (("one", segments), ("two", again)):
        names = {"source": "in", "output_name": name, "errors_name": f"{name}.e"}
        merged = await merge(store, findings.index, known, **names, unfinished="batch_expired", record_name="r")
        assert (merged.answered, merged.failed) == (len(answered), count - len(answered))
        assert await read_whole(store, name) == b"".join(b"%d first\n" % place for place in answered)
        errors = (await read_whole(store, f"{name}.e")).decode().splitlines()
        left = [place for place in range(count) if place not in answered]
        for place, raw in zip(left, errors, strict=True):
            if place in places:
                assert raw == f"{place} first"
            else:
                record = json.loads(raw)
                assert (record["custom_id"], record["error"]["code"]) == (f"c{place}\u2028", "batch_expired")
    ranges = merge_module._ranges(findings.index, segments)  # that are in memory at once
    assert [place for places in ranges for place in places] == list(range(count))
    assert 4 < len(ranges) < 9 and all(sum(map(segments.length, places)) <= 100 for places in ranges)
    for damaged in (b"", b"{}\n", b'{"v":1,"lines":[[1,2]]}\n', b'{"v":1,"lines":[[99,1,2,3,4,5,6]]}\n'):
        await put(store, "b/damaged", damaged)
        unreadable, missing = await again.load(["damaged", "out-0", "out-9"])
        assert unreadable == "segment damaged: not one that this version can read"
        assert missing == "the store has no object out-9"


class CrowdedStore(FolderStore):
    """A folder in which a read of a segment goes on once READS_AT_ONCE of them wait, in any order."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._crowd = asyncio.Barrier(READS_AT_ONCE)
        self._draw = random.Random(1)
        self.now = self.most = 0

    async def read(self, name: str, start: int = 0, length: int | None = None) -> AsyncGenerator[bytes, None]:
        """See `Store`."""
        self.now += 1
        self.most = max(self.most, self.now)
        await self._crowd.wait()
        for _ in range(self._draw.randrange(9)):
            await asyncio.sleep(0)
        async for part in super().read(name, start, length):
            yield part
        self.now -= 1


async def test_many_segments_are_read_at_once_and_count_in_their_order(tmp_path: Path) -> None:
    count = 2 * READS_AT_ONCE
    segments, store = Segments(FolderStore(tmp_path), "b/", 1 + count), CrowdedStore(tmp_path)
    for number in range(count):
        await segments.write(f"out-{number}", [
            StoredRecord(place, True, b"%d\n" % number, BatchUsage()) for place in (0, 1 + number)
        ])  # fmt: skip
    again = Segments(store, "b/", 1 + count)
    async with asyncio.timeout(20):
        assert await again.load([f"out-{number}" for number in range(count)]) == []
        found = await again.read(range(1, 1 + count))
    assert found == {1 + number: b"%d\n" % number for number in range(count)}
    assert store.most == READS_AT_ONCE
    again._store = FolderStore(tmp_path)
    assert await again.read([0]) == {0: b"0\n"}


async def test_the_header_of_a_segment_may_be_long(store: Store) -> None:
    count = FIRST_READ_BYTES // 3
    segments = Segments(store, "b/", count)
    await segments.write("out", [StoredRecord(place, True, b"%d\n" % place, BatchUsage()) for place in range(count)])
    again = Segments(store, "b/", count)
    assert await again.load(["out"]) == []
    assert again.answered == count
    assert await again.read([count - 1]) == {count - 1: b"%d\n" % (count - 1)}


async def test_a_window_has_a_limit_of_lines_and_bytes_and_an_order() -> None:
    window, seen = Window(2), list[int]()

    async def run(number: int, size: int) -> None:
        await window.acquire(size, "a")
        seen.append(number)

    await window.acquire(2 * MAX_BYTES, "a")  # a single line always fits
    tasks = [asyncio.create_task(run(number, MAX_BYTES // 2)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.sleep(0)
    assert (seen, window.lines) == ([], 1)
    window.release(2 * MAX_BYTES, "a")
    await asyncio.sleep(0)
    assert (seen, window.lines) == ([0, 2], 2)
    window.resize(5)
    await asyncio.sleep(0)
    assert seen == [0, 2]  # the bytes are used
    window.release(MAX_BYTES // 2, "a")
    await asyncio.gather(tasks[3])
    assert (seen, window.lines) == ([0, 2, 3], 2)


async def test_a_group_gets_its_share_of_a_window_that_others_have_filled() -> None:
    window, held = Window(8), Counter[str]()
    tasks: set[asyncio.Task[None]] = set()

    async def take(group: str, size: int = 1) -> None:
        await window.acquire(size, group)
        held[group] += 1

    def want(group: str, count: int, size: int = 1) -> None:
        tasks.update(asyncio.create_task(take(group, size)) for _ in range(count))

    async def settled() -> dict[str, int]:
        for _ in range(5):
            await asyncio.sleep(0)
        return dict(held)

    want("a", 20)
    assert await settled() == {"a": 8}
    want("b", 20)
    assert await settled() == {"a": 8, "b": 4}  # its half
    want("c", 2)
    assert await settled() == {"a": 8, "b": 4, "c": 2}
    for _ in range(8):
        window.release(1, "a")
        held["a"] -= 1
    assert await settled() == {"a": 3, "b": 4, "c": 2}  # a third of eight for each that wants so many
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for group, count in held.items():
        for _ in range(count):
            window.release(1, group)
    assert (window.lines, window._groups, window._waiting) == (0, {}, [])
    await window.acquire(MAX_BYTES, "a")
    want("b", 3, MAX_BYTES // 4)
    held.clear()
    assert await settled() == {"b": 2}


async def test_each_of_many_groups_has_one_line_beside_a_full_window() -> None:
    window, held = Window(2), Counter[str]()

    async def take(group: str) -> None:
        await window.acquire(1, group)
        held[group] += 1

    tasks = [asyncio.create_task(take(group)) for group in "aaabbccdd"]
    for _ in range(5):
        await asyncio.sleep(0)
    assert held == {"a": 2, "b": 1, "c": 1, "d": 1}
    for task in tasks:
        task.cancel()


def known(rate: float | None = None, left: float | None = None) -> BatchSpeed:
    """The speed of a batch of which nothing is in flight at the end."""
    return BatchSpeed(rate, left, 0, 0, None)


def test_speed_counts_lines_in_flight_too() -> None:
    speed = Speed()
    assert speed.measured(100) == BatchSpeed()
    speed.add(0.0, 0, 0, InFlight(0, 16.0))
    assert speed.measured(100) == BatchSpeed()  # no tokens yet
    speed.add(10.0, 0, 0, InFlight(200, 16.0))
    assert speed.measured(100) == known(20.0, 70.0)  # no line has ended: each may have 16 tokens
    speed.add(20.0, 10, 80, InFlight(320, 16.0))
    assert speed.measured(100) == known(20.0, (90 * 16 - 320) / 20)  # 40 tokens for each ended line: too many
    speed.add(40.0, 50, 400, InFlight(200, 16.0))
    assert speed.measured(100) == known(15.0, (50 * 12 - 200) / 15)
    speed.add(41.0, 50, 400, InFlight(200, 16.0, 20, 30, "pages"))
    found = speed.measured(100)
    assert (found.running, found.waiting, found.held_by) == (20, 30, "pages")
    speed.add(42.0, 100, 1200)
    assert speed.measured(100) == known(1200 / 42, 0.0)


def test_speed_of_answers_without_a_limit_is_known_before_the_time_left() -> None:
    speed = Speed()
    speed.add(0.0, 0, 0)
    speed.add(10.0, 0, 0, InFlight(200))
    assert speed.measured(100) == known(20.0, None)
    speed.add(20.0, 20, 200, InFlight(200))
    assert speed.measured(100) == known(20.0, (80 * 20 - 200) / 20)


def test_a_batch_that_stands_still_gets_slower() -> None:
    speed = Speed()
    for second in range(0, 100, 2):
        speed.add(float(second), min(second, 20), 10 * min(second, 20))
        measured = speed.measured(100)
        if 20 <= second <= 60:
            assert measured == known(200 / second, 80 * second / 20)
    assert measured == known()  # nothing in the last minute: who knows


def test_speed_of_answers_without_tokens_follows_their_lines() -> None:
    speed = Speed()
    speed.add(0.0, 0, 0)
    speed.add(10.0, 20, 0)
    assert speed.measured(100) == known(None, 40.0)


def test_answers_that_are_stored_just_now_do_not_lower_the_speed() -> None:
    speed = Speed()
    for second, lines, tokens, in_flight in ((0, 0, 0, 0), (10, 0, 0, 1000), (12, 0, 0, 0), (20, 100, 1200, 800)):
        speed.add(float(second), lines, tokens, InFlight(in_flight, 12.0))
        rate = speed.measured(200).tokens_per_second
        assert second == 0 or rate == max(1000, tokens + in_flight) / second
