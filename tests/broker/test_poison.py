"""Jobs whose workers die: how often this may happen, and which of several jobs is blamed."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Claim, Lease
from ktqueue.core.errors import LeaseLost
from ktqueue.core.events import JobState, TokenEvent

MOST = 2  # attempts in a row that may end without a token
Die = Callable[..., Awaitable[Sequence[Claim]]]


@pytest.fixture
async def broker(config: Any, card: Any) -> AsyncIterator[Broker]:
    async with await Broker.open(replace(config, max_attempts=MOST)) as opened:
        await (await Lease.register(opened, card)).close()  # the model is known from here on
        yield opened


@pytest.fixture
def die(broker: Broker, card: Any) -> Die:
    """Let a worker claim the waiting jobs, put one on trial, commit a token of some, and die. Returns its claims."""

    async def one(*, trial: str | None = None, told: Sequence[str] = ()) -> Sequence[Claim]:
        lease = await Lease.register(broker, card)
        claims = await lease.claim(8)
        if trial is not None:
            await lease.start_trial(trial)
        seqs = {claim.job_id: len(claim.events) + 1 for claim in claims}
        await lease.commit([(job_id, TokenEvent(seq=seqs[job_id], text="x")) for job_id in told])
        await broker.reaper().release_lease(lease.id)
        await lease.close()
        return claims

    return one


async def test_a_job_that_kills_its_workers_fails_as_poison(broker: Broker, die: Die, make_request: Any) -> None:
    job = await broker.jobs.submit(make_request())
    for attempt in range(MOST):
        (claim,) = await die()
        assert (claim.attempt, claim.deaths_without_progress) == (attempt + 1, attempt)
    record = await broker.jobs.get(job.id)
    assert record.error is not None
    assert (record.state, record.error.code) == (JobState.FAILED, "poison_job")
    assert [event.state for event in await broker.journal.replay(job.id)] == [JobState.FAILED]
    assert await die() == []


async def test_deaths_after_new_tokens_fail_a_job_only_if_they_are_many(
    broker: Broker, die: Die, make_request: Any
) -> None:
    job = await broker.jobs.submit(make_request())
    await die()
    for attempt in range(2, 10 * MOST + 1):
        (claim,) = await die(told=[job.id])
        assert (claim.attempt, claim.deaths_without_progress) == (attempt, int(attempt == 2))
    assert (await broker.jobs.get(job.id)).state is JobState.FAILED


async def test_only_the_job_on_trial_is_blamed_for_a_death(broker: Broker, die: Die, make_request: Any) -> None:
    jobs = [(await broker.jobs.submit(make_request(prompt=f"{number}"))).id for number in range(3)]
    await die()
    assert [claim.deaths_without_progress for claim in await die(trial=jobs[1])] == [1, 1, 1]
    assert (await broker.jobs.get(jobs.pop(1))).state is JobState.FAILED
    claims = await die(trial=jobs[0], told=jobs[:1])
    assert {claim.job_id: claim.deaths_without_progress for claim in claims} == dict.fromkeys(jobs, 1)
    # Its token ended the trial, so the other job may have caused this second death.
    assert (await broker.jobs.get(jobs.pop(1))).state is JobState.FAILED
    assert [(claim.job_id, claim.deaths_without_progress) for claim in await die()] == [(jobs[0], 0)]


async def test_an_expired_lease_starts_no_trial(broker: Broker, card: Any, make_request: Any) -> None:
    lease = await Lease.register(broker, card)
    job = await broker.jobs.submit(make_request())
    await lease.claim(1)
    await broker.reaper().release_lease(lease.id)
    with pytest.raises(LeaseLost):
        await lease.start_trial(job.id)
    await lease.close()
