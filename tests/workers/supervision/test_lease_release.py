"""A supervisor releases the leases of a process that has exited, and of no other process."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.broker.models import process_name
from ktqueue.core.config import BrokerConfig
from ktqueue.core.events import JobState
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest
from ktqueue.workers.supervision.lease_release import release_leases_of

CARD = ModelCard(
    name="tale", created=1, max_model_len=512, vocab_size=256, architecture="test", quantization="none", max_num_seqs=4
)


@pytest.fixture
def config(broker_config: BrokerConfig) -> BrokerConfig:
    """Leases that do not expire during the test."""
    return replace(broker_config, lease_seconds=30.0)


async def test_the_leases_of_a_process_end_with_it(config: BrokerConfig) -> None:
    async with await Broker.open(config) as broker:
        lease = await Lease.register(broker, CARD)
        await release_leases_of(config, os.getpid() + 1, -signal.SIGKILL)
        assert [worker.worker_id for worker in await broker.models.workers()] == [lease.id]
        await release_leases_of(config, os.getpid(), -signal.SIGKILL)
        assert await broker.models.workers() == []
        await lease.close()


async def test_a_process_with_the_same_id_in_another_container_keeps_its_lease(
    config: BrokerConfig, tmp_path: Path
) -> None:
    other = tmp_path / "namespace"
    other.touch()
    async with await Broker.open(config) as broker:
        lease = await Lease.register(broker, CARD, process=process_name(os.getpid(), other))
        await release_leases_of(config, os.getpid(), -signal.SIGKILL)
        assert [worker.worker_id for worker in await broker.models.workers()] == [lease.id]
        await lease.close()


async def test_a_fault_of_the_machine_does_not_count_as_an_attempt(config: BrokerConfig) -> None:
    """SIGBUS comes from a truncated file or missing memory; SIGSEGV may come from the job."""
    attempts = config.max_attempts
    async with await Broker.open(config) as broker:
        await (await Lease.register(broker, CARD)).close()
        job = await broker.jobs.submit(GenerationRequest(model="tale", prompt="Once"))
        for number in [signal.SIGBUS] * attempts + [signal.SIGSEGV] * attempts:
            assert (await broker.jobs.get(job.id)).state is JobState.QUEUED
            lease = await Lease.register(broker, CARD)
            assert [claim.job_id for claim in await lease.claim(1)] == [job.id]
            await release_leases_of(config, os.getpid(), -number)
            await lease.close()
        record = await broker.jobs.get(job.id)
        assert (record.state, record.error and record.error.code) == (JobState.FAILED, "poison_job")
