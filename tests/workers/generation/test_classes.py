"""Interactive jobs take rows from running batch jobs, but not the rows that `batch_share` keeps for batch jobs."""

import asyncio
from dataclasses import replace
from typing import Any

from ktqueue.broker.broker import Broker
from ktqueue.core.events import JobState
from ktqueue.core.request import GenerationRequest, JobClass, SamplingParams

ROWS, FLOOR = 8, 1  # of the conftest's engine


def ask(max_tokens: int, job_class: JobClass = JobClass.INTERACTIVE, n: int = 1) -> GenerationRequest:
    sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=max_tokens, ignore_eos=True, n=n)
    return GenerationRequest(model="demo", prompt="Once upon a time", sampling=sampling, job_class=job_class)


async def submit(broker: Broker, count: int, request: GenerationRequest, name: str) -> list[str]:
    return [(await broker.jobs.submit(request, job_id=f"{name}{i}")).id for i in range(count)]


async def until_states(broker: Broker, **counts: int) -> None:
    """Wait until each state has this number of jobs."""
    async with asyncio.timeout(20.0):
        while True:
            jobs = await broker.jobs.list(limit=1000)
            if all(sum(job.state == state for job in jobs) == count for state, count in counts.items()):
                return
            await asyncio.sleep(0.005)


async def until_all_speak(broker: Broker, jobs: list[str]) -> None:
    """Wait until each job has a token, and so has had a row."""
    async with asyncio.timeout(20.0):
        for job in jobs:
            async for _ in broker.journal.follow(job):
                break


async def test_an_interactive_job_does_not_wait_for_batch_jobs(
    broker: Broker, start_worker: Any, finished: Any, model: Any
) -> None:
    long = ask(450, JobClass.BATCH)
    expected = model.undisturbed(long)
    async with start_worker() as running:
        batch = await submit(broker, ROWS + 4, long, "batch")
        await until_all_speak(broker, batch[:ROWS])
        (job,) = await submit(broker, 1, ask(3), "interactive")
        assert (await finished(job)).state is JobState.DONE
        states = [(await broker.jobs.get(job_id)).state for job_id in batch]
        assert states == [JobState.RUNNING] * ROWS + [JobState.QUEUED] * 4
        assert running.engine.stats().preemptions >= 1
        for job_id in batch[1 : ROWS - 1] + batch[ROWS:]:
            await broker.jobs.cancel(job_id)
        for job_id in (batch[0], batch[ROWS - 1]):  # the second of these lost its row
            assert (await finished(job_id)).choices == expected
            assert (await broker.jobs.get(job_id)).attempts == 1


async def test_a_worker_claims_only_as_many_jobs_as_its_engine_can_run(
    broker: Broker, start_worker: Any, finished: Any
) -> None:
    async with start_worker() as running:
        batch = await submit(broker, ROWS, ask(400, JobClass.BATCH), "batch")
        await until_all_speak(broker, batch)
        interactive = await submit(broker, 2 * ROWS, ask(400), "interactive")
        await until_states(broker, running=2 * ROWS - FLOOR)
        before = len(await broker.journal.replay(batch[0]))
        async with asyncio.timeout(20.0):  # the oldest batch job keeps running beside them
            async for event in broker.journal.follow(batch[0], before):
                if event.seq >= before + 20:
                    break
        (depth,) = await broker.jobs.depth()
        assert (depth.running, depth.batch_running, depth.interactive) == (2 * ROWS - FLOOR, ROWS, ROWS + FLOOR)
        assert running.engine.stats().running == ROWS
        for job_id in [*batch[1:], *interactive]:
            await broker.jobs.cancel(job_id)
        assert (await finished(batch[0])).state is JobState.DONE
    assert running.engine.stats().free_pages == running.engine.stats().total_pages


async def test_each_choice_of_a_job_takes_a_row(broker: Broker, start_worker: Any, finished: Any) -> None:
    async with start_worker():
        await until_all_speak(broker, await submit(broker, ROWS, ask(400, JobClass.BATCH), "batch"))
        wide = await submit(broker, 3, ask(400, n=3), "wide")
        await until_states(broker, running=ROWS + 2)  # 6 of the 7 rows that batch jobs can lose
        assert (await broker.jobs.get(wide[2])).state is JobState.QUEUED
        for job in await broker.jobs.list():
            await broker.jobs.cancel(job.id)
        await until_states(broker, running=0, queued=0)


async def test_batch_jobs_run_however_many_interactive_jobs_wait(
    broker: Broker, start_worker: Any, finished: Any
) -> None:
    async with start_worker():
        interactive = await submit(broker, 40, ask(20), "interactive")
        batch = await submit(broker, 3, ask(4, JobClass.BATCH), "batch")
        for job in (*interactive, *batch):
            await finished(job)
        ended = {job.id: job.finished_at or 0.0 for job in await broker.jobs.list(limit=1000)}
        last = max(ended[job] for job in interactive)
        assert all(0.0 < ended[job] < last for job in batch), "batch jobs waited for all interactive jobs"


async def test_batch_jobs_without_a_row_go_back_to_the_queue(
    broker: Broker, start_worker: Any, finished: Any, model: Any
) -> None:
    long = ask(200, JobClass.BATCH)
    expected = model.undisturbed(long)
    async with start_worker(no_row_seconds=0.0):
        batch = await submit(broker, ROWS, replace(long, sampling=replace(long.sampling, max_tokens=450)), "batch")
        await until_all_speak(broker, batch)
        interactive = await submit(broker, ROWS - FLOOR, ask(450), "interactive")
        await until_all_speak(broker, interactive)
        await until_states(broker, running=ROWS, queued=ROWS - 1)
        records = [await broker.jobs.get(job) for job in batch]
        assert [record.state for record in records] == [JobState.RUNNING] + [JobState.QUEUED] * 7
        assert [record.attempts for record in records] == [1] + [0] * 7, "a release does not count as an attempt"
        assert [record.position for record in records[1:]] == [1, 2, 3, 4, 5, 6, 7]
        for job in [*interactive, *batch[1:-1]]:
            await broker.jobs.cancel(job)
        last = await finished(batch[-1])
        assert last.choices[0][0][:200] == expected[0][0]


async def test_preempted_jobs_of_a_dead_worker_continue_elsewhere(
    broker: Broker, start_worker: Any, finished: Any, model: Any
) -> None:
    requests = {"batch": ask(400, JobClass.BATCH), "interactive": ask(50)}
    async with start_worker() as running:
        jobs = await submit(broker, ROWS, requests["batch"], "batch")
        await until_all_speak(broker, jobs)
        jobs += await submit(broker, 3, requests["interactive"], "interactive")
        await until_all_speak(broker, jobs[ROWS:])
        await running.killed()
    for job in jobs[1 : ROWS - 1]:
        await broker.jobs.cancel(job)
    expected = {name: model.undisturbed(request) for name, request in requests.items()}
    async with start_worker():
        for job in jobs[:1] + jobs[ROWS - 1 :]:
            assert (await finished(job)).choices == expected[job.rstrip("0123456789")]
            assert (await broker.jobs.get(job)).attempts == 2


async def test_a_newcomer_gets_a_row_of_a_tenant_that_has_them_all(
    broker: Broker, start_worker: Any, finished: Any, model: Any
) -> None:
    """The tenant's jobs lose no token. At most one row in eight is given away at once."""
    long = ask(450)
    expected = model.undisturbed(long)
    async with start_worker() as running:
        theirs = [(await broker.jobs.submit(long, job_id=f"long{i}", tenant="acme")).id for i in range(ROWS + 4)]
        await until_all_speak(broker, theirs[:ROWS])
        for caller in ("a", "b"):
            job = await broker.jobs.submit(ask(3), tenant="globex", caller=caller)
            assert (await finished(job.id)).state is JobState.DONE
        states = [(await broker.jobs.get(job_id)).state for job_id in theirs]
        assert states == [JobState.RUNNING] * ROWS + [JobState.QUEUED] * 4
        assert running.engine.stats().preemptions >= 1
        slow = [await broker.jobs.submit(long, tenant="globex") for _ in range(3)]
        await until_all_speak(broker, [slow[0].id])
        assert (await broker.jobs.get(slow[1].id)).state is JobState.QUEUED
        for job_id in [*theirs[1 : ROWS - 1], *theirs[ROWS:], *(job.id for job in slow)]:
            await broker.jobs.cancel(job_id)
        for job_id in (theirs[0], theirs[ROWS - 1]):  # the second of these lost its row
            assert (await finished(job_id)).choices == expected
            assert (await broker.jobs.get(job_id)).attempts == 1
