"""Bad input gets a status and an error that names field, limit and value. The next request works."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
from scripted_worker import ScriptedWorker, Step, ended, token
from served_gateway import Conforms, PostStream, ServeWith, serving

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Claim
from ktqueue.core.config import Config
from ktqueue.core.errors import ErrorInfo
from ktqueue.core.events import JobState

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
BODY: dict[str, Any] = {"model": "tale", "messages": MESSAGES}


def deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


WRONG_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"model": ""}, "model"),
    ({"model": 5}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [5]}, "messages.0"),
    ({"messages": [{"content": "Hi"}]}, "messages.0.role"),
    ({"messages": [{"role": "", "content": "Hi"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]},
        "messages.0.tool_calls.0.function.arguments",
    ),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_p": -1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"min_tokens": 5, "max_tokens": 3}, "min_tokens"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": {"\u0661": 1}}, "logit_bias"),  # an Arabic digit
    ({"seed": 2**70}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"job_class": "urgent"}, "job_class"),
    ({"priority": 101}, "priority"),
    ({"priority": 0.5}, "priority"),
    ({"expires_in": 0}, "expires_in"),
    ({"chat_template_kwargs": deep(40)}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": deep(40)}}, "chat_template_kwargs"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": deep(200)}}}],
            "tool_choice": "none",
        },
        "tools.0",
    ),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"function_call": "auto"}, "function_call"),
    ({"messages": [{"role": "user", "content": deep(600)}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": deep(600)}]}]}, "messages.0.content"),
    ({"messages": [{"role": "assistant", "function_call": {"arguments": "{}"}}]}, "messages.0.function_call.name"),
    ({"messages": [{"role": "assistant", "content": "Once", "prefix": True}]}, "messages.0.prefix"),
    ({"messages": [{"role": "assistant", "refusal": "I can't"}]}, "messages.0.refusal"),
    ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages.0.images"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ({"n_predict": "all"}, "n_predict"),
    ({"n_predict": 3, "max_tokens": 4}, "n_predict"),
    ({"repeat_penalty": 0}, "repeat_penalty"),
    ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_object"}, "regex": "a+"}, "regex"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}}, "tool_choice"),
    ({"function_call": {"name": 5}}, "function_call"),
    ({"functions": [{}]}, "functions.0"),
    ({"thinking": "deeply"}, "thinking"),
    ({"reasoning_format": "xml"}, "reasoning_format"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"web_search_options": {"a": 1}}, "web_search_options"),
    ({"guided_json": {"a": 1}}, "guided_json"),
    ({"grammar": "root ::= other"}, "grammar"),
    ({"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}, "structured_outputs.json"),
    ({"json_schema": {"type": "integer", "multipleOf": 9999991}}, "json_schema"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"chat_template": ""}, "chat_template"),
    ({"documents": [{"text": "x"}]}, "documents"),
    ({"return_tokens": True}, "return_tokens"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    ({"bad_words": [""]}, "bad_words.0"),
    ({"bad_words": ["a"] * 257}, "bad_words"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids.0"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 2}, "best_of"),
]


async def test_a_wrong_field_of_a_chat_is_named(
    http: httpx.AsyncClient, worker: ScriptedWorker, conforms: Conforms
) -> None:
    for change, param in WRONG_CHAT:
        response = await http.post(CHAT, json={**BODY, **change})
        assert response.status_code == 400, change
        conforms(response.json(), "ErrorResponse")
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param, error
        assert param.split(".")[-1] in error["message"]
        assert "Value error" not in error["message"]  # Python's words instead of ours
        assert "limit" in error
        assert len(response.content) < 1000
    assert (await http.post(CHAT, json=BODY)).status_code == 200


WRONG_COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"max_tokens": -1}, "max_tokens"),
]


async def test_a_wrong_field_of_a_completion_is_named(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    for change, param in WRONG_COMPLETION:
        response = await http.post(COMPLETE, json={"model": "tale", "prompt": "x", **change})
        assert response.status_code == 400, change
        assert response.json()["error"]["param"] == param


async def test_errors_name_exact_limits(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    for change, words in (
        ({"seed": 2**63}, f"at most {2**63 - 1}, got {2**63}"),
        ({"seed": 2**64}, "an integer of at most 64 bits"),
        ({"seed": -(2**63) - 1}, "an integer of at most 64 bits"),
        ({"top_k": 2**31}, f"at most {2**31 - 1}, got"),
        ({"temperature": 3}, "at most 2, got 3"),
        ({"expires_in": 1e9}, "at most 31622400, got"),
    ):
        assert words in (await http.post(CHAT, json={**BODY, **change})).json()["error"]["message"]


async def test_fields_can_ask_for_the_default_behaviour(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    asked = {"skip_special_tokens": True, "allowed_token_ids": None, "include_stop_str_in_output": False}
    assert (await http.post(CHAT, json={**BODY, **asked, "add_special_tokens": False})).status_code == 200
    complete = {"model": "tale", "prompt": "x", **asked, "add_special_tokens": True}
    assert (await http.post(COMPLETE, json=complete)).status_code == 200


async def test_a_missing_field_is_named(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    for path, param in ((CHAT, "messages"), (COMPLETE, "prompt")):
        response = await http.post(path, json={"model": "tale"})
        assert response.status_code == 400
        assert response.json()["error"]["message"] == f"{param} is missing"


NO_OBJECT = [
    b"", b"{", b"[]", b'"x"', b"null", b'{"a":NaN}', b'{"a":1e}', b'{"a":"\xff\xfe"}', b'{"a":"\\ud800"}', b"\x00",
    b"[" * 100_000, b'{"messages":' + b"[" * 5_000 + b"]" * 5_000 + b"}", b"\xef\xbb\xbf{}",
]  # fmt: skip


async def test_a_body_that_is_not_a_json_object_is_refused(
    http: httpx.AsyncClient, worker: ScriptedWorker, conforms: Conforms
) -> None:
    for body in NO_OBJECT:
        response = await http.post(CHAT, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400, body[:20]
        conforms(response.json(), "ErrorResponse")
        assert response.json()["error"]["param"] == "body"
        assert (await http.post(CHAT, json=BODY)).status_code == 200
    response = await http.post(CHAT, content=b'["x"]', headers={"content-type": "application/json"})
    assert response.json()["error"]["message"] == "the body must be a JSON object in UTF-8, got ['x']"


async def test_other_content_types_are_refused(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    content = json.dumps(BODY).encode()
    for kind, status in (
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/json; charset=utf-8", 200),
        ("APPLICATION/JSON", 200),
        ("application/octet-stream", 200),
    ):
        response = await http.post(CHAT, content=content, headers={"content-type": kind})
        assert response.status_code == status
        if status == 415:
            assert response.json()["error"]["value"] == kind
        says_what_to_send = "-H 'content-type: application/json'" in response.text
        assert says_what_to_send == (kind == "application/x-www-form-urlencoded")  # as curl -d does
    request = http.build_request("POST", CHAT, content=content)
    request.headers.pop("content-type", None)
    assert (await http.send(request)).status_code == 200


async def test_large_bodies_are_refused_while_they_arrive(
    serve_with: ServeWith, worker: ScriptedWorker, conforms: Conforms
) -> None:
    async with serve_with(max_body_bytes=100_000) as (_, url), httpx.AsyncClient(base_url=url, timeout=20) as http:
        big = json.dumps({**BODY, "user": "x" * 10_000_000}).encode()
        response = await http.post(CHAT, content=big, headers={"content-type": "application/json"})
        assert response.status_code == 413
        conforms(response.json(), "ErrorResponse")
        assert response.json()["error"]["limit"] == 100_000

        sent = 0

        async def pieces() -> AsyncIterator[bytes]:
            nonlocal sent
            for _ in range(1_000):
                sent += 10_000
                yield b" " * 10_000

        response = await http.post(CHAT, content=pieces(), headers={"content-type": "application/json"})
        assert response.status_code == 413
        assert (await http.post(CHAT, json=BODY)).status_code == 200


async def test_unknown_paths_and_methods_are_errors(http: httpx.AsyncClient, conforms: Conforms) -> None:
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("GET", "/v1/models/none", 404),
        ("GET", "/v1/jobs/none", 404),
        ("DELETE", "/v1/jobs/none", 404),
        ("GET", "/v1/jobs/none/events", 404),
        ("GET", CHAT, 405),
        ("PUT", "/v1/jobs", 405),
    ):
        response = await http.request(method, path)
        assert response.status_code == status, path
        conforms(response.json(), "ErrorResponse")
        assert response.headers["x-request-id"]
    assert set((await http.put("/v1/jobs")).headers["allow"].split(", ")) >= {"GET", "POST"}


async def test_an_unknown_model_and_a_missing_worker_are_different_errors(
    http: httpx.AsyncClient, broker: Broker, conforms: Conforms
) -> None:
    response = await http.post(CHAT, json=BODY)
    assert response.status_code == 503
    conforms(response.json(), "ErrorResponse")
    assert int(response.headers["retry-after"]) >= 1
    async with ScriptedWorker(broker):
        response = await http.post(CHAT, json={**BODY, "model": "other"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert response.json()["error"]["param"] == "model"


async def test_a_full_queue_refuses_with_a_time_to_retry(config: Config, broker: Broker) -> None:
    async with ScriptedWorker(broker):
        pass  # the model stays known, but no worker takes its jobs
    full = replace(config, broker=replace(config.broker, max_queued_batch=1))
    async with serving(full) as (_, url), httpx.AsyncClient(base_url=url) as http:
        first = await http.post("/v1/jobs", json={**BODY, "job_class": "batch"})
        assert first.status_code == 202
        response = await http.post(CHAT, json={**BODY, "service_tier": "flex"})
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "queue_full"
        assert (await http.delete(f"/v1/jobs/{first.json()['id']}")).json()["state"] == "cancelled"
        assert (await http.post("/v1/jobs", json={**BODY, "job_class": "batch"})).status_code == 202


async def test_early_errors_have_their_own_status_even_for_streams(
    http: httpx.AsyncClient, worker: ScriptedWorker, conforms: Conforms
) -> None:
    error = ErrorInfo(
        code="context_length_exceeded", message="The prompt has 600 tokens, the model's context has 512",
        status=400, param="messages", limit=512, value=600,
    )  # fmt: skip

    async def too_long(claim: Claim) -> AsyncIterator[Step]:
        yield ended(claim, JobState.FAILED, error=error)

    worker.script = too_long
    for stream in (False, True):
        response = await http.post(CHAT, json={**BODY, "stream": stream})
        assert response.status_code == 400
        conforms(response.json(), "ErrorResponse")
        assert response.json()["error"] == {
            "message": error.message,
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
            "limit": 512,
            "value": 600,
            "n_prompt_tokens": 600,
            "n_ctx": 512,
        }


async def test_late_errors_are_in_the_stream(worker: ScriptedWorker, stream: PostStream, conforms: Conforms) -> None:
    async def breaks(claim: Claim) -> AsyncIterator[Step]:
        yield token("half")
        yield 0.05
        yield ended(claim, JobState.FAILED, error=ErrorInfo(code="engine_failure", message="no"))

    worker.script = breaks
    frames = await stream(CHAT, BODY)
    assert not frames.done
    conforms(frames.data[-1], "ErrorResponse")
    assert frames.data[-1]["error"]["code"] == "engine_failure"
    assert frames.data[1]["choices"][0]["delta"] == {"content": "half"}


async def test_a_slow_start_is_a_200_with_pings(worker: ScriptedWorker, stream: PostStream) -> None:
    async def late(claim: Claim) -> AsyncIterator[Step]:
        yield 0.6
        yield ended(claim, JobState.EXPIRED)

    worker.script = late
    frames = await stream(CHAT, BODY)
    assert frames.pings >= 2
    assert frames.data == [frames.data[-1]]
    assert frames.data[-1]["error"]["code"] == "deadline_exceeded"


async def test_a_deadline_that_passes_in_the_queue_is_a_504(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    async def never(claim: Claim) -> AsyncIterator[Step]:
        for _ in range(1000):
            yield 0.01

    worker.script = never
    response = await http.post(CHAT, json={**BODY, "expires_in": 0.2})
    assert response.status_code == 504
    assert response.json()["error"]["type"] == "timeout_error"


async def test_a_deadline_that_passes_without_a_worker_is_a_504(http: httpx.AsyncClient, broker: Broker) -> None:
    async with ScriptedWorker(broker):
        pass  # the model stays known
    for path, body in ((CHAT, BODY), (COMPLETE, {"model": "tale", "prompt": "Once"})):
        for stream in (False, True):
            response = await http.post(path, json={**body, "expires_in": 0.01, "stream": stream})
            if stream and response.status_code == 200:  # the reaper ended the job after the wait for a first event
                assert '"code":"deadline_exceeded"' in response.text
                continue
            assert response.status_code == 504
            assert response.json()["error"]["code"] == "deadline_exceeded"
