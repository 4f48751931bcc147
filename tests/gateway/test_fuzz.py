"""Random bodies for every endpoint that takes one: errors are 4xx and name the field, and none is a 500."""

import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from scripted_worker import ScriptedWorker

from ktqueue.core.errors import InvalidRequest
from ktqueue.openai import foreign_fields
from ktqueue.openai.jobs import parse_job

PATHS = {
    "/v1/chat/completions": "ChatBody", "/v1/completions": "CompletionBody", "/v1/jobs": "GenerationBody",
    "/v1/responses": "ResponseBody", "/v1/responses/input_tokens": "ResponseBody",
    "/v1/messages": "MessagesBody", "/v1/messages/count_tokens": "CountBody",
    "/api/chat": "OllamaChatBody", "/api/generate": "OllamaGenerateBody", "/tokenize": "TokenizeBody",
}  # fmt: skip
BASES: list[dict[str, Any]] = [
    {"model": "tale", "messages": [{"role": "user", "content": "Hi"}]},
    {"model": "tale", "prompt": "Hi"},
    {"model": "tale", "prompt_token_ids": [1, 2]},
    {"model": "tale", "input": "Hi"},
    {"model": "tale", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
]


def nested(levels: int, wrap: Callable[[Any], Any] = lambda inner: [inner]) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = wrap(value)
    return value


def call(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64 - 1, 0.5, 1e308, -1e308, "", "x", "none", "\x00", "\ud7ff",
    "x" * 70_000, [], {}, [[]], [None], [1, "a", None], {"": None}, {"5": 1, "\u0665": 1, "9" * 30: 2},
    nested(33), nested(260), nested(600), nested(260, lambda inner: {"a": inner}),
    {"type": "function", "function": {"name": "f", "strict": nested(260)}},
    [{"type": "function", "function": {"name": "f", "parameters": nested(260, lambda inner: {"a": inner})}}],
    [{"role": "user", "content": nested(600)}], [{"role": "tool", "content": None}], [{"role": 5}],
    [call("[" * 100_000)], [call('{"a":' * 900 + "1" + "}" * 900)], [call(nested(40, lambda inner: {"a": inner}))],
    {"url": "http://[::1"}, {"url": "https://127.0.0.1"}, {"url": "https://x:99999/", "events": []},
]  # fmt: skip


async def test_random_bodies_are_answered_or_refused_by_field(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    document = (await http.get("/openapi.json")).json()["components"]["schemas"]
    fields = {path: sorted(document[name]["properties"]) for path, name in PATHS.items()}
    foreign = [*foreign_fields.ALIASES, *foreign_fields.REFUSED, *foreign_fields.HINTS]
    sampling = sorted(document["SamplingBody"]["properties"])
    draw = random.Random(15)
    statuses = set()
    for _ in range(900):
        path = draw.choice(sorted(PATHS))
        body = dict(draw.choice(BASES))
        for name in draw.sample([*fields[path], *foreign], 2):
            body[name] = draw.choice(VALUES)
        if draw.random() < 0.3:
            body["sampling"] = {draw.choice(sampling): draw.choice(VALUES)}
        response = await http.post(path, json=body)
        statuses.add(response.status_code)
        assert response.status_code < 500, (path, str(body)[:500], response.text)
        if response.status_code == 400:
            error = response.json()["error"]
            assert error if path.startswith("/api/") else error["param"] and error["message"], error
            assert len(response.content) < 2_000
    assert {200, 400} <= statuses


async def test_deeply_nested_bodies_are_refused(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    deep = "[" * 1_000 + "]" * 1_000
    for body in (
        f'{{"model": "tale", "messages": [{{"role": "user", "content": {deep}}}]}}',
        f'{{"model": "tale", "messages": [{{"role": "user", "content": [{{"type": "text", "text": {deep}}}]}}]}}',
        f'{{"model": "tale", "prompt": "x", "metadata": {{"a": {deep}}}}}',
        f'{{"model": "tale", "prompt": "x", "webhook": {{"url": {deep}}}}}',
        f'{{"model": "tale", "prompt": {deep}}}',
    ):
        response = await http.post("/v1/jobs", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text


def test_deep_bodies_of_arq_are_refused() -> None:
    for body in (
        {"model": "m", "messages": [{"role": "user", "content": nested(1_000)}]},
        {"model": "m", "prompt": "x", "chat_template_kwargs": nested(1_000, lambda inner: {"a": inner})},
        {"model": "m", "prompt": "x", "metadata": {"a": nested(1_000)}},
        {"model": "m", "prompt": "x", "webhook": nested(1_000)},
        {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [nested(1_000, lambda i: {"a": i})]},
    ):
        with pytest.raises(InvalidRequest):
            parse_job(body, None)


def test_arguments_that_are_not_json_reach_the_template_unchanged() -> None:
    for arguments in ("[" * 100_000, '{"a":' * 1_000, json.dumps(nested(40, lambda inner: {"a": inner}))):
        request = parse_job({"model": "m", "messages": [call(arguments)], "sampling": {}}, None)
        assert request.messages is not None
        assert request.messages[0]["tool_calls"][0]["function"]["arguments"] == arguments
