"""A key of another type under one of our names ends no worker, and none of them spins: see tests/broker too."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from ktqueue.broker.broker import Broker
from ktqueue.core.config import Config
from ktqueue.core.events import JobState
from ktqueue.core.request import GenerationRequest, SamplingParams
from ktqueue.storage.folder import FolderStore
from ktqueue.workers.arq.batch_owner import BatchOwner


@pytest.fixture
def spoil(broker: Broker, redis_direct: str) -> Iterator[Callable[[str], Callable[[], None]]]:
    """`mend = spoil(name)` replaces a key by a list until `mend()`."""
    with redis.Redis.from_url(redis_direct) as client:

        def replace(name: str) -> Callable[[], None]:
            key = f"{broker.keys.tag}:{name}"
            client.delete(key)
            client.rpush(key, "foreign")

            def mend() -> None:
                client.delete(key)

            return mend

        yield replace


@pytest.mark.parametrize("name", ["leases", "deadlines", "models"])
async def test_a_worker_waits_until_the_key_is_gone(
    name: str, spoil: Any, broker: Broker, start_worker: Any, finished: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with start_worker() as running:
        mend = spoil(name)
        await asyncio.sleep(3.0)
        assert not running.task.done()
        mend()
        lines = [record for record in caplog.records if record.name.startswith("ktqueue.")]
        assert len(lines) < 20 and "Traceback" not in caplog.text
        request = GenerationRequest(model="demo", prompt="The", sampling=SamplingParams(max_tokens=4))
        job = await broker.jobs.submit(request)
        assert (await finished(job.id)).state is JobState.DONE


async def test_an_owner_of_batches_waits_until_the_key_is_gone(
    spoil: Any, broker: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mend = spoil("batches")
    task = asyncio.create_task(BatchOwner(broker, FolderStore(tmp_path), Config(broker=broker.config)).run())
    await asyncio.sleep(1.5)
    mend()
    assert not task.done()
    assert caplog.text.count("batches wait: WRONGTYPE") == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
