"""Batches with a real model: every line once and in order, whatever ends the batch and whenever an owner dies."""

import asyncio
import contextlib
import gc
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from mortal import Death, Mortal
from stored_batches import INPUT, content, create, outputs, put, until, until_clean

from ktqueue.batches.stored import batch
from ktqueue.batches.stored.batch import Owner, StoredBatch
from ktqueue.batches.stored.window import Window
from ktqueue.broker.batches import BatchLease, BatchRecord, BatchRequest, BatchStatus
from ktqueue.broker.broker import Broker
from ktqueue.core.config import Config, StorageConfig
from ktqueue.core.errors import LeaseLost
from ktqueue.core.tenants import TenantLimits
from ktqueue.storage.folder import FolderStore
from ktqueue.storage.store import Store
from ktqueue.workers.arq.batch_owner import BatchOwner
from ktqueue.workers.arq.control import worker_for

pytestmark = pytest.mark.usefixtures("short_times")

DEATHS = 24
LAST_CALLS = ("cards", "add", "release", "delete", "forget")  # some owners die at these


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return FolderStore(tmp_path)


@pytest.fixture
def free(broker: Broker) -> Callable[[], int]:
    """End the leases of all batches now, as if their owners had been dead for long. Returns the number of batches."""

    def end() -> int:
        with redis.Redis.from_url(broker.config.url or "") as client:
            found = client.zrange(f"{broker.keys.tag}:batches", 0, -1)
            for batch_id in found:
                client.zadd(f"{broker.keys.tag}:batches", {batch_id: 1})
        return len(found)

    return end


async def taken(broker: Broker, free: Callable[[], int] = lambda: 0) -> tuple[BatchLease, BatchRecord]:
    """Take the batch. `free` is called again and again, since a call of a dead owner may still renew its lease."""
    async with asyncio.timeout(10):
        while (found := await broker.batches.take("test")) is None:
            await asyncio.sleep(0.01)
            free()
    return found


def owned(broker: Any, store: Any, lease: BatchLease, record: BatchRecord, **options: Any) -> StoredBatch:
    return StoredBatch(Owner(broker, store, Window(4), 3_600.0), lease, record, options.get("limits"))


def texts(lines: list[Any]) -> list[tuple[str, str]]:
    return [(line["custom_id"], line["response"]["body"]["choices"][0]["text"]) for line in lines]


async def test_every_death_of_an_owner_gives_the_same_files(
    broker: Broker, store: Store, start_worker: Any, free: Callable[[], int]
) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # nobody asks for the results of dead tasks
    await put(store, 12)
    draw = random.Random(3)
    async with start_worker():
        batch_id = await create(broker)
        counted = [1e6]
        await owned(Mortal(broker, counted), Mortal(store, counted), *await taken(broker)).run()
        expected, failed = await outputs(broker, store, await broker.batches.get("default", batch_id))
        assert [line["custom_id"] for line in expected] == [f"c{number}" for number in range(12) if number % 5 != 3]
        assert [line["custom_id"] for line in failed] == ["c3", "c8"]
        assert {line["response"]["status_code"] for line in failed} == {400}
        steps = int(1e6 - counted[0])
        statuses = set()
        for number in range(DEATHS):
            for name in await store.names("files/"):
                if name != f"files/{INPUT}":
                    await store.delete(name)
            batch_id = await create(broker)
            last = LAST_CALLS[number] if number < len(LAST_CALLS) else ""
            for calls in (2 + steps * number // DEATHS, draw.randint(1, steps)):  # two owners die one after the other
                life = [float(calls) if not last else 1e6]
                parts = (Mortal(broker, life, last), Mortal(store, life, last))
                with contextlib.suppress(Death, BaseExceptionGroup):
                    await owned(*parts, *await taken(broker, free)).run()
                statuses.add((await broker.batches.get("default", batch_id)).status)
                if not free():
                    break
            else:
                await owned(broker, store, *await taken(broker, free)).run()
            record = await broker.batches.get("default", batch_id)
            answered, failed_again = await outputs(broker, store, record)
            assert texts(answered) == texts(expected)
            assert [line["custom_id"] for line in failed_again] == ["c3", "c8"]
            assert record.status is BatchStatus.COMPLETED
    gc.collect()  # while the handler above is there
    assert {BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING} <= statuses


async def test_the_time_left_is_known_before_any_line_has_ended(
    broker: Broker, store: Store, start_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "BEATS", 100)
    await put(store, 8, max_tokens=400, n=4, ignore_eos=True)
    async with start_worker():
        batch_id = await create(broker)
        running_batch = asyncio.create_task(owned(broker, store, *await taken(broker)).run())
        # Not `seconds_left`: the line that fails at once gives that too, before there are any tokens.
        await until(broker, batch_id, lambda record: record.speed.tokens_per_second is not None)
        record = await broker.batches.get("default", batch_id)
        assert record.facts.answered == 0
        rate, left, running = record.speed.tokens_per_second, record.speed.seconds_left, record.speed.running
        assert rate
        assert left
        assert running, "tokens of lines in flight are counted, not only those of lines that have ended"
        assert 0 < rate * left < 8 * 4 * 400
    running_batch.cancel()
    await asyncio.gather(running_batch, return_exceptions=True)


async def test_a_batch_that_stands_still_says_that_it_takes_longer(
    broker: Broker, store: Store, start_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "BEATS", 100)
    await put(store, 3000, max_tokens=16)  # more than a worker answers meanwhile
    async with start_worker():
        batch_id = await create(broker)
        running = asyncio.create_task(owned(broker, store, *await taken(broker)).run())
        await until(broker, batch_id, lambda record: record.speed.seconds_left is not None)
    left = (await broker.batches.get("default", batch_id)).speed.seconds_left or 0.0
    await until(broker, batch_id, lambda record: (record.speed.seconds_left or 0.0) > 2 * left)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_custom_id_splits_no_line_of_the_files(broker: Broker, store: Store, start_worker: Any) -> None:
    await put(store, 4, suffix="\x85\u2028\u2029")
    async with start_worker():
        batch_id = await create(broker)
        await owned(broker, store, *await taken(broker)).run()
    answered, failed = await outputs(broker, store, await broker.batches.get("default", batch_id))
    names = [line["custom_id"] for line in answered + failed]
    assert names == [f"c{number}\x85\u2028\u2029" for number in range(4)]


async def test_a_cancelled_batch_keeps_what_is_done(
    broker: Broker, store: Store, start_worker: Any, tmp_path: Path
) -> None:
    await put(store, 40, max_tokens=40, ignore_eos=True)
    batch_id = await create(broker)
    config = Config(broker=broker.config, storage=StorageConfig(location=str(tmp_path)))
    service = worker_for(broker, config, "redis+cluster://127.0.0.1:1")  # arq does not know clusters
    owner = asyncio.create_task(service.async_run())
    async with start_worker():
        await until(broker, batch_id, lambda record: record.facts.answered >= 4)
        await broker.batches.cancel("default", batch_id)
        await until(broker, batch_id, lambda record: record.status is BatchStatus.CANCELLED)
        await until_clean(store)
        record = await broker.batches.get("default", batch_id)
        answered, failed = await outputs(broker, store, record)
        assert 4 <= len(answered) < 32
        codes = [line["error"]["code"] for line in failed if line["error"] is not None]
        assert set(codes) == {"batch_cancelled"}
        assert len(answered) + len(failed) == 40
        assert all(job.state.terminal for job in await broker.jobs.list())
    owner.cancel()


@pytest.mark.parametrize("taken_over", [False, True])
async def test_a_late_batch_expires(broker: Broker, store: Store, free: Callable[[], int], taken_over: bool) -> None:
    await put(store, 6)
    batch_id = await create(broker, 0.5)
    owner = asyncio.create_task(BatchOwner(broker, store, Config(broker=broker.config)).run())  # there is no worker
    if taken_over:
        await until(broker, batch_id, lambda record: record.status is BatchStatus.IN_PROGRESS)
        owner.cancel()
        await asyncio.wait([owner])
        await asyncio.sleep(0.6)
        owner = asyncio.create_task(BatchOwner(broker, store, Config(broker=broker.config)).run())
    await until(broker, batch_id, lambda record: record.status is BatchStatus.EXPIRED)
    await until_clean(store)
    owner.cancel()
    await asyncio.wait([owner])
    answered, failed = await outputs(broker, store, await broker.batches.get("default", batch_id))
    assert answered == []
    assert [line["custom_id"] for line in failed] == [f"c{number}" for number in range(6)]
    assert [line["error"] and line["error"]["code"] for line in failed].count("batch_expired") >= 5
    assert all(job.state.terminal for job in await broker.jobs.list())


async def test_limits_of_the_tenant_slow_its_lines_down(broker: Broker, store: Store, start_worker: Any) -> None:
    await put(store, 8)
    batch_id = await create(broker, tenant="slow")
    limits = TenantLimits(max_live_jobs=1, requests_per_minute=600, requests_burst=1)
    async with start_worker():
        await owned(broker, store, *await taken(broker), limits=limits).run()
    answered, failed = await outputs(broker, store, await broker.batches.get("slow", batch_id))
    assert (len(answered), len(failed)) == (7, 1)


async def test_an_owner_that_stalled_changes_nothing(
    broker: Broker, store: Store, start_worker: Any, free: Callable[[], int]
) -> None:
    await put(store, 30, max_tokens=30, ignore_eos=True)
    batch_id = await create(broker)
    async with start_worker():
        stalled = asyncio.create_task(owned(broker, store, *await taken(broker)).run())
        await until(broker, batch_id, lambda record: record.facts.answered >= 2)
        free()
        await owned(broker, store, *await taken(broker)).run()
        with pytest.raises(LeaseLost):
            await stalled
    answered, failed = await outputs(broker, store, await broker.batches.get("default", batch_id))
    assert [line["custom_id"] for line in answered] == [f"c{number}" for number in range(30) if number % 5 != 3]
    assert len(failed) == 6


async def test_an_end_that_redis_forgets_comes_again_without_running_a_line_twice(
    broker: Broker, store: Store, start_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis dies just after the batch has ended, and comes back without its last second."""
    monkeypatch.setattr(batch, "SETTLE_SECONDS", 0.5)
    await put(store, 5, seed=None)
    batch_id = await create(broker)
    key, older = f"{broker.keys.tag}:batch:{batch_id}", {}
    async with start_worker():
        run = asyncio.create_task(owned(broker, store, *await taken(broker)).run())
        with redis.Redis.from_url(broker.config.url or "") as client:
            while (record := client.hgetall(key))[b"status"] != b"completed":
                older = record
                await asyncio.sleep(0)
            first = await broker.batches.get("default", batch_id)
            texts_before = await content(store, first.facts.output_file_id)
            client.delete(key)
            client.hset(key, mapping=older)
        await run
    record = await broker.batches.get("default", batch_id)
    assert record.status is BatchStatus.COMPLETED
    await outputs(broker, store, record)
    assert await content(store, record.facts.output_file_id) == texts_before


async def test_a_batch_that_ended_just_before_its_owner_left_is_cleaned_by_the_next(
    broker: Broker, store: Store, start_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(store, 5)
    batch_id = await create(broker)
    monkeypatch.setattr(batch, "SETTLE_SECONDS", 60.0)
    first = owned(broker, store, *await taken(broker))
    async with start_worker():
        run = asyncio.create_task(first.run())
        await until(broker, batch_id, lambda record: record.status is BatchStatus.COMPLETED)
    run.cancel()
    await asyncio.wait([run])
    await first.leave()
    assert await store.names("batches/")
    monkeypatch.setattr(batch, "SETTLE_SECONDS", 0.01)
    await owned(broker, store, *await taken(broker)).run()
    await outputs(broker, store, await broker.batches.get("default", batch_id))
    assert await broker.batches.take("other") is None


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_batch_whose_store_was_emptied_says_so(
    broker: Broker, store: Store, start_worker: Any, *, cancelled: bool
) -> None:
    await put(store, 30, max_tokens=30, ignore_eos=True)
    batch_id = await create(broker)
    async with start_worker():
        first = owned(broker, store, *await taken(broker))
        run = asyncio.create_task(first.run())
        await until(broker, batch_id, lambda record: record.facts.answered >= 2)
        run.cancel()
        await asyncio.wait([run])
        await first.leave()
        for name in [*await store.names("files/"), *await store.names("batches/")]:
            await store.delete(name)
        if cancelled:
            await broker.batches.cancel("default", batch_id)
        await owned(broker, store, *await taken(broker)).run()
    record = await broker.batches.get("default", batch_id)
    assert record.status is (BatchStatus.CANCELLED if cancelled else BatchStatus.FAILED)
    assert [error["code"] for error in record.facts.errors] == ["file_not_found"]
    assert (record.facts.total, record.facts.answered, record.facts.failed) == (30, 0, 0)


async def test_a_full_store_is_waited_for(
    broker: Broker, store: Store, start_worker: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await put(store, 5)
    batch_id = await create(broker)
    full = FolderStore(tmp_path, min_free_bytes=1 << 60)
    async with start_worker():
        run = asyncio.create_task(owned(broker, full, *await taken(broker)).run())
        await asyncio.sleep(1.5)
        assert (await broker.batches.get("default", batch_id)).status is BatchStatus.VALIDATING
        full._min_free_bytes = 0
        await run
    assert (await broker.batches.get("default", batch_id)).status is BatchStatus.COMPLETED
    assert len([record for record in caplog.records if "storage.min_free_bytes" in record.message]) == 1


async def test_a_batch_that_was_cancelled_before_anything_ran_has_no_files(broker: Broker, store: Store) -> None:
    await put(store, 5)
    batch_id = await create(broker)
    await broker.batches.cancel("default", batch_id)
    await owned(broker, store, *await taken(broker)).run()
    record = await broker.batches.get("default", batch_id)
    assert (record.status, record.facts.total) == (BatchStatus.CANCELLED, 0)
    assert await outputs(broker, store, record) == ([], [])


SAY = [{"role": "user", "content": "Tell a tale."}]


@pytest.mark.parametrize(
    ("endpoint", "body", "wrong", "kind"),
    [
        ("/v1/chat/completions", {"messages": SAY, "max_completion_tokens": 4}, {"messages": []}, "chat.completion"),
        ("/v1/completions", {"prompt": ["A", "B"], "max_tokens": 4}, {"prompt": []}, "text_completion"),
        ("/v1/responses", {"input": "Tell.", "max_output_tokens": 4}, {"previous_response_id": "resp_1"}, "response"),
        ("/v1/messages", {"messages": SAY, "max_tokens": 4}, {"messages": []}, "message"),
    ],
)
async def test_lines_of_every_endpoint_have_its_answers_and_errors(
    broker: Broker, store: Store, start_worker: Any, endpoint: str, body: Any, wrong: Any, kind: str
) -> None:
    async with store.create(f"files/{INPUT}") as writing:
        for name, more in (("good", {}), ("bad", wrong)):
            line = {"custom_id": name, "method": "POST", "url": endpoint, "body": {"model": "demo", **body, **more}}
            await writing.write(json.dumps(line).encode() + b"\n")
    request = BatchRequest(input_file_id=INPUT, endpoint=endpoint, completion_window="1h")
    batch_id = (await broker.batches.create(request, window_seconds=60.0, tenant="default")).id
    async with start_worker():
        await owned(broker, store, *await taken(broker)).run()
    record = await broker.batches.get("default", batch_id)
    (good,), (bad,) = await outputs(broker, store, record)
    answer, refusal = good["response"]["body"], bad["response"]
    assert kind in (answer.get("object"), answer.get("type"))
    assert refusal["status_code"] == 400
    assert refusal["body"]["error"]["param"] == next(iter(wrong))
    assert refusal["body"].get("type") == ("error" if kind == "message" else None)
    assert record.facts.usage.completion == (8 if kind == "text_completion" else 4)
