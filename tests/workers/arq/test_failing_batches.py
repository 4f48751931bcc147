"""Batches whose owners fail by an error that nobody expects."""

import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from stored_batches import create, outputs, put, until, until_released

from ktqueue.batches.run import LEAST_WINDOW
from ktqueue.batches.stored.batch import Owner, StoredBatch
from ktqueue.batches.stored.window import Window
from ktqueue.broker.batches import BatchLease, BatchStatus
from ktqueue.broker.broker import Broker
from ktqueue.core.config import Config
from ktqueue.storage.folder import FileWriting, FolderStore
from ktqueue.workers.arq.batch_owner import BatchOwner

pytestmark = pytest.mark.usefixtures("short_times")


class BrokenStore(FolderStore):
    """A folder in which objects whose names match `broken` cannot be written, for a reason that nobody expects.

    `allowed`: how many of them can be written before.
    """

    broken = ""
    allowed = 0

    @contextlib.asynccontextmanager
    async def create(self, name: str) -> AsyncIterator[FileWriting]:
        """See `Store`. Raises ZeroDivisionError."""
        if self.broken and re.search(self.broken, name):
            self.allowed -= 1
            if self.allowed < 0:
                raise ZeroDivisionError(name)
        async with super().create(name) as writing:
            yield writing


@pytest.fixture
def store(tmp_path: Path) -> BrokenStore:
    return BrokenStore(tmp_path)


@pytest.fixture
async def owner(broker: Broker, store: BrokenStore) -> AsyncIterator[None]:
    """An owner that runs a batch again half a second after it has failed."""
    async with await Broker.open(replace(broker.config, lease_seconds=0.1)) as quick:
        task = asyncio.create_task(BatchOwner(quick, store, Config(broker=quick.config)).run())
        yield
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.usefixtures("owner")
@pytest.mark.parametrize("broken", ["index", "out-", "files/"])
async def test_a_batch_that_fails_again_and_again_without_progress_ends(
    broker: Broker, store: BrokenStore, start_worker: Any, broken: str
) -> None:
    await put(store, 30, max_tokens=100, ignore_eos=True)
    store.broken = broken
    store.allowed = 100 if broken == "out-" else 0
    batch_id = await create(broker)
    if broken == "out-":
        wrong = LEAST_WINDOW // 4  # lines of those that begin before others have ended
        await until(broker, batch_id, lambda record: record.facts.failed == wrong)
        store.allowed = 1  # segment, of answers
    async with start_worker():
        await until(broker, batch_id, lambda record: record.status is BatchStatus.FAILED)
        await until_released(broker)
    record = await broker.batches.get("default", batch_id)
    (error,) = record.facts.errors
    assert error["code"] == "internal_error"
    assert error["message"].startswith("the batch failed 3 times without progress; it is not tried again")
    assert all(job.state.terminal for job in await broker.jobs.list())
    if broken == "files/":  # what is done can be given to nobody, so it is left to the operator
        assert (record.facts.output_file_id, record.facts.error_file_id, record.facts.answered) == (None, None, 0)
        assert [name for name in await store.names("batches/") if "/out-" in name]
        return
    answered, failed = await outputs(broker, store, record)
    codes = [line["error"]["code"] for line in failed if line["error"] is not None]
    if broken == "index":
        assert (answered, failed) == ([], [])
    else:
        assert (set(codes), len(answered) + len(failed)) == ({"batch_failed"}, 30)
        assert 1 <= len(answered) < 24


DEADLY = """
import asyncio, os, signal, sys
from pathlib import Path
from ktqueue.broker.broker import Broker
from ktqueue.core.config import BrokerConfig, Config
from ktqueue.storage.folder import FolderStore
from ktqueue.workers.arq.batch_owner import BatchOwner

class DeadlyStore(FolderStore):
    def create(self, name):
        if name.endswith("index"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().create(name)

async def main(url, prefix, folder):
    config = BrokerConfig(url=url, prefix=prefix, lease_seconds=0.1)
    async with await Broker.open(config) as broker:
        await BatchOwner(broker, DeadlyStore(Path(folder)), Config(broker=config)).run()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_batch_that_kills_its_owners_ends(
    broker: Broker, store: BrokenStore, start_worker: Any, tmp_path: Path
) -> None:
    await put(store, 3)
    batch_id = await create(broker)
    arguments = (broker.config.url or "", broker.config.prefix, str(tmp_path))
    deaths = 0
    async with start_worker(), asyncio.timeout(60):
        while True:
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", DEADLY, *arguments)
            died = asyncio.create_task(process.wait())
            ended = asyncio.create_task(until(broker, batch_id, lambda record: record.status.ended))
            await asyncio.wait({died, ended}, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            if not died.done():
                await until_released(broker)
                process.terminate()
                await died
                break
            deaths += died.result() == -signal.SIGKILL
    record = await broker.batches.get("default", batch_id)
    assert (deaths, record.status) == (2 + 3, BatchStatus.FAILED)
    assert record.facts.errors[0]["message"].startswith("the batch failed 3 times without progress")


async def test_progress_ends_a_row_of_failures(broker: Broker, store: BrokenStore, start_worker: Any) -> None:
    await put(store, 12)
    batch_id = await create(broker)

    async def take() -> tuple[BatchLease, StoredBatch]:
        found = await broker.batches.take("test")
        assert found is not None
        return found[0], StoredBatch(Owner(broker, store, Window(12), 3_600.0), *found, None)

    async def failures() -> int:
        lease, run = await take()
        with pytest.raises(ZeroDivisionError):
            await run.run()
        await run.note_failure()
        await broker.batches.release(lease, is_clean=False)
        return (await broker.batches.get("default", batch_id)).failures_without_progress

    store.broken = "index"
    assert [await failures() for _ in range(2)] == [1, 2]
    store.broken = ""
    failing = asyncio.create_task(failures())
    await until(broker, batch_id, lambda record: record.facts.failed == 2)  # in one segment or two
    store.broken = "/out-"
    async with start_worker():
        assert await failing == 1
        store.broken = ""
        await (await take())[1].run()
    record = await broker.batches.get("default", batch_id)
    assert (record.status, record.facts.answered) == (BatchStatus.COMPLETED, 10)


@pytest.mark.usefixtures("owner")
async def test_a_batch_with_a_damaged_record_holds_up_no_other(
    broker: Broker, store: BrokenStore, start_worker: Any, redis_direct: str, caplog: pytest.LogCaptureFixture
) -> None:
    await put(store, 3)
    spoilt, good = [await create(broker) for _ in range(2)]
    with redis.Redis.from_url(redis_direct) as client:
        client.hset(f"{broker.keys.tag}:batch:{spoilt}", "created", "now")
    async with start_worker():
        await until(broker, good, lambda record: record.status is BatchStatus.COMPLETED)
        await until(broker, good, lambda _: "it is put aside" in caplog.text)
    assert caplog.text.count(f"the record of batch {spoilt} is damaged") == 3


@pytest.mark.usefixtures("owner")
async def test_what_cannot_be_deleted_is_left(
    broker: Broker, store: BrokenStore, start_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def delete(name: str) -> None:
        raise ZeroDivisionError(name)

    monkeypatch.setattr(store, "delete", delete)
    await put(store, 3)
    batch_id = await create(broker)
    async with start_worker():
        await until_released(broker)
    record = await broker.batches.get("default", batch_id)
    assert (record.status, record.facts.answered, record.facts.errors) == (BatchStatus.COMPLETED, 3, ())
