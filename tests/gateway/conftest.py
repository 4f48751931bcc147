"""Fixtures of the gateway's tests: a served gateway and a scripted worker."""

import json
import os
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import pytest
import redis
from openai.types import Batch, Completion, ErrorObject, FileDeleted, FileObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response as OpenAIResponse
from openai.types.responses import ResponseItemList, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from scripted_worker import CARD, ScriptedWorker, Step, ended, token
from served_gateway import Conforms, EventFrames, PostStream, ServeWith, read_frames, serving

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Claim
from ktqueue.core.config import BrokerConfig, Config, GatewayConfig
from ktqueue.core.events import FinishReason

SCHEMAS = Path(__file__).resolve().parents[3] / "shared" / "data" / "api" / "openai-openapi.json"


@pytest.fixture
def config(broker_config: BrokerConfig) -> Config:
    """Settings with short times and a free port."""
    return Config(
        broker=broker_config,
        gateway=GatewayConfig(port=0, first_event_wait=0.3, heartbeat_seconds=0.1, drain_seconds=0.3),
    )


@pytest.fixture
async def broker(config: Config) -> AsyncIterator[Broker]:
    async with await Broker.open(config.broker) as opened:
        yield opened


@pytest.fixture
def spoil_idempotency_keys(broker: Broker, redis_direct: str) -> Callable[[], None]:
    """Let each idempotency key name a job whose record is a list, so that the next submission with it fails."""

    def spoil() -> None:
        with redis.Redis.from_url(redis_direct) as client:
            found = client.keys(f"{broker.keys.tag}:idempotency:*")
            assert found
            client.rpush(f"{broker.keys.tag}:job:spoilt", "secret")
            for key in found:
                client.set(key, client.get(key).split()[0] + b" spoilt")

    return spoil


@pytest.fixture
async def worker(broker: Broker) -> AsyncIterator[ScriptedWorker]:
    """A scripted worker that is running. Set `.script` before the request."""
    async with ScriptedWorker(broker) as scripted:
        yield scripted


async def calls_a_tool(claim: Claim) -> AsyncIterator[Step]:
    """Reasoning, text and a tool call, in pieces."""
    text = '<think>Hm.</think>I ask.<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
    for place in range(0, len(text), 7):
        yield token(text[place : place + 7])
    yield {"finish_reason": FinishReason.STOP}
    yield ended(claim)


@pytest.fixture
async def caller(broker: Broker) -> AsyncIterator[ScriptedWorker]:
    """A worker whose model reasons and calls tools."""
    card = replace(CARD, tool_parser="tool_call", reasoning_parser="think")
    async with ScriptedWorker(broker, calls_a_tool, card) as worker:
        yield worker


@pytest.fixture(autouse=True)
def no_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep HTTP clients from reading the certificates of all authorities, 20 ms each time: no test here uses TLS."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("SSL_CERT_DIR", os.devnull)


@pytest.fixture
def serve_with(config: Config) -> ServeWith:
    """`async with serve_with(max_connections=2) as (server, url)` serves a gateway with other settings."""
    return lambda **settings: serving(replace(config, gateway=replace(config.gateway, **settings)))


@pytest.fixture
async def url(config: Config) -> AsyncIterator[str]:
    """The URL of a served gateway."""
    async with serving(config) as (_, base):
        yield base


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        yield client


@pytest.fixture
def stream(http: httpx.AsyncClient) -> PostStream:
    """POST a body with stream: true and read all frames."""

    async def post(path: str, body: dict[str, Any], **headers: str) -> EventFrames:
        async with http.stream("POST", path, json={**body, "stream": True}, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            return await read_frames(response)

    return post


def _nullable(node: Any) -> Any:
    """The schema without `nullable`: OpenAI's file is 3.1 but uses this keyword of 3.0, which JSON Schema lacks."""
    if isinstance(node, list):
        return [_nullable(item) for item in node]
    if not isinstance(node, dict):
        return node
    rest = {key: _nullable(value) for key, value in node.items() if key != "nullable"}
    return {"anyOf": [rest, {"type": "null"}]} if node.get("nullable") is True else rest


def _schemas() -> dict[str, Any]:
    """OpenAI's schemas. Fields of a batch that are null in their own example of a new batch may be null."""
    document = json.loads(SCHEMAS.read_text())
    example = document["paths"]["/batches"]["post"]["x-oaiMeta"]["examples"]["response"]
    schemas = _nullable(document["components"]["schemas"])
    fields = schemas["Batch"]["properties"]
    for name in re.findall(r'"(\w+)": null', example):
        fields[name] = {"anyOf": [fields[name], {"type": "null"}]}
    return dict(schemas)


class _Models(BaseModel):
    """OpenAI's list of models; the openai package has no type for it."""

    object: Literal["list"]
    data: list[Model]


class _Batches(BaseModel):
    """OpenAI's list of batches."""

    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class _Refusal(BaseModel):
    error: ErrorObject


class _Files(BaseModel):
    """OpenAI's list of files; the openai package has no type for it."""

    object: Literal["list"]
    data: list[FileObject]


TYPES: dict[str, Any] = {
    "Batch": Batch,
    "CreateChatCompletionResponse": ChatCompletion,
    "CreateChatCompletionStreamResponse": ChatCompletionChunk,
    "CreateCompletionResponse": Completion,
    "DeleteFileResponse": FileDeleted,
    "Error": ErrorObject,
    "ErrorResponse": _Refusal,
    "ListBatchesResponse": _Batches,
    "ListFilesResponse": _Files,
    "ListModelsResponse": _Models,
    "Model": Model,
    "OpenAIFile": FileObject,
    "Response": OpenAIResponse,
    "ResponseItemList": ResponseItemList,
    "ResponseStreamEvent": ResponseStreamEvent,
}


@pytest.fixture(scope="session")
def conforms() -> Conforms:
    """`conforms(value, "Error")` fails the test unless the value has OpenAI's type of that name.

    It must fit the type in the openai package, and the schema in OpenAI's own description if there is a copy of it.
    """
    components: dict[str, Any] = {}
    if SCHEMAS.exists():
        components = {"schemas": _schemas()}
    validators: dict[str, jsonschema.Draft202012Validator] = {}

    def check(value: Any, name: str) -> None:
        TypeAdapter(TYPES[name]).validate_python(value, strict=True)
        if not components:
            return
        if name not in validators:
            schema = {"$ref": f"#/components/schemas/{name}", "components": components}
            validators[name] = jsonschema.Draft202012Validator(schema)
        validators[name].validate(value)

    return check
