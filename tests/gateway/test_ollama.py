"""Ollama's API: chats, prompts, models, refusals and errors in its form."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from scripted_worker import USAGE, ScriptedWorker, Step, ended, token

from ktqueue import __version__
from ktqueue.broker.lease import Claim
from ktqueue.core.events import FinishReason, JobState, Timings

CHAT, GENERATE = "/api/chat", "/api/generate"
BODY: dict[str, Any] = {"model": "tale", "messages": [{"role": "user", "content": "Tell me"}]}
PROMPT: dict[str, Any] = {"model": "tale", "prompt": "Tell me"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture
def thinker(caller: ScriptedWorker) -> ScriptedWorker:
    """A worker whose model `thinks`."""
    caller.script = thinks
    return caller


async def thinks(claim: Claim) -> AsyncIterator[Step]:
    """Thinking, text and a tool call in pieces, then the end. The gateway gets them one after the other."""
    text = f"<think>Is it sunny?</think>Let me look.{CALL}"
    for start in range(0, len(text), 7):
        yield token(text[start : start + 7])
        yield 0.02
    yield {"finish_reason": FinishReason.STOP}
    usage = replace(USAGE, timings=Timings(queue=0.25, tokenise=0.25, prefill=0.5, decode=1.0))
    yield {**ended(claim), "usage": usage}


async def lines_of(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All lines of a stream."""
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


async def test_json_may_have_the_content_type_that_curl_sends(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    for path, body in ((CHAT, BODY), (GENERATE, PROMPT), ("/api/show", {"model": "tale"})):
        for origin, status in ((None, 200), ("http://foreign.example", 403), (str(http.base_url).rstrip("/"), 200)):
            headers = form if origin is None else {**form, "origin": origin}
            assert (await http.post(path, content=json.dumps(body), headers=headers)).status_code == status, origin


async def test_a_chat_is_a_stream_unless_it_says_otherwise(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    lines = await lines_of(http, CHAT, BODY)
    assert "".join(line["message"]["content"] for line in lines) == "Once upon a time"
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    whole = (await http.post(CHAT, json={**BODY, "stream": False})).json()
    assert whole["message"] == {"role": "assistant", "content": "Once upon a time"}
    for last in (lines[-1], whole):
        assert (last["done"], last["done_reason"], last["model"]) == (True, "stop", "tale")
        assert (last["prompt_eval_count"], last["eval_count"]) == (5, 3)
        assert last["created_at"].endswith("Z")


async def test_a_prompt_is_a_chat_unless_it_is_raw(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    lines = await lines_of(http, GENERATE, {**PROMPT, "system": "Be short."})
    assert "".join(line["response"] for line in lines) == "Once upon a time"
    messages = worker.claims[0].request.messages or ()
    assert [message["content"] for message in messages] == ["Be short.", "Tell me"]
    raw = (await http.post(GENERATE, json={**PROMPT, "raw": True, "stream": False})).json()
    assert raw["response"] == "Once upon a time"
    assert worker.claims[1].request.prompt == "Tell me"
    await http.post(GENERATE, json={**PROMPT, "suffix": "end", "stream": False})
    assert worker.claims[2].request.suffix == "end"


async def test_thinking_and_tool_calls(http: httpx.AsyncClient, thinker: ScriptedWorker) -> None:
    body = {**BODY, "tools": [TOOL], "think": True}
    lines = await lines_of(http, CHAT, body)
    whole = (await http.post(CHAT, json={**body, "stream": False})).json()
    assert "".join(line["message"].get("thinking", "") for line in lines) == "Is it sunny?"
    assert "".join(line["message"]["content"] for line in lines) == "Let me look."
    assert (whole["message"]["thinking"], whole["message"]["content"]) == ("Is it sunny?", "Let me look.")
    streamed = [call for line in lines for call in line["message"].get("tool_calls", [])]
    for calls in (streamed, whole["message"]["tool_calls"]):
        assert [call["function"] for call in calls] == [{"index": 0, "name": "weather", "arguments": {"city": "Rome"}}]
        assert calls[0]["id"]
    assert whole["total_duration"] == 2_000_000_000
    assert (whole["prompt_eval_duration"], whole["eval_duration"]) == (500_000_000, 1_000_000_000)
    assert thinker.claims[0].request.chat_template_kwargs["enable_thinking"] is True


async def test_options_and_messages_reach_the_worker(http: httpx.AsyncClient, thinker: ScriptedWorker) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "sunny"},
    ]
    options = {
        "num_predict": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.2,
        "seed": 4, "stop": ["x"], "num_ctx": 512, "num_gpu": 1,
    }  # fmt: skip
    body = {**BODY, "messages": messages, "tools": [TOOL], "options": options, "format": "json", "stream": False}
    body |= {"keep_alive": "5m"}
    del body["tools"]
    response = await http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    request = thinker.claims[0].request
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (7, 0.5, 3, 0.9)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.seed, sampling.stop) == (0.1, 1.2, 4, ("x",))
    assert request.grammar
    made = [dict(message) for message in request.messages or ()]
    assert made[1]["reasoning_content"] == "hm"
    assert made[1]["tool_calls"][0]["function"] == call["function"]
    assert made[2] == {"role": "tool", "name": "weather", "content": "sunny"}


async def test_objects_of_a_format_have_no_other_properties(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    assert (await http.post(CHAT, json={**BODY, "format": schema, "stream": False})).status_code == 200
    assert '"additionalProperties": false' in (worker.claims[0].request.grammar or "")


@pytest.mark.parametrize("change", [PROMPT, {**PROMPT, "raw": True}, BODY])
async def test_log_probabilities_of_each_token(
    http: httpx.AsyncClient, worker: ScriptedWorker, change: dict[str, Any]
) -> None:
    path, body = CHAT if change is BODY else GENERATE, {**change, "logprobs": True, "top_logprobs": 2}
    async with http.stream("POST", path, json=body) as response:
        lines = [json.loads(line) async for line in response.aiter_lines()]
    streamed = [entry for line in lines for entry in line.get("logprobs", ())]
    assert [entry["token"] for entry in streamed] == ["Once", " upon", " a time"]
    assert [(entry["logprob"], len(entry["top_logprobs"])) for entry in streamed] == [(-0.5, 2)] * 3
    assert (await http.post(path, json={**body, "stream": False})).json()["logprobs"] == streamed
    assert worker.claims[0].request.sampling.logprobs == 2
    assert "logprobs" not in (await http.post(path, json={**change, "stream": False})).json()


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        (CHAT, {"options": {"temperature": 9}}, "temperature"),
        (CHAT, {"options": {"mirostat": 1}}, "mirostat"),
        (CHAT, {"options": {"n": 2}}, "options.n must be 1"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["aaaa"]}]}, "images"),
        (CHAT, {"format": "xml"}, 'format must be "json" or a JSON schema, got'),
        (CHAT, {"top_logprobs": 2}, "top_logprobs is allowed only with logprobs"),
        (CHAT, {"think": "much"}, "think must be true"),
        (GENERATE, {"prompt": "x", "template": "{{ .Prompt }}"}, "template"),
        (GENERATE, {"prompt": "x", "context": [1, 2]}, "context"),
        (GENERATE, {"prompt": "x", "raw": True, "system": "y"}, "system"),
    ],
)
async def test_a_bad_field_is_named(
    http: httpx.AsyncClient, worker: ScriptedWorker, path: str, change: dict[str, Any], words: str
) -> None:
    response = await http.post(path, json={**(BODY if path == CHAT else {"model": "tale"}), **change})
    assert response.status_code == 400, response.text
    assert set(response.json()) == {"error"}
    assert words in response.json()["error"]


async def test_a_context_that_is_too_large_is_refused(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    response = await http.post(CHAT, json={**BODY, "options": {"num_ctx": 1024}})
    assert response.status_code == 400
    assert "options.num_ctx must be at most 512" in response.json()["error"]


async def test_a_body_without_a_prompt_is_answered_at_once(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    loaded = (await http.post(GENERATE, json={"model": "tale"})).json()
    assert (loaded["response"], loaded["done"], loaded["done_reason"]) == ("", True, "load")
    left = (await http.post(CHAT, json={"model": "tale", "messages": [], "keep_alive": 0})).json()
    assert (left["message"]["content"], left["done_reason"]) == ("", "unload")
    assert (await http.post(GENERATE, json={"model": "nothing"})).status_code == 404
    for header in ("Idempotency-Key", "X-Conversation-Id"):
        assert (await http.post(GENERATE, json={"model": "tale"}, headers={header: "k" * 256})).status_code == 400
    assert not worker.claims


async def test_models(http: httpx.AsyncClient, thinker: ScriptedWorker) -> None:
    assert [model["name"] for model in (await http.get("/api/tags")).json()["models"]] == ["tale"]
    (running,) = (await http.get("/api/ps")).json()["models"]
    assert (running["context_length"], running["expires_at"][:4] > "2100") == (512, True)
    version = (await http.get("/api/version")).json()
    assert version["ktqueue"] == __version__
    assert [int(part) for part in version["version"].split(".")] >= [0, 6, 4]  # Copilot Chat refuses older ones
    shown = (await http.post("/api/show", json={"model": "tale:latest"})).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    info = shown["model_info"]
    assert (info["test.context_length"], info["general.basename"]) == (512, "tale")
    missing = await http.post("/api/show", json={"model": "nothing"})
    assert missing.status_code == 404
    assert "nothing" in missing.json()["error"]
    answered = (await http.post(CHAT, json={**BODY, "model": "tale:latest", "stream": False})).json()
    assert answered["done"]


@pytest.mark.parametrize("word", ["pull", "push", "create", "copy", "delete", "embed", "embeddings", "blobs/sha256:1"])
async def test_what_is_not_served_is_refused_by_name(http: httpx.AsyncClient, word: str) -> None:
    response = await http.post(f"/api/{word}", json={})
    assert response.status_code == 404
    assert f"/api/{word} is not served" in response.json()["error"]


async def test_a_failure_in_a_stream_is_the_last_line(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    async def script(claim: Claim) -> AsyncIterator[Step]:
        yield token("Once")
        yield 0.5  # long enough for a heartbeat, which must not spoil the next line
        yield ended(claim, JobState.FAILED)

    worker.script = script
    lines = await lines_of(http, CHAT, BODY)
    assert lines[0]["message"]["content"] == "Once"
    assert set(lines[-1]) == {"error"}


async def test_the_ollama_package(url: str, thinker: ScriptedWorker) -> None:
    ollama: Any = pytest.importorskip("ollama")
    async with ollama.AsyncClient(host=url) as client:
        whole = await client.chat(**BODY, tools=[TOOL], think=True)
        parts = [part async for part in await client.chat(**BODY, tools=[TOOL], think=True, stream=True)]
        assert whole.message.content == "".join(part.message.content for part in parts) == "Let me look."
        assert whole.message.thinking == "".join(part.message.thinking or "" for part in parts)
        assert whole.message.tool_calls[0].function.arguments == {"city": "Rome"}
        assert [call.function.name for part in parts for call in part.message.tool_calls or ()] == ["weather"]
        assert (parts[-1].done, parts[-1].eval_count) == (True, 3)
        assert (await client.generate(**PROMPT)).response.startswith("Let me look.")
        assert [model.model for model in (await client.list()).models] == ["tale"]
        assert [model.context_length for model in (await client.ps()).models] == [512]
        assert "thinking" in (await client.show("tale")).capabilities
        with pytest.raises(ollama.ResponseError) as missing:
            await client.chat(**{**BODY, "model": "nothing"})
        assert missing.value.status_code == 404
