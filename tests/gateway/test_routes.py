"""Paths without /v1, and endpoints of other servers that are refused by name."""

import itertools
from typing import Any

import httpx
from scripted_worker import ScriptedWorker

from ktqueue.gateway.unserved import UNSERVED

CHAT: dict[str, Any] = {"model": "tale", "messages": [{"role": "user", "content": "Tell me"}]}


async def test_common_paths_work_without_their_version(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    chat = (await http.post("/chat/completions", json=CHAT)).json()
    assert chat["choices"][0]["message"]["content"] == "Once upon a time"
    completion = (await http.post("/completions", json={"model": "tale", "prompt": "x"})).json()
    assert completion["object"] == "text_completion"
    assert (await http.get("/models")).json() == (await http.get("/v1/models")).json()
    assert (await http.get("/models/tale")).json()["id"] == "tale"
    assert (await http.get("/chat/completions")).status_code == 405


async def test_an_endpoint_that_is_not_served_is_refused_by_name(http: httpx.AsyncClient) -> None:
    for word, form in itertools.product(UNSERVED, ("/v1/{}", "/{}", "/v1/{}/some/more")):
        path = form.format(word)
        response = await http.post(path, json={})
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (404, "unsupported_endpoint", "path"), path
        assert path in error["message"]
        assert UNSERVED[word] in error["message"]
