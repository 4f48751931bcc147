"""The way of one job without faults: submit, claim, commit, follow."""

import asyncio
from collections.abc import Callable
from typing import Any

from required import required

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.core.events import JobState, TokenEvent, Usage
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest


async def test_a_job_is_submitted_claimed_committed_and_read(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    lease = await Lease.register(broker, card)
    record = await broker.jobs.submit(make_request())
    assert (record.state, record.position) == (JobState.QUEUED, 1)
    assert record.readable_request().sampling.seed is not None

    async def read() -> Any:
        return [event async for event in broker.journal.follow(record.id)]

    reader = asyncio.create_task(read())
    (claim,) = await lease.claim(8)
    assert (claim.job_id, claim.request, claim.attempt, claim.events) == (record.id, record.request, 1, [])
    events = [TokenEvent(seq=k, token_ids=(k,), text=f"w{k} ") for k in range(1, 4)]
    events.append(TokenEvent(seq=4, state=JobState.DONE, usage=Usage(prompt_tokens=1, completion_tokens=3)))
    for event in events:
        assert await lease.commit([(record.id, event)]) == set()
    async with asyncio.timeout(5):
        assert await reader == events
    assert await broker.journal.replay(record.id, 2) == events[2:]
    ended = await broker.jobs.get(record.id)
    assert ended.state is JobState.DONE
    assert ended.usage == events[-1].usage
    assert ended.attempts == 1
    started_at = required(ended.started_at, "started_at")
    assert ended.created_at <= started_at <= required(ended.finished_at, "finished_at")
    await lease.close()
