"""A started job continues only under the digest that it started with."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from processes import until
from required import error_of

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.core.config import BrokerConfig
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest, JobClass

A, B = "a" * 32, "b" * 32


@pytest.fixture
async def workers(broker: Broker, card: ModelCard) -> Any:
    """Two workers that serve different weights under one model name."""
    leases = [await Lease.register(broker, replace(card, digest=digest)) for digest in (A, B)]
    yield leases
    for lease in leases:
        await lease.close()


async def begin(lease: Any, job: Any) -> None:
    """Claim the only waiting job and commit its first token."""
    (claim,) = await lease.claim(1)
    assert claim.job_id == job.id
    await lease.commit([(job.id, TokenEvent(seq=1, token_ids=(7,), text="x"))])


async def test_a_started_job_continues_only_under_its_digest(
    broker: Broker, card: ModelCard, workers: Any, make_request: Callable[..., GenerationRequest]
) -> None:
    ours, theirs = workers
    job = await broker.jobs.submit(make_request())
    await begin(ours, job)
    await ours.release([job.id])
    assert await theirs.claim(8) == []
    record = await broker.jobs.get(job.id)
    assert (record.state, record.position, record.digest) == (JobState.QUEUED, 1, A)
    (depth,) = await broker.jobs.depth()
    assert (depth.interactive, depth.running) == (1, 0)
    twin = await Lease.register(broker, replace(card, digest=A))
    (claim,) = await twin.claim(8)
    assert (claim.job_id, [event.token_ids for event in claim.events]) == (job.id, [(7,)])
    await twin.close()


async def test_a_job_that_has_not_started_goes_to_any_worker_of_the_model(
    broker: Broker, workers: Any, make_request: Callable[..., GenerationRequest]
) -> None:
    ours, theirs = workers
    job = await broker.jobs.submit(make_request())
    assert [claim.job_id for claim in await ours.claim(1)] == [job.id]
    await ours.release([job.id])
    await begin(theirs, job)
    assert (await broker.jobs.get(job.id)).digest == B
    await theirs.release([job.id])
    assert await ours.claim(8) == []  # the job has started


async def test_a_dead_workers_jobs_wait_for_its_digest(
    broker: Broker, card: ModelCard, workers: Any, make_request: Callable[..., GenerationRequest]
) -> None:
    ours, theirs = workers
    begun = await broker.jobs.submit(make_request())
    await begin(ours, begun)
    fresh = await broker.jobs.submit(make_request())
    assert len(await ours.claim(8)) == 1
    await broker.reaper().release_lease(ours.id)
    assert [claim.job_id for claim in await theirs.claim(8)] == [fresh.id]
    twin = await Lease.register(broker, replace(card, digest=A))
    assert [claim.job_id for claim in await twin.claim(8)] == [begun.id]
    await twin.close()


async def test_a_job_that_was_handed_over_is_bound_to_its_digest_too(
    broker: Broker, card: ModelCard, workers: Any, make_request: Callable[..., GenerationRequest]
) -> None:
    ours, theirs = workers
    assert await ours.claim(8, wait=True) == []
    job = await broker.jobs.submit(make_request())
    assert job.worker_id == ours.id
    async with asyncio.timeout(5):
        while not (claims := await ours.wait_for_work(5.0)):
            pass
    await ours.commit([(claims[0].job_id, TokenEvent(seq=1, token_ids=(7,)))])
    await ours.release([job.id])
    assert await theirs.claim(8) == []


async def test_bound_and_common_jobs_are_claimed_in_one_order(
    broker: Broker, workers: Any, make_request: Callable[..., GenerationRequest]
) -> None:
    """They are claimed by class, arrival and priority, as if they were in one queue."""
    ours, _ = workers
    jobs = [await broker.jobs.submit(make_request(job_class=JobClass.BATCH)) for _ in range(2)]
    await ours.claim(2)
    await ours.commit([(job.id, TokenEvent(seq=1, token_ids=(7,))) for job in jobs])
    fresh = await broker.jobs.submit(make_request(job_class=JobClass.BATCH))
    urgent = await broker.jobs.submit(make_request(job_class=JobClass.BATCH, priority=-5))
    asked = await broker.jobs.submit(make_request())
    await ours.release([job.id for job in jobs])
    claims = [claim.job_id for claim in await ours.claim(8)]
    assert claims == [asked.id, urgent.id, jobs[0].id, jobs[1].id, fresh.id]


async def test_a_bound_job_can_be_cancelled_and_expires(
    broker: Broker, workers: Any, make_request: Callable[..., GenerationRequest]
) -> None:
    ours, _ = workers
    jobs = [await broker.jobs.submit(make_request(expires_in=expires_in)) for expires_in in (None, 0.3)]
    await ours.claim(2)
    await ours.commit([(job.id, TokenEvent(seq=1, token_ids=(7,))) for job in jobs])
    await ours.release([job.id for job in jobs])
    assert [(one.digest, one.interactive) for one in await broker.jobs.bound()] == [(A, 2)]
    assert (await broker.jobs.cancel(jobs[0].id)).state is JobState.CANCELLED

    async def expired() -> Any:
        await broker.reaper().reap()
        return (await broker.jobs.get(jobs[1].id)).state is JobState.EXPIRED

    await until(expired)
    assert await broker.jobs.bound() == []
    assert await ours.claim(8) == []


async def test_a_job_whose_digest_is_gone_for_good_fails_and_says_why(
    config: BrokerConfig, card: ModelCard, make_request: Callable[..., GenerationRequest], raw: Any
) -> None:
    """It does not fail before `digest_wait`, nor while no worker serves the model."""
    async with await Broker.open(replace(config, digest_wait=0.2, lease_seconds=5.0)) as broker:
        reaper = broker.reaper()
        ours = await Lease.register(broker, replace(card, digest=A))
        job = await broker.jobs.submit(make_request())
        await begin(ours, job)
        await ours.close()
        index, entry = f"{broker.keys.tag}:bound", f"1:{A}:tale"
        long_ago = 1_000_000
        raw.zadd(index, {entry: long_ago})
        assert await reaper.fail_unserved() == 0  # no worker serves the model
        assert raw.zscore(index, entry) > long_ago
        theirs = await Lease.register(broker, replace(card, digest=B))
        assert await reaper.fail_unserved() == 0  # others have served it, but not long enough
        twin = await Lease.register(broker, replace(card, digest=A))
        raw.zadd(index, {entry: long_ago})
        assert await reaper.fail_unserved() == 0  # a worker that can take it
        await twin.close()
        raw.zadd(index, {entry: long_ago})
        assert await reaper.fail_unserved() == 1
        record = await broker.jobs.get(job.id)
        assert (record.state, error_of(record).code, error_of(record).status) == (JobState.FAILED, "model_changed", 503)
        assert [event.seq for event in await broker.journal.replay(job.id)] == [1, 2]
        assert await broker.jobs.bound() == []
        await reaper.fail_unserved()
        assert not raw.exists(index)
        await theirs.close()


async def test_a_job_that_an_older_reaper_queued_is_still_bound(
    broker: Broker, workers: Any, make_request: Callable[..., GenerationRequest], raw: Any
) -> None:
    """The previous release knows only the common queue."""
    ours, theirs = workers
    job, other = await broker.jobs.submit(make_request()), await broker.jobs.submit(make_request())
    await ours.claim(2)
    await ours.commit([(one.id, TokenEvent(seq=1, token_ids=(7,))) for one in (job, other)])
    await ours.release([job.id, other.id])
    queue, bound = f"{broker.keys.tag}:queue:interactive:tale", f"{broker.keys.tag}:bound:interactive:1:{A}:tale"
    for one, place in raw.zrange(bound, 0, -1, withscores=True):
        raw.zadd(queue, {one: place})
        raw.zrem(bound, one)
    # The cancel of an older gateway leaves a bound job in its queue.
    raw.hset(f"{broker.keys.tag}:job:{other.id}", "state", "cancelled")
    assert await theirs.claim(8) == []
    assert raw.zcard(queue) == 0
    assert [claim.job_id for claim in await ours.claim(8)] == [job.id]


async def test_jobs_and_workers_without_digests_work_as_before(
    broker: Broker, card: ModelCard, workers: Any, make_request: Callable[..., GenerationRequest]
) -> None:
    ours, _ = workers
    old, twin = await Lease.register(broker, card), await Lease.register(broker, card)
    job = await broker.jobs.submit(make_request())
    await begin(old, job)
    await old.release([job.id])
    assert [claim.job_id for claim in await twin.claim(8)] == [job.id]
    await twin.release([job.id])
    assert [claim.job_id for claim in await ours.claim(8)] == [job.id]
    for lease in (old, twin):
        await lease.close()


async def test_cards_and_workers_show_their_digests(broker: Broker, card: ModelCard, workers: Any) -> None:
    (known,) = await broker.models.cards()
    assert known.digest in (A, B)
    assert known.short_digest == known.digest[:12]
    assert {one.digest for one in await broker.models.workers()} == {A, B}


async def test_the_first_release_can_read_new_cards(broker: Broker, card: ModelCard, workers: Any, raw: Any) -> None:
    """The first release refuses a card with an unknown field."""
    stored = raw.hget(f"{broker.keys.tag}:models", "tale")
    first = ("v", "name", "created", "max_model_len", "vocab_size", "architecture", "quantization", "max_num_seqs")
    assert tuple(re.findall(rb'"(\w+)":', stored)) == tuple(name.encode() for name in first)
