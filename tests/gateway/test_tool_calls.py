"""Reasoning and tool calls in chats, whole and streamed: OpenAI's schema, and the same parts in both."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
from scripted_worker import ScriptedWorker, Step, ended, token
from served_gateway import Conforms, PostStream

from ktqueue.broker.lease import Claim
from ktqueue.core.events import FinishReason

PATH = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
BODY: dict[str, Any] = {"model": "tale", "messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL]}


async def test_an_answer_with_a_call(http: httpx.AsyncClient, caller: ScriptedWorker, conforms: Conforms) -> None:
    answer = (await http.post(PATH, json=BODY)).json()
    conforms(answer, "CreateChatCompletionResponse")
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("I ask.", "Hm.")
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}


async def test_a_stream_with_a_call(
    http: httpx.AsyncClient, caller: ScriptedWorker, stream: PostStream, conforms: Conforms
) -> None:
    frames = await stream(PATH, {**BODY, "stream_options": {"include_usage": True}})
    text, reasoning, arguments, begun = "", "", "", []
    for chunk in frames.data[:-1]:
        conforms(chunk, "CreateChatCompletionStreamResponse")
        for choice in chunk["choices"]:
            delta = choice["delta"]
            text += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                begun += [(call["index"], call["type"], call["function"]["name"])] if "id" in call else []
                arguments += call["function"].get("arguments") or ""
    assert (text, reasoning, arguments) == ("I ask.", "Hm.", '{"city": "Paris"}')
    assert begun == [(0, "function", "weather")]


async def only_calls(claim: Claim) -> AsyncIterator[Step]:
    yield token('<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>')
    yield {"index": 0, "finish_reason": FinishReason.STOP}
    yield ended(claim)


async def test_a_stream_of_a_call_alone_has_no_content(
    http: httpx.AsyncClient, caller: ScriptedWorker, stream: PostStream, conforms: Conforms
) -> None:
    caller.script = only_calls
    message = (await http.post(PATH, json=BODY)).json()["choices"][0]["message"]
    chunks = (await stream(PATH, BODY)).data[:-1]
    contents = [chunk["choices"][0]["delta"].get("content", "none") for chunk in chunks]
    assert message["content"] is None and contents == [None, *["none"] * (len(chunks) - 1)]
    conforms(chunks[0], "CreateChatCompletionStreamResponse")


async def test_a_message_with_a_call_may_come_back(
    http: httpx.AsyncClient, caller: ScriptedWorker, conforms: Conforms
) -> None:
    message = (await http.post(PATH, json=BODY)).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
    answer = await http.post(PATH, json={**BODY, "messages": [*BODY["messages"], message, result]})
    conforms(answer.json(), "CreateChatCompletionResponse")
    sent = caller.claims[-1].request.messages or ()
    assert [entry["role"] for entry in sent] == ["user", "assistant", "tool"]
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}


async def test_a_wrong_choice_is_an_error_of_openai(
    http: httpx.AsyncClient, caller: ScriptedWorker, conforms: Conforms
) -> None:
    for wrong in ({"tool_choice": {"type": "function", "function": {"name": "none"}}}, {"tools": [{"type": "x"}]}):
        response = await http.post(PATH, json={**BODY, **wrong})
        assert response.status_code == 400
        conforms(response.json(), "ErrorResponse")
