"""POST /v1/completions: prompts of all kinds, several jobs in one answer, logprobs."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from scripted_worker import ScriptedWorker, Step, ended, token
from served_gateway import Conforms, PostStream, ServeWith

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Claim
from ktqueue.core.events import FinishReason, JobState

PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": "tale", "prompt": "Once"}


async def echo(claim: Claim) -> AsyncIterator[Step]:
    """The text of each choice is its prompt and its number."""
    prompt = claim.request.prompt or str(list(claim.request.prompt_token_ids or ()))
    for index in range(claim.request.sampling.n):
        yield token(f"{prompt}/", index=index)
        yield 0.01
        yield token(str(index), index=index, finish_reason=FinishReason.STOP)
    yield ended(claim)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], ["[1, 2]"]), ([[1], [2, 3]], ["[1]", "[2, 3]"]), ([0], ["[0]"])],
)
async def test_a_prompt_may_have_any_form(
    http: httpx.AsyncClient,
    worker: ScriptedWorker,
    stream: PostStream,
    conforms: Conforms,
    prompt: Any,
    said: list[str],
) -> None:
    worker.script = echo
    expected = {job * 2 + index: f"{text}/{index}" for job, text in enumerate(said) for index in range(2)}
    response = await http.post(PATH, json={**BODY, "prompt": prompt, "n": 2})
    body = response.json()
    conforms(body, "CreateCompletionResponse")
    assert {choice["index"]: choice["text"] for choice in body["choices"]} == expected
    assert [choice["index"] for choice in body["choices"]] == sorted(expected)
    assert body["usage"]["total_tokens"] == 8 * len(said)
    assert len(response.headers["x-job-id"].split(",")) == len(said)
    assert body["id"] == f"cmpl-{response.headers['x-job-id'].split(',')[0]}"

    frames = await stream(PATH, {**BODY, "prompt": prompt, "n": 2, "stream_options": {"include_usage": True}})
    texts: dict[int, str] = defaultdict(str)
    finishes: dict[int, int] = defaultdict(int)
    for chunk in frames.data:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
            finishes[choice["index"]] += choice["finish_reason"] is not None
    assert frames.done
    assert texts == expected
    assert finishes == dict.fromkeys(expected, 1)
    assert frames.data[-1]["usage"] == body["usage"]


async def test_chunks_are_valid_except_for_the_null_finish_reason(
    worker: ScriptedWorker, stream: PostStream, conforms: Conforms
) -> None:
    frames = await stream(PATH, {**BODY, "logprobs": 1})
    for chunk in frames.data:
        # OpenAI streams null here too, but its description has one schema for bodies and chunks.
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        conforms(chunk, "CreateCompletionResponse")


async def test_logprobs_and_their_offsets_are_the_same_in_streams(
    http: httpx.AsyncClient, worker: ScriptedWorker, stream: PostStream, conforms: Conforms
) -> None:
    body = (await http.post(PATH, json={**BODY, "logprobs": 2})).json()
    conforms(body, "CreateCompletionResponse")
    logprobs = body["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == body["choices"][0]["text"]
    assert logprobs["text_offset"] == [0, 4, 9]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["top_logprobs"][0] == {"Once": -0.5, "\ufffd": -9999.0}
    frames = await stream(PATH, {**BODY, "logprobs": 2})
    offsets = [
        offset
        for chunk in frames.data
        for choice in chunk["choices"]
        for offset in (choice["logprobs"] or {"text_offset": []})["text_offset"]
    ]
    assert offsets == [0, 4, 9]


async def test_the_default_length_is_that_of_openai(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    assert (await http.post(PATH, json=BODY)).status_code == 200
    assert worker.claims[0].request.sampling.max_tokens == 16


async def test_one_failed_prompt_fails_the_answer_and_cancels_the_rest(
    http: httpx.AsyncClient, worker: ScriptedWorker, broker: Broker
) -> None:
    async def some_fail(claim: Claim) -> AsyncIterator[Step]:
        yield token("x")
        if claim.request.prompt == "bad":
            yield ended(claim, JobState.FAILED)
        else:
            for _ in range(500):
                yield 0.01

    worker.script = some_fail
    response = await http.post(PATH, json={**BODY, "prompt": ["good", "bad"]})
    assert response.status_code == 500
    good = next(claim.job_id for claim in worker.claims if claim.request.prompt == "good")
    assert [event async for event in broker.journal.follow(good)][-1].state is JobState.CANCELLED


async def test_too_many_choices_are_refused(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    response = await http.post(PATH, json={**BODY, "prompt": ["a"] * 100, "n": 2})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"
    assert response.json()["error"]["limit"] == 128


async def test_a_refused_request_cancels_no_job_of_its_idempotency_key(
    serve_with: ServeWith, worker: ScriptedWorker, broker: Broker
) -> None:
    """The job of the first prompt exists already, and an earlier client waits for it."""
    first_may_end = asyncio.Event()

    async def wait(claim: Claim) -> AsyncIterator[Step]:
        while not first_may_end.is_set():
            yield 0.01
        yield token("x", finish_reason=FinishReason.STOP)
        yield ended(claim)

    worker.script = wait
    headers = {"idempotency-key": "k"}
    async with serve_with() as (server, url), httpx.AsyncClient(base_url=url, timeout=20) as http:
        first = asyncio.create_task(http.post(PATH, json={**BODY, "prompt": ["a", "b"]}, headers=headers))
        await worker.claimed(2)
        other = await http.post(PATH, json={**BODY, "prompt": ["a", "c"]}, headers=headers)
        assert other.json()["error"]["code"] == "idempotency_conflict"
        await server.gateway.finish_background()
        assert not any(job.cancel_requested for job in await broker.jobs.list())
        first_may_end.set()
        assert (await first).status_code == 200


async def test_a_token_id_of_a_later_prompt_is_refused_before_an_earlier_one_streams(
    http: httpx.AsyncClient, worker: ScriptedWorker
) -> None:
    body = {"model": "tale", "prompt": [[5], [6, 256]], "stream": True}
    worker.script = echo
    answer = await http.post(PATH, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt[1][1]"
    job = await http.post("/v1/jobs", json={"model": "tale", "prompt_token_ids": [6, 256]})
    assert (job.status_code, job.json()["error"]["param"]) == (400, "prompt_token_ids[1]")
