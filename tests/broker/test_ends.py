"""Every job ends exactly once, with a last event, whoever ends it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from required import error_of

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.core.errors import LeaseLost
from ktqueue.core.events import JobState, TokenEvent, Usage
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest


@pytest.fixture
async def ended(broker: Broker) -> Any:
    """Assert how a job ended: its record, its journal and a live reader agree."""

    async def check(job_id: Any, state: Any, code: Any = None, seqs: Any = None) -> None:
        record = await broker.jobs.get(job_id)
        events = await broker.journal.replay(job_id)
        assert record.state is state
        assert record.finished_at is not None
        assert [event.state for event in events if event.state is not None] == [state]
        assert events[-1].state is state
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        if seqs is not None:
            assert len(events) == seqs
        assert (record.error.code if record.error else None) == code
        assert record.error == events[-1].error
        assert [event async for event in broker.journal.follow(job_id)] == events

    return check


async def test_a_queued_job_is_cancelled_at_once(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest], ended: Any
) -> None:
    job = await broker.jobs.submit(make_request())
    record = await broker.jobs.cancel(job.id)
    assert (record.state, record.position, error_of(record).code) == (JobState.CANCELLED, None, "cancelled")
    await ended(job.id, JobState.CANCELLED, "cancelled", 1)
    assert await lease.claim(4) == []
    assert (await broker.jobs.cancel(job.id)).state is JobState.CANCELLED
    await ended(job.id, JobState.CANCELLED, "cancelled", 1)


async def test_a_running_job_is_cancelled_by_its_worker(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest], ended: Any
) -> None:
    job = await broker.jobs.submit(make_request())
    await lease.claim(1)
    record = await broker.jobs.cancel(job.id)
    assert (record.state, record.cancel_requested) == (JobState.RUNNING, True)
    assert await lease.commit([(job.id, TokenEvent(seq=1, text="a"))]) == {job.id}
    assert await lease.commit([]) == {job.id}  # repeated until the job has ended
    usage = Usage(prompt_tokens=1, completion_tokens=1)
    assert await lease.commit([(job.id, TokenEvent(seq=2, state=JobState.CANCELLED, usage=usage))]) == set()
    assert (await broker.jobs.get(job.id)).usage == usage
    await ended(job.id, JobState.CANCELLED, None, 2)


async def test_a_job_that_ends_before_its_cancel_stays_done(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest], ended: Any
) -> None:
    job = await broker.jobs.submit(make_request())
    await lease.claim(1)
    await lease.commit([(job.id, TokenEvent(seq=1, state=JobState.DONE))])
    assert (await broker.jobs.cancel(job.id)).state is JobState.DONE
    assert await lease.commit([]) == set()
    await ended(job.id, JobState.DONE, None, 1)


async def test_a_job_that_ends_in_the_step_that_reports_its_cancel_stays_done(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest], ended: Any
) -> None:
    job = await broker.jobs.submit(make_request())
    await lease.claim(1)
    await broker.jobs.cancel(job.id)
    assert await lease.commit([(job.id, TokenEvent(seq=1, state=JobState.DONE))]) == set()
    await ended(job.id, JobState.DONE, None, 1)


async def test_cancels_and_ends_may_race(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest], ended: Any
) -> None:
    lease = await Lease.register(broker, card)
    jobs = [(await broker.jobs.submit(make_request())).id for _ in range(60)]

    async def work() -> None:
        open_jobs = {}
        while len(done) < len(jobs):
            for claim in await lease.claim(8):
                open_jobs[claim.job_id] = 0
            events = []
            for job_id in list(open_jobs):
                seq = open_jobs[job_id] = open_jobs[job_id] + 1
                state = JobState.DONE if seq == 4 else None
                events.append((job_id, TokenEvent(seq=seq, state=state)))
            stop = await lease.commit(events)
            for job_id, event in events:
                if event.state is not None:
                    done.add(job_id)
                    del open_jobs[job_id]
            for job_id in stop & open_jobs.keys():
                seq = open_jobs.pop(job_id) + 1
                await lease.commit([(job_id, TokenEvent(seq=seq, state=JobState.CANCELLED))])
                done.add(job_id)
            done.update(job.id for job in await broker.jobs.list(state=JobState.CANCELLED))

    async def cancel() -> None:
        for job_id in jobs[::2]:
            await broker.jobs.cancel(job_id)
            await asyncio.sleep(0.001)

    done: set[str] = set()
    async with asyncio.timeout(20):
        await asyncio.gather(work(), cancel())
    for job_id in jobs:
        record = await broker.jobs.get(job_id)
        await ended(job_id, record.state, record.error.code if record.error else None)
    states = [(await broker.jobs.get(job_id)).state for job_id in jobs]
    assert set(states[1::2]) == {JobState.DONE}
    assert JobState.CANCELLED in states[::2]
    await lease.close()


async def test_a_queued_job_expires(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest], ended: Any
) -> None:
    job = await broker.jobs.submit(make_request(expires_in=0.1))
    kept = await broker.jobs.submit(make_request(expires_in=60))
    assert await broker.reaper().reap() == (0, 0)
    await asyncio.sleep(0.12)
    assert await broker.reaper().reap() == (0, 1)
    assert await broker.reaper().reap() == (0, 0)
    await ended(job.id, JobState.EXPIRED, "deadline_exceeded", 1)
    assert [claim.job_id for claim in await lease.claim(4)] == [kept.id]


async def test_an_expired_job_is_not_claimed(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest], ended: Any
) -> None:
    job = await broker.jobs.submit(make_request(expires_in=0.05))
    await asyncio.sleep(0.07)
    assert await lease.claim(4) == []
    await ended(job.id, JobState.EXPIRED, "deadline_exceeded", 1)


async def test_a_running_job_expires_and_its_worker_must_stop_it(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest], ended: Any
) -> None:
    job = await broker.jobs.submit(make_request(expires_in=0.1))
    other = await broker.jobs.submit(make_request())
    claim, _ = await lease.claim(2)
    assert claim.deadline == pytest.approx(time.monotonic() + job.created_at + 0.1 - time.time(), abs=0.01)
    await lease.commit([(job.id, TokenEvent(seq=1, text="a"))])
    await asyncio.sleep(0.12)
    assert await broker.reaper().reap() == (0, 1)
    stop = await lease.commit([(job.id, TokenEvent(seq=2, text="late")), (other.id, TokenEvent(seq=1, text="b"))])
    assert stop == {job.id}
    assert await lease.commit([(job.id, TokenEvent(seq=3, state=JobState.CANCELLED))]) == {job.id}
    assert await lease.commit([]) == set()
    await ended(job.id, JobState.EXPIRED, "deadline_exceeded", 2)
    assert [event.text for event in await broker.journal.replay(other.id)] == ["b"]


async def test_a_worker_must_stop_an_expired_job_that_has_no_events(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest]
) -> None:
    job = await broker.jobs.submit(make_request(expires_in=0.05))
    await lease.claim(1)
    await asyncio.sleep(0.07)
    await broker.reaper().reap()
    assert await lease.commit([]) == {job.id}
    assert await lease.commit([]) == set()


async def test_events_after_the_last_one_are_dropped(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest], ended: Any
) -> None:
    job = await broker.jobs.submit(make_request())
    await lease.claim(1)
    last = TokenEvent(seq=1, state=JobState.DONE)
    assert await lease.commit([(job.id, last), (job.id, TokenEvent(seq=2, text="more"))]) == set()
    assert await lease.commit([(job.id, TokenEvent(seq=2, text="more"))]) == {job.id}
    await ended(job.id, JobState.DONE, None, 1)


async def test_a_cancelled_job_does_not_run_again_when_its_worker_dies(
    broker: Broker,
    card: ModelCard,
    make_request: Callable[..., GenerationRequest],
    ended: Any,
    expire_leases: Callable[[], Awaitable[None]],
) -> None:
    lease = await Lease.register(broker, card)
    job = await broker.jobs.submit(make_request())
    await lease.claim(1)
    await lease.commit([(job.id, TokenEvent(seq=1))])
    await broker.jobs.cancel(job.id)
    await expire_leases()
    assert await broker.reaper().reap() == (1, 0)
    await ended(job.id, JobState.CANCELLED, "cancelled", 2)
    with pytest.raises(LeaseLost):
        await lease.commit([])


async def test_a_cancelled_job_ends_when_it_is_released(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest], ended: Any
) -> None:
    job = await broker.jobs.submit(make_request())
    await lease.claim(1)
    await broker.jobs.cancel(job.id)
    await lease.release([job.id])
    await ended(job.id, JobState.CANCELLED, "cancelled", 1)
    assert await lease.commit([]) == set()
