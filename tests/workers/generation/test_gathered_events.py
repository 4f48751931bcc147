"""Tokens of batch jobs are written in larger events while nobody reads them."""

import asyncio
from typing import Any

from ktqueue.broker.broker import Broker
from ktqueue.core.events import JobState
from ktqueue.core.request import GenerationRequest, JobClass, SamplingParams


def ask(tokens: int) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.9, top_p=0.95, seed=7)
    return GenerationRequest(model="demo", prompt="Once there was a king", sampling=sampling, job_class=JobClass.BATCH)


async def test_tokens_of_a_batch_job_are_gathered_while_nobody_reads_them(
    model: Any, broker: Broker, start_worker: Any, finished: Any
) -> None:
    request = ask(60)
    expected = model.undisturbed(request)
    async with start_worker() as running:
        unread, read = [await broker.jobs.submit(request) for _ in range(2)]
        followed = [event async for event in broker.journal.follow(read.id)]
        events = await broker.journal.whole(unread.id)
        stopped = await broker.jobs.submit(ask(400))
        while running.engine.stats().generation_tokens < 2 * 60 + 25:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await broker.jobs.cancel(stopped.id)
        cancelled = await broker.journal.whole(stopped.id)
    assert len(events[0].token_ids) == 1  # the first token is written at once
    assert len(events) <= 6
    assert len(followed) > 10
    for job in (unread, read):
        assert (await finished(job.id)).choices == expected
    assert cancelled[-1].state is JobState.CANCELLED
    assert cancelled[-1].usage is not None
    assert sum(len(event.token_ids) for event in cancelled) == cancelled[-1].usage.completion_tokens


async def test_gathered_tokens_that_died_with_their_worker_are_generated_again(
    model: Any, broker: Broker, start_worker: Any, finished: Any
) -> None:
    request = ask(90)
    expected = model.undisturbed(request)
    async with start_worker() as first:
        job = await broker.jobs.submit(request)
        while first.engine.stats().generation_tokens < 25:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await first.killed()
        generated = first.engine.stats().generation_tokens
        written = sum(len(event.token_ids) for event in await broker.journal.replay(job.id))
        async with start_worker():
            observed = await finished(job.id)
    assert 1 <= written < generated < 90
    assert observed.choices == expected
    assert observed.last.usage.completion_tokens == 90
