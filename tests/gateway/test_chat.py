"""POST /v1/chat/completions: bodies, chunks, logprobs, choices, the fields that reach the worker."""

import threading
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from scripted_worker import ScriptedWorker, Step, ended, logprob, token
from served_gateway import Conforms, PostStream

from ktqueue.broker.lease import Claim
from ktqueue.core.events import FinishReason, JobState
from ktqueue.core.request import JobClass
from ktqueue.gateway.answer import AnswerWriter
from ktqueue.gateway.feed import Batch

PATH = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tale", "messages": [{"role": "user", "content": "Tell me"}]}


def texts(chunks: list[Any]) -> dict[int, str]:
    """The text of each choice. Checks the order of the chunks too."""
    heads = {(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}
    assert len(heads) == 1
    said: dict[int, str] = defaultdict(str)
    roles, finished = set(), set()
    for chunk in chunks:
        for choice in chunk["choices"]:
            index, delta = choice["index"], choice["delta"]
            assert index not in finished
            if "role" in delta:
                assert index not in roles
                assert delta == {"role": "assistant", "content": ""}
                roles.add(index)
                continue
            assert index in roles
            if choice["finish_reason"] is not None:
                assert delta == {}
                finished.add(index)
            else:
                assert delta["content"]
                said[index] += delta["content"]
    assert roles == finished
    return said


async def test_an_answer_has_all_fields_of_openai(
    http: httpx.AsyncClient, worker: ScriptedWorker, conforms: Conforms
) -> None:
    response = await http.post(PATH, json=BODY)
    assert response.status_code == 200
    body = response.json()
    conforms(body, "CreateChatCompletionResponse")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Once upon a time", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert body["id"] == f"chatcmpl-{response.headers['x-job-id']}"
    assert response.headers["x-request-id"]


async def test_stream_is_the_same_text_in_valid_chunks(
    http: httpx.AsyncClient, worker: ScriptedWorker, stream: PostStream, conforms: Conforms
) -> None:
    whole = (await http.post(PATH, json={**BODY, "n": 3})).json()
    frames = await stream(PATH, {**BODY, "n": 3, "stream_options": {"include_usage": True}})
    for chunk in frames.data:
        conforms(chunk, "CreateChatCompletionStreamResponse")
    assert frames.done
    *chunks, last = frames.data
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert texts(chunks) == {choice["index"]: choice["message"]["content"] for choice in whole["choices"]}


async def test_no_usage_chunk_unless_asked_for(worker: ScriptedWorker, stream: PostStream) -> None:
    frames = await stream(PATH, {**BODY, "service_tier": "flex"})
    assert {chunk["service_tier"] for chunk in frames.data} == {"flex"}
    assert all("usage" not in chunk and chunk["choices"] for chunk in frames.data)


async def test_logprobs_without_text_make_no_empty_chunk(
    worker: ScriptedWorker, stream: PostStream, conforms: Conforms
) -> None:
    async def held(claim: Claim) -> AsyncIterator[Step]:
        yield {"token_ids": (1,), "logprobs": (logprob(b"\xe2\x82"),)}
        yield 0.05
        yield {"token_ids": (2,), "logprobs": (logprob(b"\xac"),), "text": "€"}
        yield 0.05
        yield {"token_ids": (3,), "logprobs": (logprob(b"st"),)}
        yield 0.05
        yield {"token_ids": (4,), "logprobs": (logprob(b""),), "finish_reason": FinishReason.STOP}
        yield ended(claim)

    worker.script = held
    frames = await stream(PATH, {**BODY, "logprobs": True, "top_logprobs": 2})
    for chunk in frames.data:
        conforms(chunk, "CreateChatCompletionStreamResponse")
    assert texts(frames.data) == {0: "€"}
    choices = [chunk["choices"][0] for chunk in frames.data]
    positions = [position for choice in choices for position in (choice.get("logprobs") or {"content": []})["content"]]
    assert [position["token"] for position in positions] == ["", "€", "st", ""]
    assert [bytes(position["bytes"]) for position in positions] == [b"\xe2\x82", b"\xac", b"st", b""]
    assert all(top["logprob"] <= 0 for position in positions for top in position["top_logprobs"])
    assert [len(position["top_logprobs"]) for position in positions] == [2] * 4


async def test_logprobs_include_half_a_character_at_the_end(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    async def cut(claim: Claim) -> AsyncIterator[Step]:
        yield {"token_ids": (1,), "logprobs": (logprob(b"a\xe2"),), "text": "a"}
        yield {
            "token_ids": (2,), "logprobs": (logprob(b"\x82"),), "text": "\ufffd",
            "finish_reason": FinishReason.LENGTH,
        }  # fmt: skip
        yield ended(claim)

    worker.script = cut
    choice = (await http.post(PATH, json={**BODY, "logprobs": True})).json()["choices"][0]
    assert [position["token"] for position in choice["logprobs"]["content"]] == ["a", "\ufffd"]
    assert choice["message"]["content"] == "a\ufffd"


async def test_logprobs_of_a_whole_answer(http: httpx.AsyncClient, worker: ScriptedWorker, conforms: Conforms) -> None:
    body = (await http.post(PATH, json={**BODY, "logprobs": True, "top_logprobs": 2})).json()
    conforms(body, "CreateChatCompletionResponse")
    choice = body["choices"][0]
    assert "".join(position["token"] for position in choice["logprobs"]["content"]) == choice["message"]["content"]
    assert worker.claims[0].request.sampling.logprobs == 2
    without = (await http.post(PATH, json=BODY)).json()
    assert without["choices"][0]["logprobs"] is None


async def test_large_answers_are_written_by_a_thread(
    http: httpx.AsyncClient, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 MB take 0.4 seconds, in which no other request would be answered."""
    threads: list[int] = []
    whole = AnswerWriter.whole

    def noted(self: AnswerWriter, events: Batch) -> bytes:
        threads.append(threading.get_ident())
        return whole(self, events)

    async def long(claim: Claim) -> AsyncIterator[Step]:
        yield token("a" * 1_500, logprobs=(logprob(b"a"),) * 1_500, finish_reason=FinishReason.STOP)
        yield ended(claim)

    monkeypatch.setattr(AnswerWriter, "whole", noted)
    await http.post(PATH, json=BODY)
    worker.script = long
    answer = (await http.post(PATH, json={**BODY, "logprobs": True})).json()
    assert len(answer["choices"][0]["logprobs"]["content"]) == 1_500
    assert [thread == threading.get_ident() for thread in threads] == [True, False]


async def test_waiting_text_is_joined(worker: ScriptedWorker, stream: PostStream) -> None:
    async def burst(claim: Claim) -> AsyncIterator[Step]:
        for letter in "abcdefgh":
            yield token(letter)
        yield 0.05
        yield {"finish_reason": FinishReason.LENGTH}
        yield ended(claim)

    worker.script = burst
    frames = await stream(PATH, BODY)
    assert texts(frames.data) == {0: "abcdefgh"}
    assert frames.data[-1]["choices"][0]["finish_reason"] == "length"


async def test_every_field_reaches_the_worker(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    body = {
        **BODY,
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}]},
            {"role": "user", "content": "Hi", "name": "ann"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
        "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "n": 2, "seed": 5, "stop": "END",
        "max_tokens": 9, "max_completion_tokens": 7, "min_tokens": 2, "presence_penalty": 1, "frequency_penalty": -1,
        "repetition_penalty": 1.1, "logit_bias": {"5": -100}, "stop_token_ids": [3], "ignore_eos": True,
        "user": "u", "metadata": {"a": "b"}, "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False}, "service_tier": "flex", "priority": 3, "expires_in": 60,
        "store": True, "parallel_tool_calls": False, "response_format": {"type": "text"}, "unknown_field": {},
    }  # fmt: skip
    assert (await http.post(PATH, json=body)).status_code == 200
    request = worker.claims[0].request
    assert request.messages == (
        {"role": "system", "content": "Be\nbrief"},
        {"role": "user", "content": "Hi", "name": "ann"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampling.n, sampling.seed, sampling.stop) == (2, 5, ("END",))
    assert (sampling.max_tokens, sampling.min_tokens) == (7, 2)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.1)
    assert (sampling.logit_bias, sampling.stop_token_ids, sampling.ignore_eos) == ({5: -100}, (3,), True)
    assert (request.user, request.metadata) == ("u", {"a": "b"})
    assert request.chat_template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}
    assert (request.job_class, request.priority, request.expires_in) == (JobClass.BATCH, 3, 60)


async def test_a_null_field_means_the_default(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    names = (
        "temperature",
        "top_p",
        "n",
        "stop",
        "max_tokens",
        "seed",
        "logit_bias",
        "tools",
        "response_format",
        "stream",
    )
    assert (await http.post(PATH, json={**BODY, **dict.fromkeys(names)})).status_code == 200
    sampling = worker.claims[0].request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.n, sampling.max_tokens) == (1.0, 1.0, 1, None)


async def test_tool_choice_none_offers_no_tools(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert (await http.post(PATH, json={**BODY, "tools": [tool], "tool_choice": "none"})).status_code == 200
    assert worker.claims[0].request.tools == ()


async def test_requests_with_the_same_idempotency_key_are_one_job(
    http: httpx.AsyncClient, worker: ScriptedWorker, conforms: Conforms
) -> None:
    headers = {"idempotency-key": "k1"}
    first = await http.post(PATH, json=BODY, headers=headers)
    second = await http.post(PATH, json=BODY, headers=headers)
    assert first.json() == second.json()
    assert len(worker.claims) == 1
    other = await http.post(PATH, json={**BODY, "seed": 1}, headers=headers)
    assert other.status_code == 422
    conforms(other.json(), "ErrorResponse")


async def test_a_job_that_did_not_finish_is_an_error(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    for state, status in ((JobState.CANCELLED, 499), (JobState.EXPIRED, 504), (JobState.FAILED, 500)):

        async def fails(claim: Claim, state: JobState = state) -> AsyncIterator[Step]:
            yield token("half")
            yield ended(claim, state)

        worker.script = fails
        response = await http.post(PATH, json=BODY)
        assert response.status_code == status
        assert set(response.json()["error"]) >= {"message", "type", "param", "code"}


async def test_the_part_that_is_no_text_is_shown(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    image = {"image_url": {"url": "data:image/png;base64," + "A" * 200}, "type": "image_url"}
    content = [{"type": "text", "text": "What is on this picture? " * 9}, image]
    response = await http.post(PATH, json={**BODY, "messages": [{"role": "user", "content": content}]})
    assert response.json()["error"]["message"].endswith("only text is read, got 'image_url'")


async def test_a_refusal_in_the_history_is_text(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    async def answered(refusal: object) -> httpx.Response:
        content = [{"type": "text", "text": "No."}, {"type": "refusal", "refusal": refusal}]
        messages = [*BODY["messages"], {"role": "assistant", "content": content}, *BODY["messages"]]
        return await http.post(PATH, json={**BODY, "messages": messages})

    assert (await answered("I can't.")).status_code == 200
    assert worker.claims[0].request.messages is not None
    assert worker.claims[0].request.messages[1] == {"role": "assistant", "content": "No.\nI can't."}
    assert (await answered(None)).status_code == 400
