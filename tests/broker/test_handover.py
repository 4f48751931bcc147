"""A job that is submitted while a worker waits is handed to it at once, to no other, and survives a lost message."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Claim, Lease
from ktqueue.core.config import BrokerConfig
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest, JobClass, SamplingParams
from ktqueue.core.tenants import TenantLimits

BIG = "x" * 70_000  # more than a message may contain
WARM = "Once upon a time there was a queue. " * 100


@pytest.fixture
async def other(broker: Broker, card: ModelCard) -> Any:
    lease = await Lease.register(broker, card)
    yield lease
    await lease.close()


async def handed_over(lease: Lease) -> list[Claim]:
    """Wait for the job that is handed over to the worker."""
    async with asyncio.timeout(10):
        while not (claims := await lease.wait_for_work(10)):
            pass  # woken for another reason
        return claims


async def lose_messages(lease: Any) -> None:
    """Drop everything that was published to the worker."""
    while (await lease.mailbox.take(0.2)).messages:
        pass


async def test_a_waiting_worker_gets_the_job_at_once(
    broker: Broker, lease: Lease, other: Any, make_request: Callable[..., GenerationRequest]
) -> None:
    assert await lease.claim(4, wait=True) == []
    record = await broker.jobs.submit(make_request(priority=3, expires_in=60))
    assert (record.state, record.worker_id, record.position) == (JobState.RUNNING, lease.id, None)
    assert await broker.jobs.get(record.id) == replace(record, tenant_usage=None)
    (claim,) = await handed_over(lease)
    assert (claim.job_id, claim.request, claim.attempt, claim.events) == (record.id, record.request, 1, [])
    assert claim.deadline == pytest.approx(time.monotonic() + 60, abs=1)
    assert claim.rank == pytest.approx(record.created_at + 3 * broker.config.priority_seconds)
    assert await other.claim(4) == await lease.claim(4) == []
    await lease.commit([(record.id, TokenEvent(seq=1, text="a")), (record.id, TokenEvent(seq=2, state=JobState.DONE))])
    assert (await broker.jobs.get(record.id)).state is JobState.DONE


async def test_a_handed_over_job_equals_a_claimed_one(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest]
) -> None:
    request = make_request(expires_in=60, sampling=SamplingParams(seed=1, n=2), metadata={"a": "b"})
    await lease.claim(4, wait=True)
    record = await broker.jobs.submit(request)
    (by_message,) = await handed_over(lease)
    await lease.release([record.id])
    (by_claim,) = await lease.claim(4)
    assert by_claim.deadline == pytest.approx(by_message.deadline, abs=1)
    assert replace(by_claim, deadline=by_message.deadline) == by_message


async def test_only_workers_that_wait_get_jobs_handed_over(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest]
) -> None:
    assert await lease.claim(4, wait=True) == []
    assert await lease.claim(4) == []
    assert (await broker.jobs.submit(make_request())).state is JobState.QUEUED


async def test_a_claim_is_answered_with_one_job(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest]
) -> None:
    await lease.claim(4, wait=True)
    records = [await broker.jobs.submit(make_request()) for _ in range(3)]
    assert [record.state for record in records] == [JobState.RUNNING, JobState.QUEUED, JobState.QUEUED]
    (first,) = await handed_over(lease)
    rest = await lease.claim(3, wait=True)
    assert [claim.job_id for claim in (first, *rest)] == [record.id for record in records]


async def test_after_a_lost_message_the_next_claim_returns_the_job(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest]
) -> None:
    await lease.claim(4, wait=True)
    record = await broker.jobs.submit(make_request())
    await lose_messages(lease)
    (claim,) = await lease.claim(4, wait=True)
    assert (claim.job_id, claim.attempt) == (record.id, 1)
    assert await lease.claim(4) == []


async def test_a_message_that_arrives_after_the_claim_is_ignored(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest]
) -> None:
    await lease.claim(4, wait=True)
    record = await broker.jobs.submit(make_request())
    (claim,) = await lease.claim(4, wait=True)
    assert claim.job_id == record.id
    assert await lease.wait_for_work(10) == []  # the message came too late
    assert await lease.claim(4, wait=True) == []
    again = await broker.jobs.submit(make_request())
    assert [one.job_id for one in await handed_over(lease)] == [again.id]


async def test_a_job_that_ended_before_the_worker_saw_it_is_not_claimed(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest]
) -> None:
    await lease.claim(4, wait=True)
    record = await broker.jobs.submit(make_request(expires_in=0.001))
    await lose_messages(lease)
    while not (await broker.jobs.get(record.id)).state.terminal:
        await broker.reaper().reap()
    assert await lease.claim(4, wait=True) == []
    later = await broker.jobs.submit(make_request())
    assert (await broker.jobs.get(later.id)).worker_id == lease.id


async def test_a_worker_whose_process_has_exited_gets_nothing(
    broker: Broker,
    config: BrokerConfig,
    lease: Lease,
    card: ModelCard,
    raw: Any,
    make_request: Callable[..., GenerationRequest],
) -> None:
    async with await Broker.open(config) as elsewhere:
        gone = await Lease.register(elsewhere, replace(card, max_num_seqs=64))
        await gone.claim(64, wait=True)
    while raw.pubsub_numsub(broker.keys.worker_channel(gone.id))[0][1]:
        pass  # the server has not noticed it yet
    record = await broker.jobs.submit(make_request())
    assert record.state is JobState.QUEUED
    assert [claim.job_id for claim in await lease.claim(4)] == [record.id]


async def test_a_cut_connection_loses_no_job(
    broker: Broker, lease: Lease, raw: Any, make_request: Callable[..., GenerationRequest]
) -> None:
    got = []
    for _ in range(10):
        while claims := await lease.claim(4, wait=True):
            got += claims
        raw.client_kill_filter(_type="pubsub")
        record = await broker.jobs.submit(make_request())
        while record.id not in [claim.job_id for claim in got]:
            got += await lease.wait_for_work(0.2) or await lease.claim(4, wait=True)
    assert len(got) == 10


async def test_a_worker_that_was_silent_for_long_gets_nothing(
    broker: Broker, lease: Lease, raw: Any, make_request: Callable[..., GenerationRequest]
) -> None:
    await lease.claim(4, wait=True)
    seconds, microseconds = raw.time()
    raw.zadd(f"{broker.keys.tag}:parked:tale", {lease.id: (seconds - 1) * 1_000_000 + microseconds - 1})
    assert (await broker.jobs.submit(make_request())).state is JobState.QUEUED


@pytest.mark.parametrize("job_class", list(JobClass))
async def test_a_submitted_job_does_not_overtake_waiting_jobs(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest], job_class: Any
) -> None:
    await lease.claim(4, wait=True)
    big = await broker.jobs.submit(make_request(BIG))
    small = await broker.jobs.submit(make_request(job_class=job_class))
    assert (big.state, small.state) == (JobState.QUEUED, JobState.QUEUED)
    claims = await lease.claim(4)
    assert {claim.job_id for claim in claims} == {big.id, small.id}


async def test_a_job_is_handed_only_to_a_worker_with_enough_rows(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest]
) -> None:
    await lease.claim(4, wait=True)
    assert (await broker.jobs.submit(make_request(sampling=SamplingParams(n=5)))).state is JobState.QUEUED


async def test_the_worker_with_the_longest_prefix_gets_the_job_then_the_one_with_most_rows(
    broker: Broker, lease: Lease, other: Any, make_request: Callable[..., GenerationRequest]
) -> None:
    async def ran(worker: Any, request: Any, rows: Any) -> Any:
        await worker.claim(rows, wait=True)
        record = await broker.jobs.submit(request)
        (claim,) = await handed_over(worker)
        await worker.commit([(claim.job_id, TokenEvent(seq=1, state=JobState.DONE))])
        return record.worker_id

    assert await ran(lease, make_request(WARM), 2) == lease.id
    await lease.claim(2, wait=True)
    await other.claim(8, wait=True)
    assert (await broker.jobs.submit(make_request(WARM + "More."))).worker_id == lease.id
    assert (await broker.jobs.submit(make_request())).worker_id == other.id
    await handed_over(lease)
    await handed_over(other)
    await lease.claim(1, wait=True)
    await other.claim(2, wait=True)
    assert (await broker.jobs.submit(make_request())).worker_id == other.id


async def test_a_job_waits_for_a_worker_with_its_prefix_instead_of_one_without(
    broker: Broker, lease: Lease, other: Any, make_request: Callable[..., GenerationRequest]
) -> None:
    await lease.claim(2, wait=True)
    warm = await broker.jobs.submit(make_request(WARM))
    await handed_over(lease)  # it has the prefix and a free row, but does not wait now
    await other.claim(8, wait=True)
    again = await broker.jobs.submit(make_request(WARM))
    assert (warm.worker_id, again.state) == (lease.id, JobState.QUEUED)
    assert [claim.job_id for claim in await lease.claim(1)] == [again.id]


async def test_a_claim_for_no_row_ends_the_wait(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest]
) -> None:
    await lease.claim(4, wait=True)
    assert await lease.claim(0) == []
    assert (await broker.jobs.submit(make_request())).state is JobState.QUEUED
    (claim,) = await lease.claim(1)
    await lease.commit([(claim.job_id, TokenEvent(seq=1, state=JobState.DONE))])
    await lease.claim(4, wait=True)
    record = await broker.jobs.submit(make_request())
    assert [claim.job_id for claim in await lease.claim(0)] == [record.id]


async def test_a_worker_that_leaves_returns_the_job_that_it_got(
    broker: Broker, lease: Lease, other: Any, make_request: Callable[..., GenerationRequest]
) -> None:
    await lease.claim(4, wait=True)
    record = await broker.jobs.submit(make_request())
    await lease.close()
    back = await broker.jobs.get(record.id)
    assert (back.state, back.attempts, back.worker_id) == (JobState.QUEUED, 0, None)
    assert [claim.job_id for claim in await other.claim(4)] == [record.id]


async def test_a_handed_over_job_counts_as_never_queued(
    broker: Broker, lease: Lease, raw: Any, make_request: Callable[..., GenerationRequest]
) -> None:
    await lease.claim(4, wait=True)
    record = await broker.jobs.submit(make_request(), tenant="acme", limits=TenantLimits())
    (load,) = await broker.jobs.tenant_loads(["acme"])
    assert (load.live, load.queued, load.queued_bytes) == (1, 0, 0)
    assert raw.exists(f"{broker.keys.tag}:waiting") == 0
    await lease.release([record.id])
    (load,) = await broker.jobs.tenant_loads(["acme"])
    assert (load.live, load.queued) == (1, 1)


async def test_a_submission_that_is_sent_twice_makes_one_job(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest]
) -> None:
    await lease.claim(4, wait=True)
    first = await broker.jobs.submit(make_request(), idempotency_key="k")
    (claim,) = await handed_over(lease)
    await lease.claim(3, wait=True)
    again = await broker.jobs.submit(make_request(), idempotency_key="k")
    assert again.id == first.id == claim.job_id
    assert again.state is JobState.RUNNING
    assert await lease.claim(3) == []
