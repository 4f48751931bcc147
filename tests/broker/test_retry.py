"""A failed job is retried once, as a new job."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from required import error_of

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.client import Client
from ktqueue.core.errors import InvalidRequest, JobConflict, JobNotFound, KtqueueError, PoisonJob, TenantLimitReached
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.core.request import GenerationRequest
from ktqueue.core.tenants import TenantLimits


@pytest.fixture
def claim_and_fail(lease: Lease) -> Callable[..., Awaitable[None]]:
    async def claim(job_id: str, error: KtqueueError | None = None) -> None:
        assert [claim.job_id for claim in await lease.claim(1)] == [job_id]
        last = TokenEvent(seq=2, state=JobState.FAILED, error=(error or PoisonJob("again and again")).info())
        await lease.commit([(job_id, TokenEvent(seq=1, text="a")), (job_id, last)])

    return claim


@pytest.fixture
def fail(
    broker: Broker, make_request: Callable[..., GenerationRequest], claim_and_fail: Callable[..., Awaitable[None]]
) -> Callable[..., Awaitable[None]]:
    async def submit_and_fail(job_id: str, error: KtqueueError | None = None, **options: Any) -> None:
        await broker.jobs.submit(make_request(job_id), job_id=job_id, **options)
        await claim_and_fail(job_id, error)

    return submit_and_fail


async def test_a_failed_job_is_retried_once(
    broker: Broker,
    lease: Lease,
    fail: Any,
    claim_and_fail: Any,
    make_request: Callable[..., GenerationRequest],
    raw: Any,
) -> None:
    await fail("a", tenant="acme")
    before = await broker.jobs.get("a")
    async with Client(config=broker.config) as client:
        again = await client.retry("a")
        assert (again.id, again.state, again.tenant, again.attempts) == ("a-r2", JobState.QUEUED, "acme", 0)
        assert again.request == before.request
        old = await broker.jobs.get("a")
        assert (old.state, error_of(old).code, old.retried_as) == (JobState.FAILED, "poison_job", "a-r2")
        assert old.request_dropped
        assert raw.exists(f"{broker.keys.tag}:failed") == 0
        raw.hdel(f"{broker.keys.tag}:job:a", "retried")  # as if the process had died before it wrote this
        raw.hset(f"{broker.keys.tag}:job:a", "request", raw.hget(f"{broker.keys.tag}:job:a-r2", "request"))
        raw.hdel(f"{broker.keys.tag}:job:a", "dropped")
        for _ in range(2):
            assert (await client.retry("a")).id == "a-r2"
    assert (await broker.jobs.depth())[0].interactive == 1
    await claim_and_fail("a-r2")
    assert (await broker.jobs.retry("a-r2")).id == "a-r3"
    (claim,) = await lease.claim(1)
    assert (claim.job_id, claim.events, claim.request) == ("a-r3", [], before.request)


async def test_a_job_that_cannot_be_retried_says_why(
    broker: Broker, lease: Lease, fail: Any, make_request: Callable[..., GenerationRequest]
) -> None:
    await broker.jobs.submit(make_request(), job_id="cancelled")
    await broker.jobs.cancel("cancelled")
    with pytest.raises(JobConflict, match="only failed jobs"):
        await broker.jobs.retry("cancelled")
    await fail("wrong", InvalidRequest("a prompt that is too long"))  # a retry would fail too
    with pytest.raises(JobConflict, match="no longer kept"):
        await broker.jobs.retry("wrong")
    with pytest.raises(JobNotFound):
        await broker.jobs.retry("nobody")


async def test_a_retry_counts_towards_its_tenants_limits(
    broker: Broker, lease: Lease, fail: Any, make_request: Callable[..., GenerationRequest]
) -> None:
    limits = TenantLimits(max_live_jobs=1)
    await fail("a", tenant="acme", limits=limits)
    busy = await broker.jobs.submit(make_request(), tenant="acme", limits=limits)
    with pytest.raises(TenantLimitReached):
        await broker.jobs.retry("a", limits=limits)
    await broker.jobs.cancel(busy.id)
    assert (await broker.jobs.retry("a", limits=limits)).id == "a-r2"


async def test_a_retry_of_a_job_with_a_long_id_gets_a_shorter_id(broker: Broker, fail: Any) -> None:
    await fail("x" * 128)
    again = await broker.jobs.retry("x" * 128)
    assert len(again.id) < 60
    assert (await broker.jobs.retry("x" * 128)).id == again.id
