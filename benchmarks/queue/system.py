"""Measures the whole system on one machine: Redis, gateway and worker as `ktqueue up` runs them, and an HTTP client.

first token: from the first byte of a request to the first frame with text, one request at a time. delivery: from the
moment an event is published on its Redis channel to the moment an SSE client has it, while four jobs stream.
throughput: streamed tokens a second over all clients, each of which sends one request after another.
"""

import argparse
import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import httpx
import redis

from benchmarks import machine
from benchmarks.engine.compare import PROMPTS
from benchmarks.percentiles import percentile, percentiles
from benchmarks.queue.servers import whole_system
from ktqueue.core.config import EngineConfig

STREAMS = 4
STREAM_TOKENS = 256
CLIENT_TOKENS = 128
CLIENT_REQUESTS = 3
FIRST_TOKEN_REQUESTS = 60
FIRST_TOKEN_TOKENS = 16


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


async def frames(response: httpx.Response) -> AsyncIterator[tuple[int | None, Any]]:
    """`id:` and data of each SSE event; ends with [DONE] or the stream. Raises httpx.HTTPStatusError."""
    response.raise_for_status()
    seq: int | None = None
    async for line in response.aiter_lines():
        if line.startswith("id: "):
            seq = int(line[4:])
        elif line.startswith("data: ") and line != "data: [DONE]":
            yield seq, json.loads(line[6:])


async def stream(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[float]:
    """Stream one completion or chat. Returns the moments of its request and of each frame that may have text."""
    moments = [time.monotonic()]
    async with http.stream("POST", path, json={**body, "stream": True}) as response:
        async for _, data in frames(response):
            if any("text" in choice or choice["delta"].get("content") for choice in data["choices"]):
                moments.append(time.monotonic())
    return moments


async def complete(http: httpx.AsyncClient, model: str, prompt: str | list[int], tokens: int) -> list[float]:
    """Stream a greedy completion of `tokens` tokens, as `stream`."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return await stream(http, "/v1/completions", body)


def stream_times(streams: list[list[float]]) -> tuple[list[float], list[float]]:
    """Milliseconds to the first frame of each stream, and between any two that follow each other."""
    first = [1e3 * (moments[1] - moments[0]) for moments in streams]
    return first, [1e3 * (after - before) for moments in streams for before, after in pairwise(moments[1:])]


def prompt_of(client: int) -> str:
    """A different prompt for each client."""
    return f"Tale number {client + 1}. {PROMPTS[client % len(PROMPTS)]}"


async def first_token(http: httpx.AsyncClient, model: str) -> dict[str, float]:
    """Milliseconds to the first text, one request at a time."""
    streams = [
        await complete(http, model, prompt_of(number), FIRST_TOKEN_TOKENS) for number in range(FIRST_TOKEN_REQUESTS)
    ]
    first, between = stream_times(streams)
    return {**percentiles(first, 50, 95), "between_tokens_p50_ms": percentile(between, 50)}


async def delivery(http: httpx.AsyncClient, model: str, redis_url: str, prefix: str) -> dict[str, float]:
    """Milliseconds from publication to the SSE client, over all events of four streams at once."""
    subscriber = Subscriber(redis_url, prefix)
    subscriber.start()
    received: dict[tuple[str, int], float] = {}

    async def follow(client: int) -> None:
        sampling = {"max_tokens": STREAM_TOKENS, "temperature": 0, "ignore_eos": True}
        made = await http.post("/v1/jobs", json={"model": model, "prompt": prompt_of(client), "sampling": sampling})
        made.raise_for_status()
        job_id = made.json()["id"]
        async with http.stream("GET", f"/v1/jobs/{job_id}/events") as response:
            async for seq, _ in frames(response):
                if seq is not None:
                    received[job_id, seq] = time.monotonic()

    try:
        await asyncio.gather(*(follow(client) for client in range(STREAMS)))
    finally:
        subscriber.stop()
    delays = [1e3 * (moment - subscriber.seen[key]) for key, moment in received.items() if key in subscriber.seen]
    return {"events": len(delays), **percentiles(delays, 50, 99), "max_ms": max(delays)}


async def throughput(http: httpx.AsyncClient, model: str, clients: int) -> dict[str, float]:
    """Tokens a second over all clients."""

    async def client(number: int) -> None:
        for request in range(CLIENT_REQUESTS):
            await complete(http, model, prompt_of(number + 10 * request), CLIENT_TOKENS)

    began = time.monotonic()
    await asyncio.gather(*(client(number) for number in range(clients)))
    tokens = clients * CLIENT_REQUESTS * CLIENT_TOKENS
    return {"clients": clients, "tokens": tokens, "tokens_per_second": tokens / (time.monotonic() - began)}


async def _measure(model: str, threads: int, rounds: int) -> dict[str, Any]:
    figures: list[dict[str, Any]] = []
    async with (
        whole_system(EngineConfig(model=model, threads=threads)) as up,
        httpx.AsyncClient(base_url=up.url, timeout=300.0, trust_env=False) as http,
    ):
        name = (await http.get("/v1/models")).json()["data"][0]["id"]
        await throughput(http, name, 1)
        for number in range(rounds):
            figure = {
                "round": number,
                "first_token": await first_token(http, name),
                "delivery": await delivery(http, name, up.broker_url, up.config.broker.prefix),
                "clients": [await throughput(http, name, clients) for clients in (1, 4)],
            }
            figures.append({**figure, "load_average": machine.load_average(), "bandwidth_gb_s": machine.bandwidth()})
    return {"what": "one gateway and one worker over Redis", "model": name, "threads": threads, "figures": figures}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures, `arguments.rounds` times."""
    return asyncio.run(_measure(arguments.model, arguments.threads, arguments.rounds))
