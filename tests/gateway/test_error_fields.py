"""Errors name fields as the client has sent them, at the endpoints of each API."""

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
