"""Fixtures of the gateway's tests: a served gateway, and a worker that plays scripts through a real lease."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import pytest
from openai.types import Completion, ErrorObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Claim, Lease
from ktqueue.core.config import BrokerConfig, Config, GatewayConfig
from ktqueue.core.events import FinishReason, JobState, PositionLogprobs, TokenEvent, TokenLogprob, Usage
from ktqueue.core.model_card import ModelCard
from ktqueue.gateway.serve import GatewayServer, build_server

SCHEMAS = Path(__file__).resolve().parents[3] / "shared" / "data" / "api" / "openai-openapi.json"
CARD = ModelCard(
    name="tale", created=1_700_000_000, max_model_len=512, vocab_size=256, architecture="test", quantization="none",
    max_num_seqs=512,
)  # fmt: skip
USAGE = Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=2)
Step = dict[str, Any] | float  # fields of an event, or seconds to wait
Script = Callable[[Claim], AsyncIterator[Step]]


def token(text: str, **fields: Any) -> Step:
    """Fields of an event with one token."""
    return {"token_ids": (7,), "text": text, **fields}


def logprob(data: bytes, value: float = -0.5) -> PositionLogprobs:
    """A position whose chosen token has these bytes, with two alternatives."""
    chosen = TokenLogprob(7, data, value)
    return PositionLogprobs(chosen, (chosen, TokenLogprob(8, b"\xff", float("-inf"))))


def ended(claim: Claim, state: JobState = JobState.DONE, **fields: Any) -> Step:
    """Fields of a job's last event."""
    return {"state": state, "usage": USAGE, **fields}


async def tale(claim: Claim) -> AsyncIterator[Step]:
    """Three tokens for each choice, then the end."""
    n = claim.request.sampling.n
    wanted = claim.request.sampling.logprobs is not None
    for word in ("Once", " upon", " a time"):
        for index in range(n):
            yield token(word, index=index, logprobs=(logprob(word.encode()),) if wanted else ())
    for index in range(n):
        yield {"index": index, "finish_reason": FinishReason.STOP}
    yield ended(claim)


@dataclass
class ScriptedWorker:
    """Claims jobs through a real lease and commits, step by step, what `script` yields for them; obeys cancels."""

    broker: Broker
    script: Script = tale
    claims: list[Claim] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    _plays: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _events: list[tuple[str, TokenEvent]] = field(default_factory=list)
    _seqs: dict[str, int] = field(default_factory=dict)

    async def run(self) -> None:
        lease = await Lease.register(self.broker, CARD)
        self.ready.set()
        tasks = [asyncio.create_task(self._beat(lease)), asyncio.create_task(self._step(lease))]
        try:
            while True:
                for claim in await lease.claim(CARD.max_num_seqs):
                    self._seqs[claim.job_id] = len(claim.events)
                    self._plays[claim.job_id] = asyncio.create_task(self._play(claim))
                    self.claims.append(claim)
                await lease.wait_for_work(0.05)
        finally:
            tasks += self._plays.values()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await lease.close()

    async def claimed(self, count: int) -> None:
        """Wait until so many jobs were claimed."""
        async with asyncio.timeout(10):
            while len(self.claims) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def _beat(self, lease: Lease) -> None:
        while True:
            await lease.beat({"running": 1.0, "free_pages": 25.0, "total_pages": 100.0, "generation_tokens": 9.0})
            await asyncio.sleep(0.2)

    async def _step(self, lease: Lease) -> None:
        while True:
            events, self._events = self._events, []
            for job_id in await lease.commit(events):
                if job_id in self._plays and job_id not in self.stopped:
                    self.stopped.append(job_id)
                    self._plays[job_id].cancel()
                    self._say(job_id, {"state": JobState.CANCELLED, "usage": USAGE})
            await asyncio.sleep(0.005)

    def _say(self, job_id: str, event: dict[str, Any]) -> None:
        self._seqs[job_id] += 1
        self._events.append((job_id, TokenEvent(seq=self._seqs[job_id], **event)))

    async def _play(self, claim: Claim) -> None:
        async for step in self.script(claim):
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                self._say(claim.job_id, step)
                await asyncio.sleep(0)


@pytest.fixture
def config(broker_config: BrokerConfig) -> Config:
    """Short waits, any port."""
    return Config(
        broker=broker_config,
        gateway=GatewayConfig(port=0, first_event_wait=0.3, heartbeat_seconds=0.1, drain_seconds=0.3),
    )


@pytest.fixture
async def broker(config: Config) -> AsyncIterator[Broker]:
    async with await Broker.open(config.broker) as opened:
        yield opened


@pytest.fixture
async def worker(broker: Broker) -> AsyncIterator[ScriptedWorker]:
    """A scripted worker at work; set `.script` before the request."""
    scripted = ScriptedWorker(broker)
    task = asyncio.create_task(scripted.run())
    await scripted.ready.wait()
    yield scripted
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[tuple[GatewayServer, str]]:
    """A gateway under uvicorn on this loop, and its URL."""
    server = build_server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        if task.done():
            task.result()
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


@pytest.fixture
def serve_with(config: Config) -> Callable[..., Any]:
    """`async with serve_with(max_connections=2) as (server, url)`: a gateway with other settings."""
    return lambda **settings: serving(replace(config, gateway=replace(config.gateway, **settings)))


@pytest.fixture
def serving_config() -> Callable[..., Any]:
    """`async with serving_config(config) as (server, url)`."""
    return serving


@pytest.fixture
async def url(config: Config) -> AsyncIterator[str]:
    """The URL of a served gateway."""
    async with serving(config) as (_, base):
        yield base


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        yield client


@dataclass
class Frames:
    """What an SSE response said: JSON data in order, ids, comments, and whether [DONE] came last."""

    data: list[Any] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    pings: int = 0
    done: bool = False


async def read_frames(response: httpx.Response, until: Callable[[Frames], bool] = lambda _: False) -> Frames:
    """Read an SSE response to its end, or until `until` says so."""
    frames = Frames()
    async for line in response.aiter_lines():
        if line.startswith(":"):
            frames.pings += 1
        elif line.startswith("id: "):
            frames.ids.append(int(line[4:]))
        elif line == "data: [DONE]":
            frames.done = True
        elif line.startswith("data: "):
            assert not frames.done
            frames.data.append(json.loads(line[6:]))
        if until(frames):
            break
    return frames


@pytest.fixture
def stream(http: httpx.AsyncClient) -> Callable[..., Awaitable[Frames]]:
    """POST a body with stream: true and read all frames."""

    async def post(path: str, body: dict[str, Any], **headers: str) -> Frames:
        async with http.stream("POST", path, json={**body, "stream": True}, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            return await read_frames(response)

    return post


@pytest.fixture
def tools() -> Any:
    """Helpers that tests need beside the fixtures."""

    class Tools:
        token = staticmethod(token)
        logprob = staticmethod(logprob)
        ended = staticmethod(ended)
        tale = staticmethod(tale)
        read_frames = staticmethod(read_frames)
        ScriptedWorker = ScriptedWorker

    return Tools


def _nullable(node: Any) -> Any:
    """OpenAI's file says 3.1 and still uses 3.0's `nullable`; JSON Schema needs it spelled out."""
    if isinstance(node, list):
        return [_nullable(one) for one in node]
    if not isinstance(node, dict):
        return node
    rest = {key: _nullable(value) for key, value in node.items() if key != "nullable"}
    return {"anyOf": [rest, {"type": "null"}]} if node.get("nullable") is True else rest


class _Models(BaseModel):
    """OpenAI's list of models; the package has no type of its own for it."""

    object: Literal["list"]
    data: list[Model]


class _Refusal(BaseModel):
    error: ErrorObject


TYPES: dict[str, type[BaseModel]] = {
    "CreateChatCompletionResponse": ChatCompletion,
    "CreateChatCompletionStreamResponse": ChatCompletionChunk,
    "CreateCompletionResponse": Completion,
    "Error": ErrorObject,
    "ErrorResponse": _Refusal,
    "ListModelsResponse": _Models,
    "Model": Model,
}


@pytest.fixture(scope="session")
def conforms() -> Callable[[Any, str], None]:
    """`conforms(value, "Error")`: the value fits what OpenAI calls so, or the test fails.

    It must fit the type of the openai package; where there is a copy of OpenAI's own description, its schema too.
    """
    components: dict[str, Any] = {}
    if SCHEMAS.exists():
        components = {"schemas": _nullable(json.loads(SCHEMAS.read_text())["components"]["schemas"])}
    validators: dict[str, jsonschema.Draft202012Validator] = {}

    def check(value: Any, name: str) -> None:
        TYPES[name].model_validate(value, strict=True)
        if not components:
            return
        if name not in validators:
            schema = {"$ref": f"#/components/schemas/{name}", "components": components}
            validators[name] = jsonschema.Draft202012Validator(schema)
        validators[name].validate(value)

    return check
