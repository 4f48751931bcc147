"""The reaper: dead workers, outages, and keys that must not remain."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from processes import until

from ktqueue.broker import keys
from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Claim, Lease
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import JobNotFound, LeaseLost
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest


@pytest.fixture
async def reaping(broker: Broker) -> Any:
    task = asyncio.create_task(broker.reaper().run())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_dead_workers_jobs_run_again_within_the_lease_and_half_a_second(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest], reaping: Any
) -> None:
    loop = asyncio.get_running_loop()
    dead, alive = await Lease.register(broker, card), await Lease.register(broker, card)
    jobs = [await broker.jobs.submit(make_request()) for _ in range(2)]
    (gone,) = await dead.claim(1)
    (kept,) = await alive.claim(1)
    await dead.beat({})
    began = loop.time()
    again: list[Claim] = []
    while not again:
        await alive.beat({})
        await alive.wait_for_work(0.05)
        again = await alive.claim(2)
        assert loop.time() - began < broker.config.lease_seconds + 0.5
    assert loop.time() - began > broker.config.lease_seconds - 0.1
    assert [(claim.job_id, claim.attempt) for claim in again] == [(gone.job_id, 2)]
    assert {gone.job_id, kept.job_id} == {job.id for job in jobs}
    assert (await broker.jobs.get(kept.job_id)).attempts == 1
    await alive.close()


async def test_a_live_workers_job_is_never_taken(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest], reaping: Any
) -> None:
    lease = await Lease.register(broker, card)
    job = await broker.jobs.submit(make_request())
    await lease.claim(1)
    for _ in range(20):
        await asyncio.sleep(broker.config.lease_seconds / 5)
        await lease.beat({})
    assert (await broker.jobs.get(job.id)).attempts == 1
    assert (await broker.jobs.get(job.id)).worker_id == lease.id
    await lease.close()


async def test_after_an_outage_every_valid_lease_gets_one_more_lease_time(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    lease = await Lease.register(broker, card)
    job = await broker.jobs.submit(make_request())
    await lease.claim(1)
    await broker.reaper().reap()
    await asyncio.sleep(broker.config.lease_seconds * 2)  # no process called Redis, as in an outage
    assert await broker.reaper().reap() == (0, 0)
    await lease.beat({})
    await lease.commit([(job.id, TokenEvent(seq=1, state=JobState.DONE))])
    await lease.close()


@pytest.mark.parametrize("first", ["beat", "commit", "claim", "release"])
async def test_a_worker_that_calls_before_the_reaper_keeps_its_lease(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest], first: Any
) -> None:
    lease = await Lease.register(broker, card)
    job = await broker.jobs.submit(make_request())
    await lease.claim(1)
    await broker.reaper().reap()
    await asyncio.sleep(broker.config.lease_seconds * 1.5)
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "beat": lambda: lease.beat({}),
        "commit": lambda: lease.commit([(job.id, TokenEvent(seq=1))]),
        "claim": lambda: lease.claim(1),
        "release": lambda: lease.release([]),
    }
    await calls[first]()
    assert await broker.reaper().reap() == (0, 0)
    await lease.close()


async def test_a_released_lease_frees_its_jobs_at_once(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest], raw: Any
) -> None:
    dead, other = await Lease.register(broker, card), await Lease.register(broker, card)
    jobs = [await broker.jobs.submit(make_request()) for _ in range(3)]
    assert len(await dead.claim(2)) == 2
    assert len(await other.claim(1)) == 1
    await broker.reaper().release_lease(dead.id)
    await broker.reaper().release_lease("nobody")
    states = [(one.state, one.attempts) for one in [await broker.jobs.get(job.id) for job in jobs]]
    assert states == [(JobState.QUEUED, 1), (JobState.QUEUED, 1), (JobState.RUNNING, 1)]
    assert [one.worker_id for one in await broker.models.workers()] == [other.id]
    with pytest.raises(LeaseLost):
        await dead.beat({})
    assert len(await other.claim(2)) == 2
    await other.close()


async def test_an_outage_does_not_revive_an_expired_lease(
    broker: Broker,
    card: ModelCard,
    make_request: Callable[..., GenerationRequest],
    expire_leases: Callable[[], Awaitable[None]],
) -> None:
    dead = await Lease.register(broker, card)
    await broker.jobs.submit(make_request())
    await dead.claim(1)
    await expire_leases()
    await asyncio.sleep(broker.config.lease_seconds)
    assert await broker.reaper().reap() == (1, 0)


async def test_a_dead_workers_jobs_are_taken_one_lease_after_the_outage(
    broker: Broker,
    card: ModelCard,
    make_request: Callable[..., GenerationRequest],
    expire_leases: Callable[[], Awaitable[None]],
) -> None:
    dead = await Lease.register(broker, card)
    await broker.jobs.submit(make_request())
    await dead.claim(1)
    await asyncio.sleep(broker.config.lease_seconds * 1.5)
    assert await broker.reaper().reap() == (0, 0)
    await expire_leases()
    assert await broker.reaper().reap() == (1, 0)


def unknown_keys(tag: Any, names: Any) -> Any:
    """Return the keys that the table in keys.py does not list."""
    rows = re.findall(r"^\| ([^|]+?) +\| (?:hash|zset|stream|string)", keys.__doc__, re.MULTILINE)
    patterns = []
    for row in rows:
        for name in re.sub(r" \(.*\)", "", row).split(", "):
            patterns += [re.escape(tag) + ":" + re.sub(r"[A-Z]+", "[^ ]+", name)]
    return [name for name in names if not any(re.fullmatch(pattern, name) for pattern in patterns)]


async def test_every_key_is_documented_and_none_remains(
    config: BrokerConfig, card: ModelCard, make_request: Callable[..., GenerationRequest], raw: Any
) -> None:
    short = replace(config, job_ttl=0.6, journal_ttl=0.3, idempotency_ttl=0.6, model_ttl=0.6, lease_seconds=0.2)
    async with await Broker.open(short) as broker:
        lease, dead = await Lease.register(broker, card), await Lease.register(broker, card)
        jobs = [
            await broker.jobs.submit(make_request(expires_in=0.5 if k == 5 else None), idempotency_key=f"k{k}")
            for k in range(8)
        ]
        await dead.claim(1)
        await lease.claim(5)
        await broker.jobs.cancel(jobs[1].id)
        await broker.jobs.cancel(jobs[7].id)
        names = [name.decode() for name in raw.keys("*")]
        assert unknown_keys(broker.keys.tag, names) == []
        assert len(names) > 20
        reaper = asyncio.create_task(broker.reaper().run())
        await lease.commit([(job.id, TokenEvent(seq=1, text="x")) for job in jobs[1:5]])
        open_jobs = {job.id: 1 for job in jobs[1:5]}

        async def all_ended() -> Any:
            await lease.beat({})
            for claim in await lease.claim(8):
                open_jobs[claim.job_id] = len(claim.events)
            last = [(job_id, TokenEvent(seq=seq + 1, state=JobState.DONE)) for job_id, seq in open_jobs.items()]
            open_jobs.clear()
            await lease.commit(last)
            return not await broker.jobs.list(state=JobState.RUNNING) + await broker.jobs.list(state=JobState.QUEUED)

        await until(all_ended)
        await lease.close()
        reaper.cancel()
        await asyncio.gather(reaper, return_exceptions=True)
        without_ttl = [name for name in raw.keys("*") if raw.pttl(name) == -1]
        assert without_ttl == []

        await until(lambda: raw.keys("*") == [], 8)
        with pytest.raises(JobNotFound):
            await broker.jobs.get(jobs[0].id)


async def test_expired_records_are_no_longer_listed(
    config: BrokerConfig, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    async with await Broker.open(replace(config, job_ttl=0.2)) as short, await Broker.open(config) as broker:
        lease = await Lease.register(broker, card)
        first = await broker.jobs.submit(make_request())
        await short.jobs.cancel(first.id)
        second = await broker.jobs.submit(make_request())
        await broker.jobs.cancel(second.id)
        await asyncio.sleep(0.25)
        await broker.reaper().reap()
        assert [job.id for job in await broker.jobs.list()] == [second.id]
        await lease.close()


async def test_an_idle_reaper_calls_redis_a_few_times_a_second(config: BrokerConfig, raw: Any) -> None:
    """Four calls for leases and deadlines, and one each for unserved jobs and for the next pass over all keys."""
    async with await Broker.open(replace(config, lease_seconds=2.0)) as broker:
        reaper = asyncio.create_task(broker.reaper().run())
        await asyncio.sleep(0.3)  # in which the first pass ends
        before = raw.info("commandstats")["cmdstat_evalsha"]["calls"]
        await asyncio.sleep(2)
        assert 8 <= raw.info("commandstats")["cmdstat_evalsha"]["calls"] - before <= 13
        reaper.cancel()
        await asyncio.gather(reaper, return_exceptions=True)
