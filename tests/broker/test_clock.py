"""The server's clock steps: nobody waits longer than without the step, and no live job, worker or model is forgotten.

A step is what it leaves behind: times in Redis that are too far ahead (it went back) or too long ago (it went forward).
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from required import retry_after

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.core.errors import RateLimitExceeded
from ktqueue.core.events import JobState, TokenEvent, Usage
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest, SamplingParams
from ktqueue.core.tenants import TenantLimits

HOUR = 3_600_000_000  # us


@pytest.fixture
def step(broker: Broker, raw: Any) -> Any:
    """Let the clock step by a number of us, by shifting all stored times the other way."""

    def move(by: Any) -> None:
        tag = broker.keys.tag
        for name in ("leases", "models:seen", "parked:tale"):
            for member, score in raw.zrange(f"{tag}:{name}", 0, -1, withscores=True):
                raw.zadd(f"{tag}:{name}", {member: score - by})
        if raw.exists(f"{tag}:tick"):
            raw.set(f"{tag}:tick", int(raw.get(f"{tag}:tick")) - by, keepttl=True)
        for key in raw.keys(f"{tag}:tenant:*"):
            for field in ("requests", "tokens", "updated"):
                if raw.hexists(key, field):
                    raw.hincrby(key, field, -by)
        if by > 0:  # keys with a time to live expire that much earlier
            for key in raw.keys("*"):
                left = raw.pttl(key)
                if left > 0:
                    raw.pexpire(key, max(1, left - by // 1_000))

    return move


async def test_a_clock_that_goes_back_delays_no_jobs_of_dead_workers(
    broker: Broker,
    card: ModelCard,
    make_request: Callable[..., GenerationRequest],
    step: Any,
    expire_leases: Callable[[], Awaitable[None]],
) -> None:
    dead = await Lease.register(broker, card)
    await broker.jobs.submit(make_request())
    await dead.claim(1)
    step(-40_000_000)
    await broker.reaper().reap()
    await expire_leases()
    assert await broker.reaper().reap() == (1, 0)


async def test_a_clock_that_was_ahead_leaves_no_rate_limit(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest], step: Any
) -> None:
    lease = await Lease.register(broker, card)
    limits = TenantLimits(requests_per_minute=60, requests_burst=2, tokens_per_minute=60_000, tokens_burst=2_000)

    async def submit() -> Any:
        request = make_request(None, prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=999))
        return await broker.jobs.submit(request, tenant="acme", limits=limits)

    await submit()
    job = await submit()
    with pytest.raises(RateLimitExceeded):
        await submit()
    step(-HOUR)
    with pytest.raises(RateLimitExceeded) as caught:
        await submit()
    assert 0 < retry_after(caught.value) <= 1
    await broker.jobs.cancel(job.id)
    await asyncio.sleep(retry_after(caught.value))
    await submit()
    await lease.close()


async def test_tokens_beyond_a_reservation_are_charged_although_the_clock_has_stepped(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest], step: Any
) -> None:
    lease = await Lease.register(broker, card)
    limits = TenantLimits(tokens_per_minute=60, tokens_burst=20)
    request = make_request(None, prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=9))
    job = await broker.jobs.submit(request, tenant="acme", limits=limits)
    await lease.claim(1)
    step(-HOUR)
    usage = Usage(prompt_tokens=1, completion_tokens=79)
    await broker.reaper().reap()
    await lease.commit([(job.id, TokenEvent(seq=1, state=JobState.DONE, usage=usage))])
    with pytest.raises(RateLimitExceeded) as caught:
        await broker.jobs.submit(request, tenant="acme", limits=limits)
    assert 60 < retry_after(caught.value) <= 71
    await lease.close()


async def test_a_step_of_an_hour_forgets_no_model_and_takes_no_live_workers_jobs(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest], step: Any
) -> None:
    lease = await Lease.register(broker, card)
    await lease.beat({})
    job = await broker.jobs.submit(make_request())
    await lease.claim(1)
    step(HOUR)
    assert await broker.reaper().reap() == (0, 0)
    assert await broker.models.cards() == [card]
    await broker.jobs.submit(make_request())
    await lease.beat({})
    await lease.commit([(job.id, TokenEvent(seq=1, state=JobState.DONE))])
    await lease.close()


async def test_a_worker_that_was_parked_in_the_future_gets_no_job(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest], step: Any
) -> None:
    silent = await Lease.register(broker, card)
    assert await silent.claim(1, wait=True) == []
    step(-40_000_000)
    job = await broker.jobs.submit(make_request())
    assert job.state is JobState.QUEUED
    await silent.close()
