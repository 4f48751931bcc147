"""A dead process has closed its connections, so its jobs are queued before its lease ends. A stopped one keeps both."""

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
    """Watches leases by the server's clock while it calls the reaper."""

    def __init__(self, broker: Broker, raw: Any) -> None:
        self._broker, self._raw = broker, raw

    def left(self, worker: str) -> float | None:
        """Remaining seconds of a worker's lease, or None if it has no lease."""
        (seconds, microseconds), expiry = self._raw.time(), self._raw.zscore(f"{self._broker.keys.tag}:leases", worker)
        return None if expiry is None else expiry / 1e6 - seconds - microseconds / 1e6

    async def of_channel(self, worker: str) -> None:
        """Wait until the server has noticed the end of the worker's subscription, which takes a moment."""
        async with asyncio.timeout(20):
            while self._raw.pubsub_numsub(f"{self._broker.keys.tag}:worker:{worker}")[0][1]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def until(self, worker: str, share: float) -> float | None:
        """Reap until the worker has lost its lease or has at most `share` of it. Returns the seconds left, or None."""
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


async def test_the_jobs_of_a_killed_process_are_queued_before_its_lease_ends(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest], silence: Any
) -> None:
    await (await Lease.register(broker, card)).close()  # the model is known from here on
    job = await broker.jobs.submit(make_request())
    with worker(broker) as process:
        holder = await asyncio.to_thread(process.lease_id)
        os.kill(process.pid, signal.SIGKILL)
        assert await silence.until(holder, 0.1) is None
    after = await broker.jobs.get(job.id)
    assert (after.state, after.attempts) == (JobState.QUEUED, 1)


async def test_a_stopped_process_keeps_its_lease_until_it_expires(
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
    """A lease over separate connections, and the broker that these belong to."""
    elsewhere = await Broker.open(config)
    lease = await Lease.register(elsewhere, card)
    yield lease, elsewhere
    await elsewhere.close()


async def test_a_closed_connection_ends_no_lease_before_a_renewal_is_missed(
    broker: Broker, far: Any, silence: Any
) -> None:
    lease, elsewhere = far
    await lease.beat({})
    await elsewhere.close()
    assert (await silence.until(lease.id, 0.7)) is not None


async def test_a_worker_that_renews_without_a_subscription_keeps_its_lease(far: Any, silence: Any) -> None:
    lease, elsewhere = far
    await lease.beat({})
    await elsewhere.hub.close()
    await silence.of_channel(lease.id)
    await lease.beat({})
    assert (await silence.until(lease.id, 0.5)) is not None


async def test_a_restarted_server_draws_no_conclusion_from_missing_connections(
    broker: Broker, far: Any, silence: Any, raw: Any
) -> None:
    lease, elsewhere = far
    await lease.beat({})
    raw.hset(f"{broker.keys.tag}:worker:{lease.id}", "home", "the server before")
    await elsewhere.close()
    assert (await silence.until(lease.id, 0.5)) is not None
