"""Tenants' limits are counted when a job is submitted, and corrected once when it ends."""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from processes import until
from required import number, required, retry_after

from ktqueue.broker.broker import Broker
from ktqueue.broker.jobs import TenantLoad
from ktqueue.broker.lease import Lease
from ktqueue.broker.limits import UNLIMITED, Cost
from ktqueue.core.codec import encode_request
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import QueueFull, RateLimitExceeded, RequestTooLarge, TenantLimitReached
from ktqueue.core.events import JobState, TokenEvent, Usage
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest, JobClass, SamplingParams
from ktqueue.core.tenants import TenantLimits

TENANT = "acme"
SLOW = 1  # tokens or requests per minute, so few that the time of a test changes nothing


@pytest.fixture
def submit(broker: Broker, make_request: Callable[..., GenerationRequest]) -> Any:
    """Submit a job for the tenant. `tokens`: how many it reserves, including one of the prompt."""

    async def make(limits: Any, *, tokens: Any = 11, prompt: Any = (7,), **fields: Any) -> Any:
        request = make_request(None, sampling=SamplingParams(max_tokens=tokens - 1), prompt_token_ids=prompt)
        options = {key: fields.pop(key) for key in ("job_id", "idempotency_key") if key in fields}
        return await broker.jobs.submit(replace(request, **fields), tenant=TENANT, limits=limits, **options)

    return make


@pytest.fixture
def load(broker: Broker) -> Any:
    async def look() -> Any:
        (load,) = await broker.jobs.tenant_loads([TENANT])
        return load

    return look


def record_of(broker: Any, raw: Any) -> Any:
    return {key.decode(): int(value) for key, value in raw.hgetall(f"{broker.keys.tag}:tenant:{TENANT}").items()}


def done(tokens: Any, seq: Any = 1) -> Any:
    usage = Usage(prompt_tokens=1, completion_tokens=tokens - 1)
    return TokenEvent(seq=seq, state=JobState.DONE, usage=usage)


async def test_live_and_queued_jobs_have_limits(broker: Broker, lease: Lease, submit: Any, load: Any) -> None:
    limits = TenantLimits(max_live_jobs=3, max_queued_jobs=2)
    for _ in range(2):
        await submit(limits)
    with pytest.raises(TenantLimitReached) as caught:
        await submit(limits)
    assert (caught.value.param, caught.value.limit, caught.value.value) == ("max_queued_jobs", 2, 2)
    assert retry_after(caught.value) > 0
    (claim,) = await lease.claim(1)
    third = await submit(limits)
    with pytest.raises(TenantLimitReached) as caught:
        await submit(limits)
    assert (caught.value.param, caught.value.limit, caught.value.value) == ("max_live_jobs", 3, 3)
    await lease.release([claim.job_id])  # waits again, because limits apply to submissions only
    assert (await load()).queued == 3
    await broker.jobs.submit(replace(claim.request, sampling=SamplingParams()), tenant="other", limits=limits)
    await broker.jobs.submit(claim.request, tenant=TENANT)  # trusted jobs have no limits and are not counted
    assert (await load()).live == 3
    (claim, *_) = await lease.claim(1)
    await lease.commit([(claim.job_id, done(2))])
    await broker.jobs.cancel(third.id)
    await submit(limits)
    assert await load() == TenantLoad(TENANT, 2, 2, (await load()).queued_bytes)


async def test_waiting_bytes_of_a_tenant_have_a_limit(broker: Broker, lease: Lease, submit: Any, load: Any) -> None:
    first = await submit(None)
    size = len(encode_request(first.request))
    limits = TenantLimits(max_queued_bytes=3 * size)
    await broker.jobs.cancel(first.id)
    for _ in range(2):
        await submit(limits)
    with pytest.raises(TenantLimitReached) as caught:
        await submit(limits, prompt=(7,) * size)
    assert (caught.value.param, caught.value.limit) == ("max_queued_bytes", 3 * size)
    assert caught.value.value == (await load()).queued_bytes
    with pytest.raises(RequestTooLarge):
        await submit(limits, prompt=(7,) * 2 * size)
    await lease.claim(2)
    assert await load() == TenantLoad(TENANT, 2, 0, 0)
    await submit(limits, prompt=(7,) * size)


async def test_all_waiting_requests_together_have_a_limit_in_bytes(
    config: BrokerConfig, card: ModelCard, make_request: Callable[..., GenerationRequest], raw: Any
) -> None:
    settings = replace(config, max_request_bytes=2_000, max_queued_bytes=3_000)
    async with await Broker.open(settings) as broker:
        lease = await Lease.register(broker, card)
        for job_class in JobClass:
            await broker.jobs.submit(make_request("x" * 800, job_class=job_class))
        with pytest.raises(QueueFull) as caught:
            await broker.jobs.submit(make_request("x" * 800))
        assert caught.value.limit == 3_000
        assert 1_600 < number(caught.value.value, "value") < 3_000
        assert retry_after(caught.value) > 0
        await lease.claim(2)
        assert not raw.exists(f"{broker.keys.tag}:waiting")
        await broker.jobs.submit(make_request("x" * 800))
        await lease.close()  # the two jobs return to the queue
        assert int(raw.get(f"{broker.keys.tag}:waiting")) > 2_400
        for job in await broker.jobs.list():
            await broker.jobs.cancel(job.id)
        assert not raw.exists(f"{broker.keys.tag}:waiting")


async def test_a_tenants_requests_per_minute_are_limited(broker: Broker, lease: Lease, submit: Any, raw: Any) -> None:
    limits = TenantLimits(requests_per_minute=SLOW, requests_burst=3)
    lefts = []
    for _ in range(3):
        usage = (await submit(limits)).tenant_usage
        lefts.append(usage.requests.remaining)
        assert usage.tokens is None
    assert (lefts, usage.requests.limit) == ([2, 1, 0], 3)
    assert 120 < usage.requests.reset <= 180
    with pytest.raises(RateLimitExceeded) as caught:
        await submit(limits)
    assert (caught.value.param, caught.value.limit, caught.value.value) == ("requests_per_minute", 3, 3)
    assert 0 < retry_after(caught.value) <= 60
    key = f"{broker.keys.tag}:tenant:{TENANT}"
    stored = record_of(broker, raw)["requests"]
    raw.hset(key, "requests", stored - round(retry_after(caught.value) * 1e6) + 30_000_000)  # half a minute too early
    with pytest.raises(RateLimitExceeded):
        await submit(limits)
    raw.hset(key, "requests", stored - round(retry_after(caught.value) * 1e6))
    await submit(limits)  # waiting for `retry_after` is enough


async def test_reserved_tokens_that_were_not_used_are_returned(
    broker: Broker, lease: Lease, submit: Any, load: Any, raw: Any
) -> None:
    limits = TenantLimits(tokens_per_minute=SLOW, tokens_burst=100)

    async def left() -> Any:
        """Return the tokens that are available now, by reserving two and returning them."""
        asked = await submit(limits, tokens=2)
        await broker.jobs.cancel(asked.id)
        return asked.tenant_usage.tokens.remaining + 2

    job = await submit(limits, tokens=90)
    assert job.tenant_usage.tokens.remaining == 10
    with pytest.raises(RateLimitExceeded) as caught:
        await submit(limits, tokens=30)
    assert (caught.value.param, caught.value.limit) == ("tokens_per_minute", 100)
    assert caught.value.value in (89, 90)
    assert 15 * 60 < retry_after(caught.value) <= 20 * 60
    (claim,) = await lease.claim(1)
    await lease.commit([(claim.job_id, TokenEvent(seq=1, token_ids=(1,))), (claim.job_id, done(40, seq=2))])
    assert 60 <= await left() <= 65  # the job used 40 of its 90
    for state, used, free in ((JobState.CANCELLED, 10, 50), (JobState.FAILED, 2, 48), (JobState.DONE, 28, 20)):
        job = await submit(limits, tokens=30)
        (claim,) = await lease.claim(1)
        await lease.commit([(claim.job_id, replace(done(used), state=state))])
        assert free <= await left() <= free + 10, state
    assert (await load()).live == 0


async def test_a_job_that_never_ran_returns_all_its_tokens(broker: Broker, lease: Lease, submit: Any, raw: Any) -> None:
    limits = TenantLimits(tokens_per_minute=SLOW, tokens_burst=100)
    for _ in range(4):
        await broker.jobs.cancel((await submit(limits, tokens=100)).id)
    await submit(limits, tokens=100, expires_in=0.05)

    async def settled() -> Any:
        await broker.reaper().reap()
        return not raw.exists(f"{broker.keys.tag}:tenant:{TENANT}")

    await until(settled)
    await submit(limits, tokens=100, expires_in=0.001)
    await asyncio.sleep(0.01)
    assert await lease.claim(1) == []  # the job has expired
    assert await settled()


async def test_a_job_whose_worker_died_is_charged_for_its_events(
    config: BrokerConfig,
    card: ModelCard,
    submit: Any,
    broker: Broker,
    expire_leases: Callable[[], Awaitable[None]],
    raw: Any,
) -> None:
    limits = TenantLimits(tokens_per_minute=SLOW, tokens_burst=100)
    lease = await Lease.register(broker, card)
    job = await submit(limits, tokens=100)
    await lease.claim(1)
    await lease.commit([(job.id, TokenEvent(seq=seq, token_ids=(1,))) for seq in range(1, 21)])
    await broker.jobs.cancel(job.id)
    await expire_leases()
    assert (await broker.reaper().reap())[0] == 1
    assert (await broker.jobs.get(job.id)).state is JobState.CANCELLED
    now = int(raw.time()[0]) + int(raw.time()[1]) / 1e6
    assert 15 < (record_of(broker, raw)["tokens"] / 1e6 - now) / 60 <= 21


async def test_tokens_beyond_the_reservation_are_charged_too(
    broker: Broker, lease: Lease, submit: Any, raw: Any
) -> None:
    limits = TenantLimits(tokens_per_minute=SLOW, tokens_burst=50)
    job = await submit(limits, tokens=10)
    (claim,) = await lease.claim(1)
    await lease.commit([(claim.job_id, done(200))])
    with pytest.raises(RateLimitExceeded) as caught:
        await submit(limits, tokens=2)
    assert 140 * 60 < retry_after(caught.value) <= 152 * 60
    assert await broker.jobs.submit(job.request, tenant=TENANT)  # trusted jobs have no limits


async def test_a_submission_sent_twice_counts_once(
    broker: Broker, lease: Lease, submit: Any, load: Any, raw: Any
) -> None:
    limits = TenantLimits(requests_per_minute=SLOW, tokens_per_minute=SLOW, tokens_burst=100, max_live_jobs=1)
    first = await submit(limits, job_id="a", idempotency_key="k")
    before = record_of(broker, raw)
    assert (await submit(limits, job_id="a", idempotency_key="k")).id == first.id
    assert (await submit(limits, idempotency_key="k")).id == first.id
    assert record_of(broker, raw) == before


async def test_the_end_of_a_job_is_counted_once(broker: Broker, lease: Lease, submit: Any, load: Any, raw: Any) -> None:
    limits = TenantLimits(tokens_per_minute=SLOW, tokens_burst=100)
    await submit(limits, tokens=5)
    job = await submit(limits, tokens=50)
    claims = await lease.claim(2)
    assert len(claims) == 2
    await lease.commit([(job.id, done(20))])
    before = record_of(broker, raw)
    await lease.commit([(job.id, done(20))])
    await broker.jobs.cancel(job.id)
    await broker.reaper().reap()
    assert record_of(broker, raw) == before
    assert (await load()).live == 1


async def test_a_refusal_writes_nothing(broker: Broker, lease: Lease, submit: Any, raw: Any) -> None:
    limits = TenantLimits(requests_per_minute=SLOW, tokens_per_minute=SLOW, tokens_burst=20)
    await submit(limits, tokens=15)
    before = record_of(broker, raw), raw.dbsize()
    with pytest.raises(RateLimitExceeded):
        await submit(limits, tokens=15)  # no request is charged for tokens that were refused
    assert (record_of(broker, raw), raw.dbsize()) == before


async def test_a_tenants_record_expires_when_its_rates_are_fully_available(
    broker: Broker, lease: Lease, submit: Any, load: Any, raw: Any
) -> None:
    limits = TenantLimits(requests_per_minute=6_000, tokens_per_minute=60_000, tokens_burst=100_000)
    key = f"{broker.keys.tag}:tenant:{TENANT}"
    job = await submit(limits, tokens=50_000)
    assert raw.pttl(key) == -1  # it does not expire while a job is live
    await lease.claim(1)
    await lease.commit([(job.id, done(20_000))])
    assert 0 < raw.pttl(key) <= 20_000
    job = await submit(limits, tokens=50)
    assert raw.pttl(key) == -1
    await broker.jobs.cancel(job.id)
    assert 0 < raw.pttl(key) <= 20_050
    assert await load() == TenantLoad(TENANT, 0, 0, 0)


async def test_a_request_that_can_never_fit_is_too_large(lease: Lease, submit: Any) -> None:
    limits = TenantLimits(tokens_per_minute=SLOW, tokens_burst=100)
    with pytest.raises(RequestTooLarge) as caught:
        await submit(limits, tokens=101)
    assert (caught.value.param, caught.value.limit, caught.value.value) == ("max_tokens", 100, 101)


def test_the_cost_of_a_request_is_estimated_from_its_prompt_and_choices() -> None:
    def cost(**fields: Any) -> Any:
        return Cost.of(GenerationRequest(model="m", **fields))

    sampling = SamplingParams(max_tokens=10, n=3)
    assert cost(prompt="é" * 4, sampling=sampling) == Cost(2, 32, 30)
    assert cost(prompt="x" * 9, sampling=sampling) == Cost(3, 33, 30)
    assert cost(prompt_token_ids=(1, 2, 3), sampling=sampling) == Cost(3, 33, 30)
    assert cost(prompt="x") == Cost(1, 257, UNLIMITED)
    chat = cost(messages=({"role": "user", "content": "x" * 400},), sampling=sampling)
    assert 100 < chat.prompt < 120
    assert cost(messages=({"role": "user", "content": "x" * 400},), tools=({"type": "t"},)).prompt > chat.prompt


class Bucket:
    """A token bucket of size `burst` that fills evenly. The script should equal it. Times are exact, in us."""

    def __init__(self, per_minute: Any, burst: Any) -> None:
        self.rate, self.burst = Fraction(per_minute, 60_000_000), burst
        self.level, self.filled_at = Fraction(burst), 0

    def add(self, now: Any, count: Any) -> None:
        """Fill the bucket up to `now`, then add `count` tokens, or remove them if negative."""
        self.level = min(self.burst, self.level + (now - self.filled_at) * self.rate)
        self.level = min(self.burst, self.level + count)
        self.filled_at = now

    def wait(self, now: Any, count: Any) -> Any:
        """Return the us until `count` tokens are available; 0 or less if they are now."""
        level = min(self.burst, self.level + (now - self.filled_at) * self.rate)
        return (count - level) / self.rate


@pytest.mark.parametrize(("per_minute", "burst"), [(7, 5), (60, 60), (600, 50), (90_000, 400)])
async def test_random_histories_equal_a_token_bucket(
    broker: Broker, lease: Lease, submit: Any, raw: Any, per_minute: Any, burst: Any
) -> None:
    """Jobs are submitted and end in all ways. Time passes by moving stored times back; its source is the server."""
    rng = random.Random(per_minute)
    limits = TenantLimits(tokens_per_minute=per_minute, tokens_burst=burst)
    key, slack = f"{broker.keys.tag}:tenant:{TENANT}", 0  # us; each operation rounds down by less than 1
    bucket, running = Bucket(per_minute, burst), {}
    taken = refused = 0
    for _ in range(200):
        dice, slack = rng.random(), slack + 2
        if dice < 0.2 and raw.exists(key):
            gap = int(rng.expovariate(bucket.rate * rng.choice((1, 8)) / burst))
            raw.hset(key, "tokens", int(raw.hget(key, "tokens")) - gap)
            bucket.filled_at -= gap
        elif dice < 0.6:
            tokens = rng.randint(2, burst)
            before = int(raw.hget(key, "tokens") or 0)
            try:
                job = await submit(limits, tokens=tokens)
            except RateLimitExceeded as error:
                # The server's time, computed from the wait that it reported.
                wait = round(retry_after(error) * 1e6)
                now = before + tokens * 60_000_000 // per_minute - burst * 60_000_000 // per_minute - wait
                assert wait > 0
                assert abs(bucket.wait(now, tokens) - wait) <= slack
                refused += 1
            else:
                now = round(job.created_at * 1e6)
                assert bucket.wait(now, tokens) <= slack
                bucket.add(now, -tokens)
                left = job.tenant_usage.tokens
                assert math.floor(bucket.level) <= left.remaining <= math.floor(bucket.level + slack * bucket.rate)
                assert abs(left.reset * 1e6 - (burst - bucket.level) / bucket.rate) <= slack
                running[job.id] = tokens
                taken += 1
        elif running:
            job_id = rng.choice(sorted(running))
            reserved, used = running.pop(job_id), 0
            if rng.random() < 0.3 and (await broker.jobs.get(job_id)).state is JobState.QUEUED:
                await broker.jobs.cancel(job_id)
            else:
                used = rng.randint(2, 2 * reserved)
                await lease.claim(1_000)
                await lease.commit([(job_id, done(used))])
            finished_at = required((await broker.jobs.get(job_id)).finished_at, "finished_at")
            bucket.add(round(finished_at * 1e6), reserved - used)
    assert taken > 10
    assert refused > 10
    assert (await broker.jobs.tenant_loads([TENANT]))[0].live == len(running)
