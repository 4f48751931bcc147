"""Batches in Redis: one batch for each key, one owner at a time, a list for each tenant, nothing left at the end."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ktqueue.broker.batches import (
    Batches,
    BatchFacts,
    BatchLease,
    BatchLoad,
    BatchRequest,
    BatchSpeed,
    BatchStatus,
    BatchUsage,
)
from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import (
    BatchConflict,
    BatchNotFound,
    IdempotencyConflict,
    InvalidRequest,
    JobNotFound,
    LeaseLost,
    TooManyBatches,
)
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest
from ktqueue.core.tenants import TenantLimits

REQUEST = BatchRequest(input_file_id="file-1", endpoint="/v1/completions", completion_window="24h", metadata={"a": "b"})
DAY = 86_400.0


@pytest.fixture
def config(broker_config: BrokerConfig) -> BrokerConfig:
    return replace(broker_config, lease_seconds=0.06, max_open_batches=3)


@pytest.fixture
def batches(broker: Broker) -> Batches:
    return broker.batches


async def create(batches: Batches, tenant: str = "a", **options: Any) -> str:
    return (await batches.create(REQUEST, **{"window_seconds": DAY, "tenant": tenant, **options})).id


async def taken(batches: Batches) -> BatchLease:
    found = await batches.take("owner")
    assert found is not None
    return found[0]


async def end(batches: Batches, lease: BatchLease, status: BatchStatus = BatchStatus.FAILED) -> None:
    await batches.update(lease, change=((await batches.update(lease)).status, status))
    await batches.release(lease)


async def test_a_key_makes_one_batch(batches: Batches, raw: Any, broker: Broker) -> None:
    first = await batches.create(REQUEST, window_seconds=DAY, tenant="a", idempotency_key="k")
    assert first.status is BatchStatus.VALIDATING
    assert (first.request, first.expires_at) == (REQUEST, first.created_at + DAY)
    assert await create(batches, idempotency_key="k") == first.id
    assert await create(batches, "b", idempotency_key="k") != first.id
    with pytest.raises(IdempotencyConflict):
        await batches.create(replace(REQUEST, metadata=None), window_seconds=DAY, tenant="a", idempotency_key="k")
    raw.delete(f"{broker.keys.tag}:batch:{first.id}")
    with pytest.raises(BatchConflict):
        await create(batches, idempotency_key="k")


async def test_a_key_finds_its_batch_and_creates_none(batches: Batches, raw: Any) -> None:
    assert await batches.find(REQUEST, tenant="a", idempotency_key="k") is None
    assert raw.keys("*") == []
    made = await create(batches, idempotency_key="k")
    found = await batches.find(REQUEST, tenant="a", idempotency_key="k")
    assert found is not None
    assert found.id == made
    assert await batches.find(REQUEST, tenant="b", idempotency_key="k") is None
    with pytest.raises(IdempotencyConflict):
        await batches.find(replace(REQUEST, metadata=None), tenant="a", idempotency_key="k")


async def test_callers_without_keys_have_even_shares(batches: Batches) -> None:
    """At most 3 batches of a tenant may wait or run, and 6 of all its callers."""

    async def most_of(caller: str) -> tuple[int, str]:
        for count in range(9):
            try:
                await create(batches, caller=caller)
            except TooManyBatches as error:
                return count, f"{error.value} of {error.limit}: {error.message}"
        raise AssertionError(caller)

    three = "batches of this address have not ended, but at most"
    assert await most_of("1.1.1.1") == (3, f"3 of 3: 3 {three} 3 may wait or run at once")
    assert await most_of("2.2.2.2") == (1, f"1 of 1: 1 {three} 1 may wait or run at once")
    assert (await most_of("1.1.1.1"))[1].startswith("3 of 1:")
    assert [(await most_of(caller))[0] for caller in ("3.3.3.3", "4.4.4.4")] == [1, 1]
    assert await most_of("5.5.5.5") == (0, "6 of 6: 6 batches have not ended, but at most 6 may wait or run at once")
    order = [(await batches.take("owner", of_newcomers=True)) for _ in range(5)]
    assert [found and found[1].caller for found in order] == ["1.1.1.1", "2.2.2.2", "3.3.3.3", "4.4.4.4", None]
    assert await most_of("5.5.5.5") == (0, "6 of 6: 6 batches have not ended, but at most 6 may wait or run at once")
    for found in order[:4]:
        assert found is not None
        await end(batches, found[0])
    assert await most_of("5.5.5.5") == (1, f"1 of 1: 1 {three} 1 may wait or run at once")


async def test_tenants_see_their_own_batches_page_by_page(batches: Batches, raw: Any, broker: Broker) -> None:
    other = await create(batches, "b")
    ids = [await create(batches) for _ in range(3)][::-1]
    with pytest.raises(TooManyBatches, match="3 batches have not ended, but at most 3"):
        await create(batches)
    pages = [await batches.list("a", limit=2), await batches.list("a", limit=2, after=ids[1])]
    assert [([record.id for record in records], more) for records, more in pages] == [(ids[:2], True), (ids[2:], False)]
    for missing in (other, "batch_unknown"):
        with pytest.raises(BatchNotFound):
            await batches.get("a", missing)
        with pytest.raises(BatchNotFound):
            await batches.cancel("a", missing)
        with pytest.raises(InvalidRequest):
            await batches.list("a", limit=2, after=missing)
    raw.delete(f"{broker.keys.tag}:batch:{ids[0]}")  # it has expired
    for options in ({}, {"after": ids[0]}):
        records, more = await batches.list("a", limit=2, **options)
        assert ([record.id for record in records], more) == (ids[1:], False)
    raw.zrem(f"{broker.keys.tag}:batches:of:a", ids[2])  # newer ones took its place in the list
    assert await batches.list("a", limit=2, after=ids[2]) == ([], False)


async def test_a_batch_has_one_owner_at_a_time(batches: Batches) -> None:
    batch_id = await create(batches)
    stalled = await taken(batches)
    assert await batches.take("other") is None
    for _ in range(3):  # a lease that is renewed lasts
        await asyncio.sleep(0.2)
        assert (await batches.update(stalled)).id == batch_id
    assert await batches.take("other") is None
    await asyncio.sleep(0.35)
    lease = await taken(batches)
    assert (lease.id, lease.fence > stalled.fence) == (batch_id, True)
    with pytest.raises(LeaseLost):
        await batches.update(stalled, BatchFacts(total=9))
    await batches.release(stalled)  # changes nothing
    assert await batches.take("other") is None
    assert (await batches.get("a", batch_id)).facts == BatchFacts()
    await batches.release(lease)
    assert (await taken(batches)).fence > lease.fence  # at once


async def test_no_two_owners_have_the_same_fence_even_if_redis_forgets_one(
    batches: Batches, raw: Any, broker: Broker
) -> None:
    """A Redis that lost its last second, in which the batch was taken, gives it to somebody else."""
    batch_id = await create(batches)
    key, owners = f"{broker.keys.tag}:batch:{batch_id}", f"{broker.keys.tag}:batches"
    record, free = raw.hgetall(key), raw.zscore(owners, batch_id)
    forgotten = await taken(batches)
    raw.delete(key)
    raw.hset(key, mapping=record)
    raw.zadd(owners, {batch_id: free})
    lease = await taken(batches)
    with pytest.raises(LeaseLost):
        await batches.update(forgotten)
    await batches.update(lease)


async def test_the_tenant_with_the_fewest_batches_is_next(batches: Batches) -> None:
    first, second = await create(batches), await create(batches)
    other = await create(batches, "b")
    assert [(await taken(batches)).id for _ in range(3)] == [first, other, second]


@pytest.fixture
def die(raw: Any, broker: Broker) -> Callable[..., None]:
    """Let the owners of batches die now, so that these are free, in this order."""

    def end_leases(*leases: BatchLease) -> None:
        seconds, us = raw.time()
        for place, lease in enumerate(leases):
            raw.zadd(f"{broker.keys.tag}:batches", {lease.id: seconds * 1_000_000 + us - 9 + place}, xx=True)

    return end_leases


@pytest.fixture
def long_lease(broker: Broker) -> Batches:
    return Batches(broker.scripts, replace(broker.config, lease_seconds=60.0))


async def begin(batches: Batches, owner: str) -> tuple[str, int, BatchLease]:
    """Let an owner take a batch. Returns its id, the failures that count against it, and the lease."""
    found = await batches.take(owner)
    assert found is not None
    return found[0].id, found[1].failures_without_progress, found[0]


async def test_a_death_counts_for_the_batch_on_trial_alone(long_lease: Batches, die: Callable[..., None]) -> None:
    batches = long_lease
    poison, slow = await create(batches), await create(batches)
    for owner in ("first", "second"):  # nobody knows which of both was to blame
        both = [await begin(batches, owner) for _ in range(2)]
        assert [entry[:2] for entry in both] == [(poison, 0), (slow, 0)]
        die(*(entry[2] for entry in both))
    fresh = await create(batches)
    for failures in range(3):
        tried, beside = [await begin(batches, f"owner {failures}") for _ in range(2)]
        assert [tried[:2], beside[:2]] == [(poison, failures), (fresh, 0)]
        assert await batches.take(f"owner {failures}") is None  # one is on trial already
        other = await begin(batches, f"other {failures}")
        assert other[:2] == (slow, 0)
        die(tried[2], beside[2])
        await batches.release(other[2], is_clean=False)
    assert [(await begin(batches, "last"))[:2] for _ in range(2)] == [(poison, 3), (fresh, 0)]


async def test_progress_or_time_ends_a_trial(
    long_lease: Batches, die: Callable[..., None], monkeypatch: pytest.MonkeyPatch, broker: Broker
) -> None:
    batches = long_lease
    first, second = await create(batches), await create(batches)
    for owner in ("one", "two"):
        die(*[(await begin(batches, owner))[2] for _ in range(2)])
    name, _, lease = await begin(batches, "three")
    assert name == first
    await batches.update(lease, speed=BatchSpeed(1.0, 1.0))  # is no progress
    assert await batches.take("three") is None
    await batches.update(lease, BatchFacts(total=1))
    name, _, other = await begin(batches, "three")
    assert name == second
    die(lease, other)  # the first has made progress, the second is on trial
    monkeypatch.setattr("ktqueue.broker.batches.TRIAL_SECONDS", 0.0)
    again = [await begin(batches, "four") for _ in range(2)]
    assert [entry[:2] for entry in again] == [(first, 0), (second, 1)]
    await asyncio.sleep(1.1)
    die(*(entry[2] for entry in again))  # they last renewed a lease of a second after the trial
    second_long = Batches(broker.scripts, replace(broker.config, lease_seconds=0.2))
    again = [await begin(second_long, "five") for _ in range(2)]
    assert [entry[:2] for entry in again] == [(first, 0), (second, 1)]


async def test_many_deaths_after_a_trial_are_failures_too(broker: Broker, die: Callable[..., None], raw: Any) -> None:
    batches = Batches(broker.scripts, replace(broker.config, lease_seconds=0.2))
    raw.hset(f"{broker.keys.tag}:batch:{await create(batches)}", "deaths", 29)
    found = []
    for number in range(3):
        _, failures, lease = await begin(batches, f"owner {number}")
        found.append(failures)
        raw.delete(f"{broker.keys.tag}:batches:trial:owner {number}")  # the trial is over
        die(lease)
    assert found == [0, 0, 1]


async def test_no_lease_is_longer_because_the_clock_went_back(batches: Batches, raw: Any, broker: Broker) -> None:
    batch_id = await create(batches)
    await taken(batches)
    raw.zincrby(f"{broker.keys.tag}:batches", 3_600_000_000, batch_id)
    assert await batches.take("other") is None
    await asyncio.sleep(0.35)
    assert (await taken(batches)).id == batch_id


async def test_facts_and_status_change_together_or_not_at_all(batches: Batches) -> None:
    batch_id = await create(batches)
    lease = await taken(batches)
    facts = BatchFacts(
        model="demo", total=3, answered=2, failed=1, usage=BatchUsage(prompt=4, completion=5),
        errors=({"code": "c", "message": "m", "param": None, "line": 1},), segments=(("t", 2),),
    )  # fmt: skip
    await batches.update(lease, facts, change=(BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS))
    record = await batches.get("a", batch_id)
    assert (record.facts, record.status, set(record.times)) == (
        facts, BatchStatus.IN_PROGRESS, {BatchStatus.IN_PROGRESS}
    )  # fmt: skip
    assert (await batches.cancel("a", batch_id)).status is BatchStatus.CANCELLING
    change = (BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
    record = await batches.update(lease, replace(facts, outcome="completed"), change=change)
    assert (record.status, record.facts.outcome) == (BatchStatus.CANCELLING, "")


async def test_open_batches_are_counted(batches: Batches) -> None:
    assert (await batches.load()) == BatchLoad()
    for answered, seconds in ((4, 7.0), (5, None)):
        await create(batches, str(answered))
        lease, facts = await taken(batches), BatchFacts(total=9, answered=answered, failed=1)
        change = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
        await batches.update(lease, facts, change=change, speed=BatchSpeed(1.0, seconds))
    await create(batches)
    load = await batches.load()
    assert load == BatchLoad(
        by_status={BatchStatus.VALIDATING: 1, BatchStatus.IN_PROGRESS: 2}, unowned=1, lines_left=7, seconds_left=7.0
    )
    assert load.count == 3


async def test_a_batch_is_cancelled_once_and_not_after_its_end(batches: Batches) -> None:
    batch_id = await create(batches)
    lease = await taken(batches)
    for _ in range(2):
        assert (await batches.cancel("a", batch_id)).status is BatchStatus.CANCELLING
    await end(batches, lease, BatchStatus.CANCELLED)
    assert (await batches.cancel("a", batch_id)).status is BatchStatus.CANCELLED
    done = await create(batches)
    await end(batches, await taken(batches), BatchStatus.COMPLETED)
    with pytest.raises(BatchConflict, match="completed already"):
        await batches.cancel("a", done)


async def test_an_ended_batch_expires_and_leaves_nothing(broker: Broker, raw: Any) -> None:
    batches = Batches(broker.scripts, replace(broker.config, batch_ttl=0.2))
    await create(batches)
    lease = await taken(batches)
    await batches.update(lease, change=(BatchStatus.VALIDATING, BatchStatus.FAILED))
    await create(batches)  # an ended batch does not count
    await end(batches, lease)
    await end(batches, await taken(batches))
    assert await batches.take("owner") is None
    await asyncio.sleep(0.3)
    assert raw.keys("*") == []


async def test_ended_jobs_are_forgotten(
    config: BrokerConfig, card: ModelCard, make_request: Callable[..., GenerationRequest], raw: Any
) -> None:
    async with await Broker.open(replace(config, lease_seconds=2.0)) as broker:
        lease = await Lease.register(broker, card)
        before = set(raw.keys("*"))
        for name in ("done", "failed", "live"):
            await broker.jobs.submit(make_request(), job_id=name, tenant="a", limits=TenantLimits(), keep=DAY)
        await lease.claim(2)
        states = {"done": JobState.DONE, "failed": JobState.FAILED}
        await lease.commit([(name, TokenEvent(seq=1, state=state)) for name, state in states.items()])
        await broker.jobs.forget(["done", "failed", "live", "unknown"])
        for name in states:
            with pytest.raises(JobNotFound):
                await broker.jobs.get(name)
        assert (await broker.jobs.get("live")).state is JobState.QUEUED
        await broker.jobs.cancel("live")
        await broker.jobs.forget(["live"])
        (load,) = await broker.jobs.tenant_loads(["a"])
        assert (load.live, load.stored_bytes) == (0, 0)
        assert not int(raw.get(f"{broker.keys.tag}:failed:bytes") or 0)
        left = {key.decode().removeprefix(f"{broker.keys.tag}:") for key in set(raw.keys("*")) - before}
        await lease.close()
    owners = ("warm:", "turns:", "callers:", "accounts:", "caller_accounts:", "weights")  # know no jobs
    assert {name for name in left if not name.startswith(owners)} <= {"tenant:a", "failed:bytes"}
