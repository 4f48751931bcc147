"""Answers that must match a grammar, from workers with the built-in model. They are valid, and go on after a death."""

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from ktqueue.answers.grammar import GrammarCompiler, Matcher
from ktqueue.broker.broker import Broker
from ktqueue.core.events import FinishReason, JobState
from ktqueue.core.request import GenerationRequest, JobClass, SamplingParams
from ktqueue.openai.json_schema import lark_of_schema
from ktqueue.workers.generation import admission, generation_worker

SCHEMA = {
    "type": "object",
    "properties": {
        "hero": {"type": "string", "minLength": 3, "maxLength": 40},
        "kind": {"enum": ["fox", "crow", "käse 🧀"]},
        "born": {"type": "string", "format": "date"},
        "friends": {"type": "array", "items": {"$ref": "#/$defs/friend"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["hero", "kind", "born", "friends"],
    "additionalProperties": False,
    "$defs": {
        "friend": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
    },
}
JSON = GenerationRequest(
    model="demo",
    messages=({"role": "user", "content": "Tell me about a fox as JSON."},),
    sampling=SamplingParams(seed=5, max_tokens=400, n=2, temperature=0.9),
    grammar=lark_of_schema(SCHEMA, "schema"),
)


def check(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA, format_checker=jsonschema.FormatChecker())


async def test_answers_are_valid_and_equal_those_of_an_engine_alone(
    model: Any, broker: Broker, start_worker: Any, finished: Any
) -> None:
    requests = [replace(JSON, sampling=replace(JSON.sampling, seed=seed)) for seed in (5, 6)]
    async with start_worker():
        jobs = [await broker.jobs.submit(request) for request in requests]
        for request, job in zip(requests, jobs, strict=True):
            observed = await finished(job.id, 2)
            assert observed.state is JobState.DONE
            assert observed.choices == model.undisturbed(request)
            for _, text in observed.choices:
                check(text)
            assert {event.finish_reason for event in observed.events} == {None, FinishReason.STOP}


async def test_a_half_written_document_goes_on_at_the_next_token(
    model: Any, broker: Broker, start_worker: Any, finished: Any
) -> None:
    expected = model.undisturbed(JSON)
    async with start_worker(stall_seconds=30.0) as first:
        job = await broker.jobs.submit(JSON)
        async for event in broker.journal.follow(job.id):
            if event.seq == 9:
                break
        await first.killed()
    assert event.state is None
    async with start_worker():
        observed = await finished(job.id, 2)
    assert observed.choices == expected
    assert (await broker.jobs.get(job.id)).attempts == 2


async def test_grammars_wait_for_memory(
    broker: Broker, start_worker: Any, finished: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for two grammars, however many rows are free."""
    monkeypatch.setattr(generation_worker, "available_memory", lambda: 0)
    monkeypatch.setattr(generation_worker, "LEAST_GRAMMAR_BYTES", 100_000_000)
    running_at_once = []
    compile_grammar = GrammarCompiler.compile

    def compile_and_count(compiler: GrammarCompiler, grammar: str) -> Matcher:
        matcher = compile_grammar(compiler, grammar)
        running_at_once.append(len(compiler._memory.lexers()))
        return matcher

    monkeypatch.setattr(GrammarCompiler, "compile", compile_and_count)
    plain = replace(JSON, messages=None, prompt="The", sampling=SamplingParams(max_tokens=40, ignore_eos=True))
    async with start_worker():
        jobs = [
            await broker.jobs.submit(replace(plain, grammar=f"start: /[a-z ]{{{length}}}/")) for length in range(30, 36)
        ]
        states = [(await finished(job.id)).state for job in jobs]
    assert states == [JobState.DONE] * 6
    assert len(running_at_once) == 6 and max(running_at_once) <= 2


async def test_the_wait_for_memory_of_a_grammar_ends(
    broker: Broker, start_worker: Any, finished: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for one grammar. An interactive job fails then, and a batch job goes back to the queue."""
    monkeypatch.setattr(generation_worker, "available_memory", lambda: 0)
    monkeypatch.setattr(generation_worker, "LEAST_GRAMMAR_BYTES", 50_000_000)
    monkeypatch.setattr(admission, "LONGEST_ROOM_WAIT", 0.05)
    plain = replace(JSON, messages=None, prompt="The", sampling=SamplingParams(max_tokens=450, ignore_eos=True))
    form = replace(plain, grammar="start: /[a-z ]{3000}/")
    async with start_worker():
        long = await broker.jobs.submit(form)
        async for _ in broker.journal.follow(long.id):
            break
        short = replace(form, grammar="start: /[a-z ]{9}/")
        batch = await broker.jobs.submit(replace(short, job_class=JobClass.BATCH))
        observed = await finished((await broker.jobs.submit(short)).id)
        assert (observed.state, observed.last.error.status) == (JobState.FAILED, 503)
        assert "took all memory for 0.05 seconds" in observed.last.error.message
        await broker.jobs.cancel(long.id)
        assert (await finished(batch.id)).state is JobState.DONE


async def test_a_bad_grammar_ends_its_own_job_only(
    model: Any, broker: Broker, start_worker: Any, finished: Any
) -> None:
    slow = 'start: %json {"type": "integer", "multipleOf": 9999991}'
    async with start_worker():
        good = await broker.jobs.submit(JSON)
        wrong = await broker.jobs.submit(replace(JSON, grammar="start: nothing"))
        endless = await broker.jobs.submit(replace(JSON, grammar=slow))
        assert (await finished(good.id, 2)).choices == model.undisturbed(JSON)
        for job, reason in ((wrong, "unknown name"), (endless, "takes more than 2 seconds")):
            observed = await finished(job.id, 2)
            assert observed.state is JobState.FAILED
            assert observed.last.error.status == 400 and observed.last.error.param == "grammar"
            assert reason in observed.last.error.message


async def test_a_limit_in_the_middle_of_an_answer_is_an_error_of_the_clients_field(
    broker: Broker, start_worker: Any, finished: Any
) -> None:
    hard = "start: /(?i)(straße|[à-ÿ]{1,2000}|\\w{1,4000}){1,3000}/"
    async with start_worker():
        sampling = SamplingParams(seed=1, max_tokens=400, ignore_eos=True)
        request = replace(JSON, sampling=sampling, grammar=hard, grammar_field="guided_regex")
        error = (await finished((await broker.jobs.submit(request)).id)).last.error
    assert (error.status, error.param, error.limit) == (400, "guided_regex", 200_000)
    assert error.message.startswith(
        "the grammar failed in the middle of the answer: its patterns take more than 200000"
    )
