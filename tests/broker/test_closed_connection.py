"""A process that dies closes its connections: its jobs go on before its lease ends. Who stands still keeps both."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import pytest
from required import required

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.core.config import BrokerConfig
from ktqueue.core.events import JobState
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest

LEASE_SECONDS = 4.0
WORKER = """
import asyncio, sys
from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.core.config import BrokerConfig
from ktqueue.core.model_card import ModelCard

async def main(url, seconds):
    async with await Broker.open(BrokerConfig(url=url, lease_seconds=seconds)) as broker:
        card = ModelCard(name="tale", created=1, max_model_len=512, vocab_size=256, architecture="test",
                         quantization="none", max_num_seqs=32)
        lease = await Lease.register(broker, card)
        while not await lease.claim(1):
            await lease.wait_for_work(0.1)
        while True:
            await lease.beat({})
            print(lease.id, flush=True)
            await asyncio.sleep(seconds / 4)

asyncio.run(main(sys.argv[1], float(sys.argv[2])))
"""


class Silence:
    """Looks at leases by the server's clock while reapers are at work."""

    def __init__(self, broker: Broker, raw: Any) -> None:
        self._broker, self._raw = broker, raw

    def left(self, worker: str) -> float | None:
        """Seconds of its lease; None: it has none."""
        (seconds, microseconds), expiry = self._raw.time(), self._raw.zscore(f"{self._broker.keys.tag}:leases", worker)
        return None if expiry is None else expiry / 1e6 - seconds - microseconds / 1e6

    async def of_channel(self, worker: str) -> None:
        """Wait until the server knows of no subscription of the worker: it learns later than who ends it."""
        async with asyncio.timeout(20):
            while self._raw.pubsub_numsub(f"{self._broker.keys.tag}:worker:{worker}")[0][1]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def until(self, worker: str, share: float) -> float | None:
        """Reap until the worker has lost its lease (None), or has no more than this share of it; what it has."""
        while (left := self.left(worker)) is not None and left > share * self._broker.config.lease_seconds:
            await self._broker.reaper().reap()
            await asyncio.sleep(0.05)
        return left


@pytest.fixture
def config(broker_config: BrokerConfig) -> BrokerConfig:
    return replace(broker_config, lease_seconds=LEASE_SECONDS)


@pytest.fixture
def silence(broker: Broker, raw: Any) -> Any:
    return Silence(broker, raw)


@dataclass(frozen=True)
class WorkerProcess:
    """Another process that holds a lease, and prints the lease's id each time it renews it."""

    pid: int
    output: IO[str]

    def lease_id(self) -> str:
        """Wait for the next renewal and return the lease's id."""
        return self.output.readline().strip()


@contextlib.contextmanager
def worker(broker: Broker) -> Iterator[WorkerProcess]:
    """A process that claims one job and renews its lease until it is killed."""
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, required(broker.config.url, "the URL"), str(LEASE_SECONDS)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
    )
    try:
        assert process.stdout is not None
        yield WorkerProcess(process.pid, process.stdout)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


async def test_the_jobs_of_a_killed_process_go_on_before_its_lease_ends(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest], silence: Any
) -> None:
    await (await Lease.register(broker, card)).close()  # makes the model known
    job = await broker.jobs.submit(make_request())
    with worker(broker) as process:
        holder = await asyncio.to_thread(process.lease_id)
        os.kill(process.pid, signal.SIGKILL)
        assert await silence.until(holder, 0.1) is None
    after = await broker.jobs.get(job.id)
    assert (after.state, after.attempts) == (JobState.QUEUED, 1)


async def test_a_process_that_stands_still_keeps_its_lease_to_the_end(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest], silence: Any
) -> None:
    await (await Lease.register(broker, card)).close()
    job = await broker.jobs.submit(make_request())
    with worker(broker) as process:
        holder = await asyncio.to_thread(process.lease_id)
        os.kill(process.pid, signal.SIGSTOP)
        assert await silence.until(holder, 0.5) is not None
        assert (await broker.jobs.get(job.id)).state is JobState.RUNNING


@pytest.fixture
async def far(config: BrokerConfig, card: ModelCard) -> Any:
    """A lease over connections of its own, and how to cut these for ever."""
    elsewhere = await Broker.open(config)
    lease = await Lease.register(elsewhere, card)
    yield lease, elsewhere.close
    await elsewhere.close()


async def test_nothing_is_taken_before_a_beat_is_missed(broker: Broker, far: Any, silence: Any) -> None:
    lease, cut = far
    await lease.beat({})
    await cut()
    assert (await silence.until(lease.id, 0.7)) is not None


async def test_who_beats_without_a_subscription_keeps_its_lease(far: Any, silence: Any) -> None:
    lease, _ = far
    await lease.beat({})
    await lease._broker.hub.close()
    await silence.of_channel(lease.id)
    await lease.beat({})
    assert (await silence.until(lease.id, 0.5)) is not None


async def test_a_server_that_was_away_knows_of_no_connection(broker: Broker, far: Any, silence: Any, raw: Any) -> None:
    lease, cut = far
    await lease.beat({})
    raw.hset(f"{broker.keys.tag}:worker:{lease.id}", "home", "the server before")
    await cut()
    assert (await silence.until(lease.id, 0.5)) is not None
