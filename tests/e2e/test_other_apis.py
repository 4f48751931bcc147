"""Responses, and the APIs of Anthropic and Ollama, with a worker of the built-in model that is killed at times."""

import asyncio
import json
import signal
from typing import Any

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="session")

MESSAGES: list[Any] = [{"role": "user", "content": "How warm is it in Köln?"}]
LETTERS = {"type": "string", "maxLength": 60, "pattern": "^[a-z ]{30,60}$"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "Paris"]}, "story": LETTERS},
    "required": ["city", "story"],
    "additionalProperties": False,
}
TOOLS = [{"name": "weather", "description": "The weather of a city.", "input_schema": SCHEMA}]
MESSAGE: dict[str, Any] = {"model": "demo", "max_tokens": 300, "seed": 3, "messages": MESSAGES}
CALL: dict[str, Any] = {**MESSAGE, "tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}


async def streamed_call(stack: Any, kill_at: int | None = None) -> tuple[str, str, str]:
    """Name, arguments and stop reason of a call. The worker is killed after `kill_at` pieces of the arguments."""
    name, arguments, reason, pieces = "", "", "", 0
    async with stack.http.stream("POST", "/v1/messages", json={**CALL, "stream": True}) as response:
        async for line in response.aiter_lines():
            event: dict[str, Any] = json.loads(line[6:]) if line.startswith("data: ") else {"type": ""}
            if event["type"] == "content_block_start":
                name += event["content_block"]["name"]
            elif event["type"] == "content_block_delta":
                arguments += event["delta"]["partial_json"]
                pieces += 1
                if pieces == kill_at:
                    stack.up.workers[0].signal(signal.SIGKILL)
            elif event["type"] == "message_delta":
                reason = event["delta"]["stop_reason"]
    return name, arguments, reason


async def test_a_forced_call_of_anthropic(stack: Any) -> None:
    response = await stack.http.post("/v1/messages", json=CALL)
    assert response.status_code == 200, response.text
    (block,) = response.json()["content"]
    assert (block["type"], block["name"]) == ("tool_use", "weather")
    assert block["input"]["city"] in ("Köln", "Paris")
    name, arguments, reason = await streamed_call(stack)
    assert (name, json.loads(arguments), reason) == ("weather", block["input"], "tool_use")


async def test_a_killed_worker_leaves_no_trace_in_a_call_of_anthropic(stack: Any) -> None:
    undisturbed = await streamed_call(stack)
    deaths = stack.up.workers[0].deaths
    assert await streamed_call(stack, kill_at=5) == undisturbed
    for _ in range(3000):  # the answer may end before the death is noticed
        if stack.up.workers[0].deaths > deaths:
            break
        await asyncio.sleep(0.01)
    assert stack.up.workers[0].deaths == deaths + 1


async def test_tokens_are_counted_as_they_are_used(stack: Any) -> None:
    body = {"model": "demo", "system": "Be short.", "messages": MESSAGES, "tools": TOOLS}
    counted = (await stack.http.post("/v1/messages/count_tokens", json=body)).json()
    usage = (await stack.http.post("/v1/messages", json={**body, "max_tokens": 1})).json()["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


async def test_a_message_that_the_model_continues(stack: Any) -> None:
    talk = [*MESSAGES, {"role": "assistant", "content": "Once upon a time"}]
    body = {**MESSAGE, "messages": talk, "max_tokens": 8, "temperature": 0}
    message = (await stack.http.post("/v1/messages", json=body)).json()
    assert message["content"][0]["text"]
    assert not message["content"][0]["text"].startswith("Once upon a time")


async def test_a_stop_sequence_of_the_model(stack: Any) -> None:
    whole = (await stack.http.post("/v1/messages", json={**MESSAGE, "max_tokens": 30, "temperature": 0})).json()
    text = whole["content"][0]["text"]
    word = text.split()[4]
    body = {**MESSAGE, "max_tokens": 30, "temperature": 0, "stop_sequences": [word]}
    stopped = (await stack.http.post("/v1/messages", json=body)).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", word)
    assert stopped["content"][0]["text"] == text[: text.index(word)]


async def test_a_format_of_ollama(stack: Any) -> None:
    body = {"model": "demo:latest", "messages": MESSAGES, "format": SCHEMA, "options": {"seed": 3}}
    response = await stack.http.post("/api/chat", json=body)
    lines = [json.loads(line) for line in response.text.splitlines()]
    answer = json.loads("".join(line["message"]["content"] for line in lines))
    assert set(answer) == {"city", "story"}
    assert (lines[-1]["done"], lines[-1]["done_reason"]) == (True, "stop")
    assert lines[-1]["eval_duration"] > 0
    assert lines[-1]["total_duration"] >= lines[-1]["eval_duration"]


async def test_a_prompt_of_ollama_is_the_same_raw_and_as_a_completion(stack: Any) -> None:
    raw = {"model": "demo", "prompt": "Once upon a", "raw": True, "stream": False}
    raw["options"] = {"temperature": 0, "num_predict": 8}
    prompt = {"model": "demo", "prompt": "Once upon a", "temperature": 0, "max_tokens": 8}
    text = (await stack.http.post("/v1/completions", json=prompt)).json()["choices"][0]["text"]
    assert (await stack.http.post("/api/generate", json=raw)).json()["response"] == text


LONG = "a " * 9000
WRONG_BIAS = {"logit_bias": {"1000000": 1}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/responses", {"input": LONG}, "input"),
        ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 3}, "messages"),
        ("/api/generate", {"prompt": LONG}, "prompt"),
        ("/api/generate", {"prompt": "a", "raw": True, "options": WRONG_BIAS}, "options.logit_bias"),
        ("/api/chat", {"messages": MESSAGES, "options": WRONG_BIAS}, "options.logit_bias"),
        ("/api/chat", {"messages": MESSAGES, "options": {"temperature": 9}}, "options.temperature"),
    ],
)
async def test_an_error_names_the_field_of_its_api(stack: Any, path: str, body: Any, param: str) -> None:
    answer = await stack.http.post(path, json={"model": "demo", **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    if path.startswith("/api"):  # an error of Ollama is its message alone
        assert error.startswith(f"{param} ") or "maximum context length" in error
    else:
        assert error["param"] == param


async def followed(stack: Any, response_id: str, after: int, kill_at: int | None = None) -> list[dict[str, Any]]:
    """The events of a response after one of them. The worker is killed after `kill_at` events."""
    events: list[dict[str, Any]] = []
    params = {"stream": "true", "starting_after": str(after)} if after >= 0 else {"stream": "true"}
    async with stack.http.stream("GET", f"/v1/responses/{response_id}", params=params) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
                if len(events) == kill_at:
                    stack.up.workers[0].signal(signal.SIGKILL)
    return events


async def test_a_response_in_the_background_survives_its_worker(stack: Any) -> None:
    body = {"model": "demo", "input": "Tell me of a king.", "background": True, "seed": 3}
    body |= {"max_output_tokens": 600, "ignore_eos": True}  # still running when the worker is killed
    texts, attempts = [], []
    for kill_at in (None, 20):
        begun = (await stack.http.post("/v1/responses", json=body)).json()
        events = await followed(stack, begun["id"], -1, kill_at)
        assert events == await followed(stack, begun["id"], -1)
        assert events[31:] == await followed(stack, begun["id"], 30)
        last = events[-1]
        assert last["type"] in ("response.completed", "response.incomplete")
        assert last["response"] == (await stack.http.get(f"/v1/responses/{begun['id']}")).json()
        texts.append(last["response"]["output"][0]["content"][0]["text"])
        job = (await stack.http.get(f"/v1/jobs/{begun['id'].removeprefix('resp_')}")).json()
        attempts.append(job["attempts"])
    assert texts[0] == texts[1]
    assert attempts == [1, 2]
