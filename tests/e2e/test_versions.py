"""This version and the next one side by side, as real processes, during an upgrade in both orders."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from processes import free_ports

from ktqueue.broker.broker import Broker
from ktqueue.core.config import BrokerConfig, Config, EngineConfig, GatewayConfig, WorkerConfig, config_environment

WORKER = "from ktqueue.workers.generation.worker_process import main; main()"
GATEWAY = (
    "import os; from ktqueue.core.config import load_config; from ktqueue.gateway.serve import serve; "
    "serve(load_config(environment=os.environ))"
)
# The next version: its requests have a new sampling parameter, which must not be ignored, so their format is 3. Its
# events and cards have a new field, which can be ignored.
NEXT = """
import json
from ktqueue.core import codec
codec.VERSION = 3
request, event, more = codec.encode_request, codec.encode_event, codec.encode_card_more

def encode_request(made):
    value = json.loads(request(made))
    value["sampling"]["novelty"] = 1
    value["v"] = 3
    return json.dumps(value, separators=(",", ":")).encode()

def with_novelty(encode, **fields):
    return lambda made: json.dumps({**json.loads(encode(made)), **fields, "novelty": 1}).encode()

codec.encode_request = encode_request
codec.encode_event = with_novelty(event, v=1)
codec.encode_card_more = with_novelty(more)
"""
GREEDY = {"temperature": 0, "ignore_eos": True}
TALE = {"model": "demo", "prompt": "Once upon a time"}


@contextlib.asynccontextmanager
async def running(program: str, config: Config) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process of either version."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", program, env={**os.environ, **config_environment(config)}
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(30):
            await process.wait()


async def job(http: httpx.AsyncClient, job_id: str) -> dict[str, Any]:
    answer = await http.get(f"/v1/jobs/{job_id}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def submit(http: httpx.AsyncClient, max_tokens: int, **body: Any) -> str:
    sampling = {**GREEDY, "max_tokens": max_tokens}
    answer = await http.post("/v1/jobs", json={**TALE, **body, "sampling": sampling})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


async def text_of(http: httpx.AsyncClient, job_id: str, until: int | None = None) -> str:
    """A job's text from its events, or from those before the event `until`."""
    text = ""
    async with http.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                text += event.get("text", "")
                if event["seq"] == until:
                    break
    return text


@pytest.mark.long
@pytest.mark.timeout(200)
async def test_an_upgrade_works_in_both_orders(broker_config: BrokerConfig) -> None:
    base = Config(
        broker=broker_config,
        engine=EngineConfig(num_pages=256, threads=1, served_model_name=("demo",)),
        worker=WorkerConfig(drain_seconds=0.0),
    )
    async with contextlib.AsyncExitStack() as stack:
        ports = free_ports(2)
        for port, version in zip(ports, ("", NEXT), strict=True):
            config = replace(base, gateway=GatewayConfig(port=port))
            await stack.enter_async_context(running(version + GATEWAY, config))
        clients = [httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) for port in ports]
        old, young = [await stack.enter_async_context(client) for client in clients]
        broker = await stack.enter_async_context(await Broker.open(base.broker))

        async def workers(count: int) -> None:
            async with asyncio.timeout(60):
                while len(await broker.models.workers()) != count:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

        async def answering(http: httpx.AsyncClient) -> None:
            async with asyncio.timeout(60):
                while True:
                    with contextlib.suppress(httpx.TransportError):
                        if (await http.get("/readyz")).status_code == 200:
                            return
                    await asyncio.sleep(0.05)

        # Gateways first: jobs that only the next version can read wait for it, and no other job waits behind them.
        former = await stack.enter_async_context(running(WORKER, base))
        await workers(1)
        await asyncio.gather(answering(old), answering(young))
        ahead = [await submit(young, 20) for _ in range(3)]
        calm = await text_of(old, await submit(old, 400))
        for http in (old, young):
            assert [(await job(http, one))["state"] for one in ahead] == ["queued"] * 3
        assert (await job(young, ahead[0]))["priority"] == 0
        assert (await job(old, ahead[0]))["priority"] is None
        assert len((await old.get("/v1/jobs")).json()["data"]) == 4
        assert (await old.delete(f"/v1/jobs/{ahead.pop()}")).json()["state"] == "cancelled"

        # Then workers: the next version's worker continues this version's jobs at the next token.
        begun = await submit(old, 400)
        await text_of(old, begun, until=10)
        former.send_signal(signal.SIGTERM)
        await former.wait()
        assert (await job(old, begun))["state"] == "queued"
        await stack.enter_async_context(running(NEXT + WORKER, base))
        await workers(1)
        assert await text_of(old, begun) == calm
        assert [await text_of(old, one) for one in ahead] == [calm[: len(await text_of(young, one))] for one in ahead]

        # Workers first: the next version's worker serves this version's gateway with the same text.
        text = await text_of(old, await submit(old, 50))
        assert text
        assert calm.startswith(text)
        answer = await old.post("/v1/completions", json={**TALE, "max_tokens": 20, **GREEDY})
        assert answer.json()["choices"][0]["text"] == await text_of(young, ahead[0])
        assert [one["id"] for one in (await old.get("/v1/models")).json()["data"]] == ["demo"]
        for http in (old, young):
            states = {one["state"] for one in (await http.get("/v1/jobs")).json()["data"]}
            assert states == {"done", "cancelled"}
