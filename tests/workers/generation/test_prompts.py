"""What a worker tells about prompts: their text, their tokens, and log probabilities, also after a death."""

from dataclasses import replace
from typing import Any

import pytest

from ktqueue.broker.broker import Broker
from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import InvalidRequest
from ktqueue.core.events import FinishReason, JobState, PositionLogprobs, TokenEvent
from ktqueue.core.request import GenerationRequest, SamplingParams
from ktqueue.workers.generation.running_job import PART_TOKENS

STORY = "Once upon a time there was a king who"
SCORED = GenerationRequest(
    model="demo", prompt=STORY, sampling=SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=2)
)


def prompt_of(events: list[TokenEvent]) -> tuple[list[int], str, list[PositionLogprobs | None]]:
    parts = [event.prompt for event in events if event.prompt is not None]
    return (
        [token_id for part in parts for token_id in part.token_ids],
        "".join(part.text for part in parts),
        [entry for part in parts for entry in part.logprobs],
    )


@pytest.mark.parametrize("messages", [True, False])
async def test_a_prompt_without_an_answer(
    model: Any, broker: Broker, start_worker: Any, finished: Any, messages: bool
) -> None:
    chat = GenerationRequest(model="demo", messages=({"role": "user", "content": "Hi"},), prompt_only=True)
    request = chat if messages else GenerationRequest(model="demo", prompt=STORY, prompt_only=True)
    async with start_worker() as running:
        observed = await finished((await broker.jobs.submit(request)).id)
        assert running.engine.stats().prompt_tokens == 0
    assert observed.state is JobState.DONE
    assert observed.last.usage is not None
    encoded = model.tokenizer.encode_request(request)
    assert prompt_of(observed.events) == (encoded.token_ids, encoded.text, [])
    assert observed.last.usage.prompt_tokens == len(encoded.token_ids)
    assert observed.choices == [([], "")]


async def test_a_prompt_without_an_answer_takes_no_row(broker: Broker, start_worker: Any, finished: Any) -> None:
    config = EngineConfig(max_num_seqs=1, max_num_batched_tokens=64, num_pages=64, max_model_len=512, threads=1)
    busy = GenerationRequest(model="demo", prompt=STORY, sampling=SamplingParams(max_tokens=400, ignore_eos=True))
    async with start_worker(engine_config=config):
        running = await broker.jobs.submit(busy)
        async for event in broker.journal.follow(running.id):
            if event.token_ids:
                break
        waiting = await broker.jobs.submit(busy)
        only = [await broker.jobs.submit(replace(SCORED, prompt_only=True, priority=-1)) for _ in range(4)]
        for record in only:
            assert (await finished(record.id)).state is JobState.DONE
        assert [(await broker.jobs.get(job.id)).state for job in (running, waiting)] == ["running", "queued"]
        await broker.jobs.cancel(waiting.id)
        await broker.jobs.cancel(running.id)


async def test_a_prompt_beside_its_answer(model: Any, broker: Broker, start_worker: Any, finished: Any) -> None:
    ids = tuple(model.tokenizer.encode(STORY))
    sampling = SamplingParams(temperature=0.0, max_tokens=5, prompt_logprobs=0)
    request = GenerationRequest(model="demo", prompt_token_ids=ids, sampling=sampling, return_prompt=True)
    async with start_worker():
        observed = await finished((await broker.jobs.submit(request)).id)
    token_ids, text, logprobs = prompt_of(observed.events)
    assert (token_ids, text) == (list(ids), STORY)
    assert logprobs[0] is None
    assert [entry.chosen.token_id for entry in logprobs[1:] if entry is not None] == list(ids[1:])
    assert observed.choices == model.undisturbed(replace(request, sampling=replace(sampling, prompt_logprobs=None)))
    kinds = [event.prompt is not None for event in observed.events]
    assert kinds == sorted(kinds, reverse=True), "the prompt comes before the answer"


async def test_a_long_prompt_comes_in_parts(model: Any, broker: Broker, start_worker: Any, finished: Any) -> None:
    ids = tuple([5, 6, 7] * PART_TOKENS)
    async with start_worker():
        request = GenerationRequest(model="demo", prompt_token_ids=ids, prompt_only=True)
        observed = await finished((await broker.jobs.submit(request)).id)
    assert prompt_of(observed.events) == (list(ids), model.tokenizer.decode(ids), [])
    assert len(observed.events) >= 4


async def test_a_prompt_is_told_once_however_often_its_worker_dies(
    model: Any, broker: Broker, start_worker: Any, finished: Any
) -> None:
    """Each worker computes four prompt tokens per step and is killed after a few."""
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=4, num_pages=256, max_model_len=512, threads=1)
    request = replace(
        SCORED, prompt=STORY * 20, sampling=replace(SCORED.sampling, max_tokens=3, ignore_eos=True), return_prompt=True
    )
    async with start_worker():
        undisturbed = await finished((await broker.jobs.submit(request)).id)
    record = await broker.jobs.submit(request)
    deaths = 0
    for entries in (20, 60, 100):
        async with start_worker(engine_config=config) as running:
            told = 0
            async for event in broker.journal.follow(record.id):
                told += len(event.prompt.logprobs) if event.prompt is not None else 0
                if told >= entries:
                    break
            await running.killed()
            deaths += not (await broker.jobs.get(record.id)).state.terminal
    assert deaths == 3
    async with start_worker():
        observed = await finished(record.id, within=40.0)
    token_ids, text, logprobs = prompt_of(observed.events)
    expected_ids, expected_text, expected_logprobs = prompt_of(undisturbed.events)
    assert (token_ids, text, observed.choices) == (expected_ids, expected_text, undisturbed.choices)
    assert logprobs[0] is None and len(logprobs) == len(expected_logprobs)
    for entry, expected in zip(logprobs[1:], expected_logprobs[1:], strict=True):
        assert entry is not None and expected is not None
        assert entry.chosen.token_id == expected.chosen.token_id
        assert entry.chosen.logprob == pytest.approx(expected.chosen.logprob, abs=1e-3)


async def test_no_token_is_asked_for(broker: Broker, start_worker: Any, finished: Any) -> None:
    async with start_worker():
        observed = await finished((await broker.jobs.submit(SCORED)).id)
    assert observed.choices == [([], "")]
    assert observed.last.finish_reason is FinishReason.LENGTH
    assert observed.last.usage is not None and observed.last.usage.completion_tokens == 0


async def test_bad_words_do_not_appear(broker: Broker, start_worker: Any, finished: Any) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    request = GenerationRequest(model="demo", prompt=STORY, sampling=sampling)
    async with start_worker():
        text = (await finished((await broker.jobs.submit(request)).id)).choices[0][1]
        words = tuple({word.strip('.,"') for word in text.split()} - {""})[:8]
        without = replace(request, sampling=replace(sampling, bad_words=words))
        ids, other = (await finished((await broker.jobs.submit(without)).id)).choices[0]
        assert len(ids) == 40 and not set(words) & set(other.split())
        few = replace(request, sampling=replace(sampling, allowed_token_ids=(300, 301, 302)))
        ids, _ = (await finished((await broker.jobs.submit(few)).id)).choices[0]
        assert len(ids) == 40 and set(ids) <= {300, 301, 302}


@pytest.mark.parametrize(
    ("changes", "param"),
    [({"suffix": "the end"}, "suffix"), ({"sampling": SamplingParams(allowed_token_ids=(9999,))}, "allowed_token_ids")],
)
async def test_what_the_model_cannot_do_is_refused(
    broker: Broker, start_worker: Any, finished: Any, changes: dict[str, Any], param: str
) -> None:
    async with start_worker():
        made = replace(GenerationRequest(model="demo", prompt=STORY), **changes)
        last = (await finished((await broker.jobs.submit(made)).id)).last
    assert last.state is JobState.FAILED
    assert last.error is not None and (last.error.status, last.error.param) == (InvalidRequest.status, param)


async def test_only_the_last_tokens_of_a_prompt_are_used(
    model: Any, broker: Broker, start_worker: Any, finished: Any
) -> None:
    request = GenerationRequest(model="demo", prompt=STORY * 5000, truncate_prompt_tokens=7, prompt_only=True)
    async with start_worker():
        observed = await finished((await broker.jobs.submit(request)).id)
    last = model.tokenizer.encode(STORY * 5000)[-7:]
    assert prompt_of(observed.events) == (last, model.tokenizer.decode(last), [])
