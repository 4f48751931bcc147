"""Lines of a stored batch whose run is cancelled at any moment."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ktqueue.batches.line_runner import LineOptions, LineRunner
from ktqueue.batches.stored.execution import Execution, ExecutionParts
from ktqueue.batches.stored.segments import Segments
from ktqueue.batches.stored.validation import check_input
from ktqueue.batches.stored.window import Window
from ktqueue.broker.broker import Broker
from ktqueue.storage.folder import FileWriting, FolderStore

COUNT, SIZE = 12, 4  # lines, and places of the window
MOMENTS = 40


class RecordingStore(FolderStore):
    """A folder that remembers what was written under each name."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.written: dict[str, set[bytes]] = {}

    @contextlib.asynccontextmanager
    async def create(self, name: str) -> AsyncIterator[FileWriting]:
        """See `Store`."""
        async with super().create(name) as writing:
            yield writing
            await writing.flush()
            self.written.setdefault(name, set()).add(writing._file.path.read_bytes())


@pytest.fixture
def store(tmp_path: Path) -> RecordingStore:
    return RecordingStore(tmp_path)


async def execution(broker: Broker, store: RecordingStore, window: Window, token: str) -> Execution:
    """Lines that fail at once, since none of them can be a job."""
    lines = [
        {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": []}}
        for number in range(COUNT)
    ]
    async with store.create("files/in") as writing:
        await writing.write(b"\n".join(json.dumps(line).encode() for line in lines))

    async def served(_: str) -> None:
        return None

    async def commit(_: int) -> None:
        await asyncio.sleep(0)

    index = (await check_input(store, "files/in", "/v1/completions", served)).index
    runner = LineRunner(broker, LineOptions())
    parts = ExecutionParts(
        broker=broker,
        store=store,
        runner=runner,
        window=window,
        group=("a", "", "m"),
        input="files/in",
        endpoint="/v1/completions",
        run="b",
    )
    return Execution(parts, index, Segments(store, "batches/b/", COUNT), token=token, commit=commit)


async def cancel_after(work: "asyncio.Task[None]", moments: int) -> None:
    for _ in range(moments):
        await asyncio.sleep(0)
    work.cancel()
    await asyncio.wait([work])


async def test_no_place_of_the_window_is_lost_whenever_a_run_is_cancelled(
    broker: Broker, store: RecordingStore
) -> None:
    for moments in range(MOMENTS):
        window = Window(SIZE)
        run = await execution(broker, store, window, f"t{moments}")
        await cancel_after(asyncio.create_task(run.run(asyncio.Event())), moments)
        assert window.lines == 0, moments


async def test_a_segment_has_the_same_records_whenever_it_is_written(broker: Broker, store: RecordingStore) -> None:
    """A store may still write what was cancelled, after it has written what came later."""
    for moments in range(MOMENTS):
        run = await execution(broker, store, Window(SIZE), f"t{moments}")
        for place in range(COUNT):
            await run._line(place, [])
            await cancel_after(asyncio.create_task(run.flush()), moments if place % 2 else 0)
        await run.flush()
        assert run._segments.failed == COUNT
    repeated = {name: len(contents) for name, contents in store.written.items() if len(contents) > 1}
    assert repeated == {}
    assert len(store.written) > MOMENTS
