"""Tests of the worker with a real engine and a real Redis."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import redis

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.core.errors import InvalidRequest
from ktqueue.core.events import FinishReason, JobState, TokenEvent
from ktqueue.core.request import GenerationRequest, JobClass, SamplingParams
from ktqueue.engine.engine import Engine
from ktqueue.engine.outputs import SequenceOutput
from ktqueue.loading.tokenizer.encoded_prompt import EncodedPrompt
from ktqueue.operators.gpu.attention.torch import TorchPlanner
from ktqueue.workers.generation.heartbeat import EngineStalled

STORY = "Once upon a time there was a king who"


def ask(prompt: str = STORY, **sampling: Any) -> GenerationRequest:
    given = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **sampling}
    return GenerationRequest(model="demo", prompt=prompt, sampling=SamplingParams(**given))


SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 7}


async def test_many_jobs_stream_the_same_text_as_an_engine_alone(
    model: Any, broker: Broker, start_worker: Any, finished: Any
) -> None:
    requests = [ask(f"{STORY} had {i} horses", max_tokens=8 + i, **(SEEDED if i % 2 else {})) for i in range(12)]
    async with start_worker() as running:
        jobs = [await broker.jobs.submit(request) for request in requests]
        seen = [await finished(job.id) for job in jobs]
        for request, observed in zip(requests, seen, strict=True):
            assert observed.state is JobState.DONE
            assert observed.choices == model.undisturbed(request)
            assert observed.last.finish_reason is FinishReason.LENGTH
            assert observed.last.usage is not None
            assert observed.last.usage.completion_tokens == request.sampling.max_tokens
            assert observed.last.usage.prompt_tokens == len(model.tokenizer.encode_request(request).token_ids)
            assert len(observed.events) > 4  # tokens were streamed
        await running.drained()
        assert running.engine.stats().running == running.engine.stats().waiting == 0


async def test_steps_on_a_device_are_launched_early(
    model: Any, broker: Broker, start_worker: Any, finished: Any
) -> None:
    """The texts stay the same, whichever jobs arrive or are cancelled in the meantime."""
    launched: list[bool] = []

    class CountingEngine(Engine):
        def step(self, *arguments: Any) -> list[SequenceOutput]:
            outputs = super().step(*arguments)
            launched.append(self._next.is_launched)
            return outputs

    engine = model.engine(planner=TorchPlanner(16), kind=CountingEngine)
    requests = [ask(f"{STORY} had {i} cows", max_tokens=12 + 2 * i, **(SEEDED if i % 2 else {})) for i in range(12)]
    async with start_worker(engine):
        jobs = [await broker.jobs.submit(request) for request in requests]
        await broker.jobs.cancel(jobs[3].id)
        seen = [await finished(job.id) for job in jobs]
    for number, (request, observed) in enumerate(zip(requests, seen, strict=True)):
        assert number == 3 or observed.choices == model.undisturbed(request)
    assert sum(launched) > 10
    assert engine.stats().running == engine.stats().waiting == 0


async def test_choices_share_a_job(model: Any, broker: Broker, start_worker: Any, finished: Any) -> None:
    request = ask(n=3, **SEEDED)
    async with start_worker():
        job = await broker.jobs.submit(request)
        observed = await finished(job.id, n=3)
    assert observed.choices == model.undisturbed(request)
    assert observed.last.usage is not None
    assert observed.last.usage.completion_tokens == 3 * 24
    assert sum(event.finish_reason is not None for event in observed.events) == 3


async def test_jobs_with_more_choices_than_rows_run_one_after_another(
    model: Any, broker: Broker, start_worker: Any, finished: Any
) -> None:
    requests = [ask(n=3, max_tokens=4, **SEEDED) for _ in range(10)]
    jobs = [await broker.jobs.submit(request, job_id=f"job-{i}") for i, request in enumerate(requests)]
    expected = model.undisturbed(requests[0])
    async with start_worker():
        for job in jobs:
            assert (await finished(job.id, n=3)).choices == expected
            assert (await broker.jobs.get(job.id)).attempts == 1


@pytest.mark.parametrize(
    ("request_", "code", "param"),
    [
        (ask("tale " * 2000), "context_length_exceeded", None),
        (replace(ask(), prompt=None, prompt_token_ids=(1, 10**6)), "invalid_value", "prompt_token_ids[1]"),
        (ask(n=9, temperature=1.0), "invalid_value", "n"),
        (replace(ask(), prompt=None, messages=({"role": "user", "content": {"no": "such"}},)), "invalid_value", None),
    ],
    ids=["too long", "out of vocabulary", "more choices than rows", "template"],
)
async def test_a_bad_request_ends_only_its_own_job(
    request_: GenerationRequest,
    code: str,
    param: str | None,
    model: Any,
    broker: Broker,
    start_worker: Any,
    finished: Any,
) -> None:
    expected = model.undisturbed(ask())  # two threads cannot use a model at the same time
    async with start_worker():
        good = await broker.jobs.submit(ask())
        bad = await broker.jobs.submit(request_)
        after = await broker.jobs.submit(ask())
        wrong = await finished(bad.id)
        assert wrong.state is JobState.FAILED
        error = wrong.last.error
        assert error is not None
        assert (error.code, error.status) == (code, 400)
        assert param is None or error.param == param
        assert wrong.last.usage is not None
        for job in (good, after):
            assert (await finished(job.id)).choices == expected


async def test_a_running_job_can_be_cancelled(broker: Broker, start_worker: Any, finished: Any, model: Any) -> None:
    async with start_worker() as running:
        other = await broker.jobs.submit(ask())
        job = await broker.jobs.submit(ask(max_tokens=400))
        async for event in broker.journal.follow(job.id):
            if event.seq == 5:
                await broker.jobs.cancel(job.id)
        observed = await finished(job.id)
        assert observed.state is JobState.CANCELLED
        assert observed.last.error is not None
        assert observed.last.error.code == "cancelled"
        assert observed.last.usage is not None
        assert observed.last.usage.completion_tokens == len(observed.choices[0][0]) < 40
        assert (await finished(other.id)).choices == model.undisturbed(ask())
        await running.drained()
        assert_empty(running.engine)


async def test_a_job_can_be_cancelled_in_the_queue_and_during_prefill(
    broker: Broker, start_worker: Any, finished: Any
) -> None:
    queued = await broker.jobs.submit(ask())
    await broker.jobs.cancel(queued.id)
    assert (await finished(queued.id)).state is JobState.CANCELLED
    async with start_worker() as running:
        jobs = [await broker.jobs.submit(ask("tale " * 400, max_tokens=50)) for _ in range(8)]
        await claimed(broker, jobs[7].id)
        for job in jobs:
            await broker.jobs.cancel(job.id)
        for job in jobs[1:]:
            observed = await finished(job.id)
            assert observed.state is JobState.CANCELLED
        assert observed.choices == [([], "")]
        await running.drained()
        assert_empty(running.engine)


class SlowEngine(Engine):
    """An engine whose steps take at least 10 ms."""

    def step(self, *arguments: Any) -> list[SequenceOutput]:
        time.sleep(0.01)
        return super().step(*arguments)


async def test_a_deadline_ends_the_job(broker: Broker, start_worker: Any, finished: Any, model: Any) -> None:
    async with start_worker(model.engine(kind=SlowEngine)) as running:
        job = await broker.jobs.submit(replace(ask(max_tokens=480), expires_in=0.5))
        observed = await finished(job.id)
        assert observed.state is JobState.EXPIRED
        assert observed.last.error is not None
        assert observed.last.error.code == "deadline_exceeded"
        assert 0 < len(observed.choices[0][0]) < 480
        await running.drained()
        assert_empty(running.engine)


@pytest.mark.parametrize("sampling", [{}, SEEDED, {**SEEDED, "n": 2, "repetition_penalty": 1.2}])
@pytest.mark.parametrize("how", ["killed", "lease deleted"])
async def test_a_resumed_job_gives_the_same_text(
    how: str, sampling: dict[str, Any], model: Any, broker: Broker, start_worker: Any, finished: Any, lose_lease: Any
) -> None:
    request = ask(max_tokens=60, **sampling)
    expected = model.undisturbed(request)
    async with start_worker() as first:
        job = await broker.jobs.submit(request)
        async for event in broker.journal.follow(job.id):
            if event.seq == 15:
                break
        if how == "killed":
            await first.killed()
            async with start_worker():
                observed = await finished(job.id, n=request.sampling.n)
        else:
            lose_lease(first.worker.lease_id)
            observed = await finished(job.id, n=request.sampling.n)
            assert first.worker.incarnations == 2
            await first.drained()
            assert_empty(first.engine)
    assert observed.choices == expected
    assert observed.last.usage is not None
    assert observed.last.usage.completion_tokens == 60 * request.sampling.n
    assert (await broker.jobs.get(job.id)).attempts == 2


async def test_a_job_with_a_complete_journal_only_gets_its_last_event(
    broker: Broker, start_worker: Any, finished: Any, model: Any
) -> None:
    request = ask(max_tokens=2)
    job = await broker.jobs.submit(request, job_id="one")
    lease = await Lease.register(broker, model.card())
    (claim,) = await lease.claim(1)
    ids, text = model.undisturbed(request)[0]
    whole = TokenEvent(seq=1, token_ids=tuple(ids), text=text, finish_reason=FinishReason.LENGTH)
    await lease.commit([(claim.job_id, whole)])
    await lease.release([claim.job_id])
    async with start_worker():
        observed = await finished(job.id)
    await lease.close()
    assert observed.state is JobState.DONE
    assert observed.choices == [(ids, text)]
    assert len(observed.events) == 2
    assert observed.last.usage is not None
    assert observed.last.usage.completion_tokens == 2


async def test_a_draining_worker_finishes_its_running_jobs(
    broker: Broker, start_worker: Any, finished: Any, model: Any
) -> None:
    async with start_worker(drain_seconds=10.0) as running:
        job = await broker.jobs.submit(ask(max_tokens=40))
        async for event in broker.journal.follow(job.id):
            if event.seq == 3:
                break
        running.worker.drain()
        late = await broker.jobs.submit(ask())
        assert (await finished(job.id)).state is JobState.DONE
        await running.task
        assert (await broker.jobs.get(late.id)).state is JobState.QUEUED
        assert await broker.models.workers() == []


async def test_a_job_that_arrives_as_the_drain_begins_is_returned_at_once(
    broker: Broker, start_worker: Any, finished: Any, redis_direct: str
) -> None:
    with redis.Redis.from_url(redis_direct) as raw:
        async with start_worker(drain_seconds=10.0) as running:
            long = await broker.jobs.submit(ask(max_tokens=480))
            await claimed(broker, long.id)
            record = f"{broker.keys.tag}:worker:{running.worker.lease_id}"
            while raw.hget(record, "claimed") != b"":  # noqa: ASYNC110  # it has rows left and waits
                await asyncio.sleep(0.002)
            running.worker.drain()
            late = await broker.jobs.submit(ask())  # reaches the server before the worker's last claim
            while (await broker.jobs.get(late.id)).state is JobState.RUNNING:
                if await broker.journal.replay(late.id):
                    break  # the worker saw it just before the drain
                assert (await broker.jobs.get(long.id)).state is JobState.RUNNING
            else:
                assert (await broker.jobs.get(late.id)).attempts == 0
            assert (await finished(long.id)).state is JobState.DONE


async def test_jobs_that_a_drain_returns_do_not_lose_an_attempt(
    broker: Broker, start_worker: Any, finished: Any, model: Any
) -> None:
    request = ask(max_tokens=150)
    async with start_worker(drain_seconds=0.0) as running:
        job = await broker.jobs.submit(request)
        async for event in broker.journal.follow(job.id):
            if event.seq == 10:
                break
        await running.drained()
        assert_empty(running.engine)
    record = await broker.jobs.get(job.id)
    assert (record.state, record.attempts) == (JobState.QUEUED, 0)
    async with start_worker():
        observed = await finished(job.id)
    assert observed.choices == model.undisturbed(request)
    assert (await broker.jobs.get(job.id)).attempts == 1


async def test_a_broken_engine_ends_the_worker(broker: Broker, start_worker: Any, model: Any, finished: Any) -> None:
    calls = 0

    def breaks(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 6:
            raise RuntimeError("device lost")
        return model.loaded.module(*args, **kwargs)

    async with start_worker(model.engine(module=breaks)) as running:
        job = await broker.jobs.submit(ask())
        with pytest.raises(RuntimeError, match="device lost"):
            await running.task
    async with start_worker():
        assert (await finished(job.id)).choices == model.undisturbed(ask())


async def test_a_hanging_engine_ends_the_worker(
    broker: Broker, start_worker: Any, model: Any, hang: Callable[..., Any], finished: Any
) -> None:
    async with start_worker(model.engine(module=hang), stall_seconds=0.5) as running:
        job = await broker.jobs.submit(ask())
        with pytest.raises(EngineStalled, match="stall_seconds"):
            await asyncio.wait_for(running.task, 10.0)
    async with start_worker():
        assert (await finished(job.id)).choices == model.undisturbed(ask())


async def test_a_worker_also_runs_batch_jobs(broker: Broker, start_worker: Any, finished: Any, model: Any) -> None:
    async with start_worker():
        job = await broker.jobs.submit(replace(ask(), job_class=JobClass.BATCH))
        assert (await finished(job.id)).choices == model.undisturbed(ask())


async def claimed(broker: Broker, job_id: str) -> None:
    async with asyncio.timeout(5.0):
        while True:
            if (await broker.jobs.get(job_id)).state is not JobState.QUEUED:
                return
            await asyncio.sleep(0.002)


def assert_empty(engine: Any) -> None:
    stats = engine.stats()
    assert stats.running == stats.waiting == 0
    assert stats.free_pages == stats.total_pages


async def test_a_job_can_be_cancelled_while_its_bad_prompt_is_tokenised(
    broker: Broker, start_worker: Any, finished: Any, model: Any
) -> None:
    began, over = threading.Event(), threading.Event()

    class LateRefusal:
        """The model's tokenizer, which takes long to refuse a bad prompt."""

        template = model.tokenizer.template

        def encode_request(self, request: GenerationRequest, **options: Any) -> EncodedPrompt:
            if request.prompt == "bad":
                began.set()
                over.wait(30)
                raise InvalidRequest("no", param="prompt")
            prompt: EncodedPrompt = model.tokenizer.encode_request(request, **options)
            return prompt

        def __getattr__(self, name: str) -> Any:
            return getattr(model.tokenizer, name)

    async with start_worker(tokenizer=LateRefusal()) as running:
        other = await broker.jobs.submit(ask(max_tokens=400))  # the cancellation arrives with the commits of its steps
        bad = await broker.jobs.submit(ask("bad"))
        assert await asyncio.to_thread(began.wait, 30)
        await broker.jobs.cancel(bad.id)
        assert (await finished(bad.id)).state is JobState.CANCELLED
        over.set()
        assert (await finished(other.id)).state is JobState.DONE
        assert (await finished((await broker.jobs.submit(ask())).id)).state is JobState.DONE
        assert not running.task.done()


async def test_the_usage_of_a_job_says_how_long_each_part_took(
    broker: Broker, start_worker: Any, finished: Any
) -> None:
    submitted = time.monotonic()
    job = await broker.jobs.submit(ask())
    await asyncio.sleep(0.3)  # in the queue
    async with start_worker():
        seen = await finished(job.id)
    timings = seen.last.usage.timings
    assert timings.queue >= 0.3
    assert min(timings.tokenise, timings.prefill, timings.decode) > 0
    assert timings.queue + timings.tokenise + timings.prefill + timings.decode <= time.monotonic() - submitted
