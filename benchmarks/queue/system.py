"""Measures the whole system on one machine: Redis, gateway and worker as `ktqueue up` runs them, and an HTTP client.

first token: from the first byte of a request to the first frame with text, one request at a time. delivery: from the
moment an event is published on its Redis channel to the moment an SSE client has it, while four jobs stream.
throughput: streamed tokens a second over all clients, each of which sends one request after another.
"""

import asyncio
import json
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import redis

from benchmarks import machine
from benchmarks.engine.compare import PROMPTS
from ktqueue.core.config import BrokerConfig, Config, EngineConfig, GatewayConfig
from ktqueue.workers.supervision.supervisor import Supervisor

STREAMS = 4
STREAM_TOKENS = 256
CLIENT_TOKENS = 128
CLIENT_REQUESTS = 3
FIRST_TOKEN_REQUESTS = 60


class Subscriber(threading.Thread):
    """Notes when each journal event is published: (job id, seq) -> seconds of the monotonic clock."""

    def __init__(self, url: str, prefix: str) -> None:
        super().__init__(daemon=True)
        self.seen: dict[tuple[str, int], float] = {}
        self._connection = redis.Redis.from_url(url)
        self._channel = self._connection.pubsub()  # type: ignore[no-untyped-call]
        self._channel.psubscribe(f"{{{prefix}:s0}}:journal:*")
        self._over = False

    def run(self) -> None:
        while not self._over:
            message = self._channel.get_message(timeout=0.2)
            if message is not None and message["type"] == "pmessage":
                job_id = message["channel"].rpartition(b":")[2].decode()
                self.seen[job_id, int(message["data"].partition(b":")[0])] = time.monotonic()

    def stop(self) -> None:
        """Leave the channel."""
        self._over = True
        self.join()
        self._connection.close()


def percentile(values: list[float], part: float) -> float:
    """The value below which `part` of them lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


async def frames(response: httpx.Response) -> AsyncIterator[tuple[int | None, Any]]:
    """`id:` and data of each SSE event; ends with [DONE] or the stream."""
    seq: int | None = None
    async for line in response.aiter_lines():
        if line.startswith("id: "):
            seq = int(line[4:])
        elif line.startswith("data: ") and line != "data: [DONE]":
            yield seq, json.loads(line[6:])


def prompt(client: int) -> str:
    """Each client's prompt is its own."""
    return f"Tale number {client + 1}. {PROMPTS[client % len(PROMPTS)]}"


def body(model: str, client: int, tokens: int) -> dict[str, Any]:
    """A streamed completion that runs to its full length."""
    return {"model": model, "prompt": prompt(client), "stream": True, "stream_options": {"include_usage": True},
            "max_tokens": tokens, "temperature": 0, "ignore_eos": True}  # fmt: skip


async def first_token(http: httpx.AsyncClient, model: str) -> dict[str, float]:
    """Milliseconds to the first text, one request at a time."""
    taken, gaps = [], []
    for turn in range(FIRST_TOKEN_REQUESTS):
        began = time.monotonic()
        moments = []
        async with http.stream("POST", "/v1/completions", json=body(model, turn, 16)) as response:
            response.raise_for_status()
            async for _, data in frames(response):
                if data["choices"] and data["choices"][0]["text"]:
                    moments.append(time.monotonic())
        taken.append(1e3 * (moments[0] - began))
        gaps += [1e3 * (after - before) for before, after in pairwise(moments)]
    return {
        "p50_ms": percentile(taken, 0.5),
        "p95_ms": percentile(taken, 0.95),
        "between_tokens_p50_ms": percentile(gaps, 0.5),
    }


async def delivery(http: httpx.AsyncClient, model: str, redis_url: str, prefix: str) -> dict[str, float]:
    """Milliseconds from publication to the SSE client, over all events of four streams at once."""
    subscriber = Subscriber(redis_url, prefix)
    subscriber.start()
    received: dict[tuple[str, int], float] = {}

    async def follow(client: int) -> None:
        sampling = {"max_tokens": STREAM_TOKENS, "temperature": 0, "ignore_eos": True}
        made = await http.post("/v1/jobs", json={"model": model, "prompt": prompt(client), "sampling": sampling})
        made.raise_for_status()
        job_id = made.json()["id"]
        async with http.stream("GET", f"/v1/jobs/{job_id}/events") as response:
            response.raise_for_status()
            async for seq, _ in frames(response):
                if seq is not None:
                    received[job_id, seq] = time.monotonic()

    try:
        await asyncio.gather(*(follow(client) for client in range(STREAMS)))
    finally:
        subscriber.stop()
    delays = [1e3 * (at - subscriber.seen[key]) for key, at in received.items() if key in subscriber.seen]
    return {
        "events": len(delays),
        "p50_ms": percentile(delays, 0.5),
        "p99_ms": percentile(delays, 0.99),
        "max_ms": max(delays),
    }


async def throughput(http: httpx.AsyncClient, model: str, clients: int) -> dict[str, float]:
    """Tokens a second over all clients."""

    async def work(client: int) -> int:
        tokens = 0
        for turn in range(CLIENT_REQUESTS):
            request = body(model, client + 10 * turn, CLIENT_TOKENS)
            async with http.stream("POST", "/v1/completions", json=request) as response:
                response.raise_for_status()
                async for _, data in frames(response):
                    tokens += (data.get("usage") or {}).get("completion_tokens", 0)
        return tokens

    began = time.monotonic()
    tokens = sum(await asyncio.gather(*(work(client) for client in range(clients))))
    return {"clients": clients, "tokens": tokens, "tokens_per_second": tokens / (time.monotonic() - began)}


async def _measure(model: str, threads: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            broker=BrokerConfig(state_dir=str(Path(folder) / "state")),
            engine=EngineConfig(model=model, threads=threads),
            gateway=GatewayConfig(port=0),
        )
        taken: list[dict[str, Any]] = []
        async with (
            Supervisor(config, workers=1) as up,
            httpx.AsyncClient(base_url=up.url, timeout=300.0, trust_env=False) as http,
        ):
            name = (await http.get("/v1/models")).json()["data"][0]["id"]
            await throughput(http, name, 1)
            for turn in range(rounds):
                figures = {
                    "first_token": await first_token(http, name),
                    "delivery": await delivery(http, name, up.broker_url, config.broker.prefix),
                    "clients": [await throughput(http, name, clients) for clients in (1, 4)],
                }
                taken.append({"round": turn, **figures, "load_average": machine.load_average(),
                              "bandwidth_gb_s": machine.bandwidth()})  # fmt: skip
    return {"what": "one gateway and one worker over Redis", "model": name, "threads": threads, "figures": taken}


def run(*, model: str, threads: int, rounds: int) -> dict[str, Any]:
    """All figures, `rounds` times."""
    return asyncio.run(_measure(model, threads, rounds))
