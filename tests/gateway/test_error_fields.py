"""Errors name fields as the client has sent them, at the endpoints of each API."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from scripted_worker import ScriptedWorker


@pytest.mark.timeout(60)
async def test_a_grammar_that_takes_too_long_is_refused_under_the_name_of_its_field(
    http: httpx.AsyncClient, worker: ScriptedWorker
) -> None:
    endless = {"type": "integer", "multipleOf": 9999991}  # seconds; afterwards the verdict is known
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
    form = {"type": "json_schema", "schema": endless}
    for path, body, param in (
        ("/v1/chat/completions", {**chat, "guided_json": endless}, "guided_json"),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": endless}}, "structured_outputs.json"),
        ("/v1/responses", {"input": "Hi", "text": {"format": {**form, "name": "n"}}}, "text.format.schema"),
        ("/v1/messages", {**chat, "output_config": {"format": form}}, "output_config.format.schema"),
        ("/api/chat", {**chat, "model": "tale", "format": endless}, "format"),
    ):
        response = await http.post(path, json=body)
        error = response.json()["error"]
        text = error if path.startswith("/api") else error["message"]
        assert response.status_code == 400, (path, text)
        assert text.startswith(f"{param} cannot be used: it takes more than"), (path, text)


WRONG = {"type": "object", "properties": {"a": {"type": "x"}}}
MESSAGE = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/responses", {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": WRONG}}},
         "text.format.schema"),
        ("/v1/messages", {**MESSAGE, "output_config": {"format": {"type": "json_schema", "schema": WRONG}}},
         "output_config.format.schema"),
        ("/api/chat", {**MESSAGE, "model": "tale", "format": WRONG}, "format"),
    ],
)  # fmt: skip
async def test_a_wrong_schema_is_refused_under_the_name_of_its_field(
    http: httpx.AsyncClient, worker: ScriptedWorker, path: str, body: dict[str, Any], param: str
) -> None:
    response = await http.post(path, json=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error if path.startswith("/api") else error["message"]).startswith(f"{param}#/properties/a"), error


LOOK, OTHER = {"name": "look"}, {"name": "look", "description": "Another one."}


@pytest.mark.parametrize(
    ("path", "field", "wrapped", "param"),
    [
        ("/v1/chat/completions", "tools", lambda tool: {"type": "function", "function": tool}, "tools.1.function.name"),
        ("/v1/chat/completions", "functions", lambda tool: tool, "functions.1.name"),
        ("/v1/responses", "tools", lambda tool: {"type": "function", **tool}, "tools[1].name"),
        ("/v1/messages", "tools", lambda tool: {**tool, "input_schema": {}}, "tools.1.name"),
    ],
)
async def test_different_functions_of_one_name_are_refused_and_equal_ones_are_not(
    http: httpx.AsyncClient, caller: ScriptedWorker, path: str, field: str, wrapped: Callable[[Any], Any], param: str
) -> None:
    body = {"model": "tale", **(MESSAGE if path != "/v1/responses" else {"input": "Hi"})}
    refused = await http.post(path, json={**body, field: [wrapped(LOOK), wrapped(OTHER)]})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["value"]) == (400, param, "look")
    assert error["message"] == f"{param} must be a name that no other function has, got 'look'"
    assert (await http.post(path, json={**body, field: [wrapped(LOOK), wrapped(LOOK)]})).status_code == 200


async def test_a_wrong_tool_of_anthropic_is_refused_under_the_name_of_its_schema(
    http: httpx.AsyncClient, caller: ScriptedWorker
) -> None:
    tool = {"name": "look", "input_schema": {"type": "object", "not": {}}, "strict": True}
    refused = await http.post("/v1/messages", json={"model": "tale", **MESSAGE, "tools": [tool]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools.0.input_schema")
