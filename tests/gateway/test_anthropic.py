"""POST /v1/messages and /v1/messages/count_tokens: bodies, answers, events and errors in Anthropic's form."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from scripted_worker import ScriptedWorker, Step, ended, token
from served_gateway import ServeWith

from ktqueue.broker.lease import Claim
from ktqueue.core.events import FinishReason, JobState, PromptPart

PATH = "/v1/messages"
BODY: dict[str, Any] = {"model": "tale", "max_tokens": 16, "messages": [{"role": "user", "content": "Tell me"}]}
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def writes(text: str, finish: FinishReason = FinishReason.STOP) -> Any:
    """A script that writes the text in pieces of three characters, and then ends the choice."""

    async def script(claim: Claim) -> AsyncIterator[Step]:
        pieces = [text[start : start + 3] for start in range(0, len(text), 3)]
        for piece in pieces[:-1]:
            yield token(piece)
        yield token(pieces[-1], finish_reason=finish)
        yield ended(claim)

    return script


async def events_of(http: httpx.AsyncClient, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
    """All events of a stream but pings. The name of each is its type."""
    async with http.stream("POST", PATH, json={**body, "stream": True}, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        text = (await response.aread()).decode()
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        event = json.loads(fields["data"])
        assert fields["event"] == event["type"]
        events += [] if event["type"] == "ping" else [event]
    return events


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that the events build. Checks their order."""
    blocks: list[dict[str, Any]] = []
    written, is_open = "", False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            written, is_open = "", True
        elif event["type"] == "content_block_delta":
            assert is_open
            assert event["index"] == len(blocks) - 1
            delta = {name: value for name, value in event["delta"].items() if name != "type"}
            written += next(iter(delta.values()))
        elif event["type"] == "content_block_stop":
            assert is_open
            is_open = False
            block = blocks[-1]
            name = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]
            block[name] = json.loads(written) if name == "input" else written
    assert not is_open
    return blocks


async def test_an_answer_has_the_form_of_anthropics_message(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    response = await http.post(PATH, json=BODY, headers={"x-api-key": "any", "anthropic-version": "2023-06-01"})
    assert response.status_code == 200, response.text
    assert response.headers["request-id"] == response.headers["x-request-id"]
    body = response.json()
    assert body == {
        "id": f"msg-{response.headers['x-job-id']}",
        "type": "message",
        "role": "assistant",
        "model": "tale",
        "content": [{"type": "text", "text": "Once upon a time"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,
            "output_tokens": 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
        },
    }


async def test_a_stream_has_the_events_of_anthropic_in_order(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    events = await events_of(http, BODY)
    kinds = [event["type"] for event in events if event["type"] != "content_block_delta"]
    assert kinds == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["stop_reason"] is None
    assert joined(events) == [{"type": "text", "text": "Once upon a time"}]
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["input_tokens"] == 3
    assert events[-2]["usage"]["output_tokens"] == 3


async def test_thinking_text_and_tool_calls_are_blocks(http: httpx.AsyncClient, caller: ScriptedWorker) -> None:
    caller.script = writes(f"<think>Is it sunny?</think>Let me look.{CALL}")
    body = {**BODY, "tools": [WEATHER]}
    whole = (await http.post(PATH, json=body)).json()
    events = await events_of(http, body)
    for blocks in (whole["content"], joined(events)):
        kinds = [block["type"] for block in blocks]
        assert kinds == ["thinking", "text", "tool_use"]
        assert blocks[0]["thinking"] == "Is it sunny?"
        assert blocks[1]["text"] == "Let me look."
        assert (blocks[2]["name"], blocks[2]["input"]) == ("weather", {"city": "Rome"})
        assert blocks[2]["id"]
    assert whole["stop_reason"] == "tool_use"
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_a_tool_call_that_is_cut_has_what_was_written(http: httpx.AsyncClient, caller: ScriptedWorker) -> None:
    caller.script = writes('<tool_call>\n{"name": "weather", "arguments": {"city": "Ro', FinishReason.LENGTH)
    whole = (await http.post(PATH, json={**BODY, "tools": [WEATHER]})).json()
    assert whole["content"][-1]["input"] == {"city": "Ro"}
    assert whole["stop_reason"] == "max_tokens"


async def test_the_stop_sequence_is_named_and_left_out(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    worker.script = writes("one, two END")
    body = {**BODY, "stop_sequences": ["STOP", "END"]}
    whole = (await http.post(PATH, json=body)).json()
    assert worker.claims[0].request.sampling.include_stop_str_in_output
    assert whole["content"] == [{"type": "text", "text": "one, two "}]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "END")
    worker.script = writes("one, two and")
    whole = (await http.post(PATH, json=body)).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)


async def test_blocks_become_chat_messages(http: httpx.AsyncClient, caller: ScriptedWorker) -> None:
    cached = {"type": "text", "text": "Rome?", "cache_control": {"type": "ephemeral"}}
    secret = {"type": "redacted_thinking", "data": "x"}
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]}
    messages = [
        {"role": "user", "content": [cached]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "x"}, secret, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
        {"role": "system", "content": "Metric units."},
    ]
    body = {
        **BODY,
        "system": [{"type": "text", "text": "Be short."}],
        "messages": messages,
        "tools": [WEATHER],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "disabled"},
        "metadata": {"user_id": "u1"},
        "service_tier": "standard_only",
        "top_k": 5,
    }
    assert (await http.post(PATH, json=body)).status_code == 200
    request = caller.claims[0].request
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    assert [dict(message) for message in request.messages or ()] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "t1", "name": "weather"},
        {"role": "user", "content": "And now?"},
        {"role": "system", "content": "Metric units."},
    ]
    function = {key: WEATHER[key] for key in ("name", "description")} | {"parameters": WEATHER["input_schema"]}
    assert [tool["function"] for tool in request.tools] == [function]
    assert request.chat_template_kwargs["enable_thinking"] is False
    assert (request.user, request.sampling.top_k, request.sampling.max_tokens) == ("u1", 5, 16)


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.org/x.png"}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 1.5}, "temperature must be at most 1"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages.0.content.0 must be of a type that is one of 'text'",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"n": 2}, "n must be 1"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers is not supported"),
        ({"container": "c"}, "container is not supported"),
        ({"system": 5}, "system must be a string or a list of blocks, got 5"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0 must be a message whose content is not empty"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content must be a string or a list of blocks"),
    ],
)
async def test_a_bad_field_is_named_in_anthropics_form(
    http: httpx.AsyncClient, worker: ScriptedWorker, change: dict[str, Any], words: str
) -> None:
    response = await http.post(PATH, json={**BODY, **change})
    assert response.status_code == 400
    body = response.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert words in body["error"]["message"]


async def test_a_thread_is_refused_so_that_its_client_sends_whole_conversations(
    http: httpx.AsyncClient, worker: ScriptedWorker
) -> None:
    """The package's tool runner asks for one, and continues without only after this error."""
    response = await http.post(PATH, json={**BODY, "thread": {"type": "create"}})
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert (response.status_code, response.json()["error"]["details"]) == (400, details)
    assert (await http.post(PATH, json={**BODY, "thread": None})).status_code == 200


async def test_every_error_has_anthropics_form(
    http: httpx.AsyncClient, serve_with: ServeWith, worker: ScriptedWorker
) -> None:
    missing = await http.post(PATH, json={**BODY, "model": "nothing"})
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    wrong = await http.get(PATH)
    assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
    async with serve_with(api_keys=("ab" * 32,)) as (_, url), httpx.AsyncClient(base_url=url) as client:
        refused = await client.post(PATH, json=BODY, headers={"x-api-key": "wrong"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


async def test_a_failure_in_a_stream_is_an_error_event(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    async def script(claim: Claim) -> AsyncIterator[Step]:
        yield token("Once")
        yield 0.5
        yield ended(claim, JobState.FAILED)

    worker.script = script
    events = await events_of(http, BODY)
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"


async def test_a_stream_of_a_conversation_goes_on_with_the_same_events(
    http: httpx.AsyncClient, worker: ScriptedWorker
) -> None:
    events = await events_of(http, BODY, **{"X-Conversation-Id": "c"})
    resumed = await http.get("/v1/stream", params={"conv_id": "c"})
    datas = [json.loads(line[6:]) for line in resumed.text.splitlines() if line.startswith("data: ")]
    assert [event for event in datas if event["type"] != "ping"] == events


async def test_tokens_of_messages_are_counted(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    async def script(claim: Claim) -> AsyncIterator[Step]:
        assert claim.request.prompt_only
        yield {"prompt": PromptPart(token_ids=(1, 2, 3, 4), text="abcd")}
        yield ended(claim)

    worker.script = script
    body = {name: value for name, value in BODY.items() if name != "max_tokens"}
    response = await http.post(f"{PATH}/count_tokens", json=body)
    assert (response.status_code, response.json()) == (200, {"input_tokens": 4})


async def test_the_anthropic_package(url: str, caller: ScriptedWorker) -> None:
    anthropic: Any = pytest.importorskip("anthropic")
    caller.script = writes(f"<think>Is it sunny?</think>Let me look.{CALL}")
    async with anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0) as client:
        ask: dict[str, Any] = {**BODY, "tools": [WEATHER]}
        whole = await client.messages.create(**ask)
        async with client.messages.stream(**ask) as stream:
            streamed = await stream.get_final_message()
        for message in (whole, streamed):
            assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
            assert message.content[2].input == {"city": "Rome"}
            assert (message.stop_reason, message.usage.input_tokens, message.usage.output_tokens) == ("tool_use", 3, 3)
        assert whole._request_id.startswith("req-")
        (model,) = (await client.models.list()).data
        assert (model.type, model.display_name, model.created_at.year) == ("model", "tale", 2023)
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(**{**ask, "model": "nothing"})
        assert missing.value.body["error"]["type"] == "not_found_error"
