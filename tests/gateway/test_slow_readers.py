"""A reader that stops reading loses its mailbox but no token, and does not affect other readers."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from scripted_worker import ScriptedWorker, Step, ended, token
from served_gateway import ServeWith

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Claim
from ktqueue.gateway.feed import BUFFERED_EVENTS

JOBS = "/v1/jobs"
MAILBOX_BYTES = 50_000
OTHERS = 40


def body(word: str) -> dict[str, Any]:
    return {"model": "tale", "prompt": word, "sampling": {"max_tokens": 9}}


@dataclass
class FloodWorker:
    """A worker whose job `flood` has 5 KB events: many until `calm` is set, then some until `enough` is set."""

    calm: asyncio.Event = field(default_factory=asyncio.Event)
    enough: asyncio.Event = field(default_factory=asyncio.Event)


@pytest.fixture
def flood(worker: ScriptedWorker) -> FloodWorker:
    """Plays the job `flood`, and twenty words for any other job."""
    signals = FloodWorker()

    async def talk(claim: Claim) -> AsyncIterator[Step]:
        if claim.request.prompt == "flood":
            while not signals.enough.is_set():
                for _ in range(2 if signals.calm.is_set() else 10):
                    yield token("x" * 5_000)
                yield 0.05 if signals.calm.is_set() else 0.001
        else:
            for word in range(20):
                yield token(f"{claim.request.prompt}-{word} ")
                yield 0.01
        yield ended(claim)

    worker.script = talk
    return signals


async def connect(url: str, path: str) -> socket.socket:
    """A client that requests a stream and does not read. Its receive buffer is small."""
    host, port = url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, (host, int(port)))
    await loop.sock_sendall(client, f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
    return client


async def seqs(client: socket.socket) -> list[int]:
    """Read the stream to its end. Returns the ids of all events."""
    data = b""
    while piece := await asyncio.get_running_loop().sock_recv(client, 1 << 20):
        data += piece
    assert b'"state":"done"' in data
    return [int(line[4:]) for line in data.split(b"\n") if line.startswith(b"id: ")]


async def test_a_reader_that_stops_reading_does_not_affect_others(
    serve_with: ServeWith, flood: FloodWorker, broker: Broker
) -> None:
    async with serve_with(max_mailbox_bytes=MAILBOX_BYTES) as (server, url):
        for listener in server.servers[0].sockets:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # the connections inherit it
        gateway = server.gateway
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            job = (await http.post(JOBS, json=body("flood"))).json()
            stuck = await connect(url, job["events_url"])
            channel = broker.keys.journal_channel(job["id"])

            async def dropped() -> Any:
                while True:
                    await asyncio.sleep(0.005)
                    for mailbox in gateway.broker.hub.mailboxes(channel):
                        (feed,) = gateway.feeds
                        assert mailbox.held_bytes <= MAILBOX_BYTES
                        assert len(feed.buffered) <= BUFFERED_EVENTS
                        if mailbox.missed and len(feed.buffered) == BUFFERED_EVENTS:
                            return feed

            async with asyncio.timeout(60):
                feed = await dropped()
            flood.calm.set()
            waits = feed.buffered[0]

            async def other(number: int) -> str:
                other_job = (await http.post(JOBS, json=body(str(number)))).json()
                text = ""
                async with http.stream("GET", other_job["events_url"]) as response:
                    async for line in response.aiter_lines():
                        if line.startswith("data: "):
                            text += json.loads(line[6:]).get("text", "")
                return text

            async with asyncio.timeout(60):
                texts = await asyncio.gather(*(other(number) for number in range(OTHERS)))
            assert texts == ["".join(f"{number}-{word} " for word in range(20)) for number in range(OTHERS)]
            assert feed in gateway.feeds
            assert feed.buffered[0] is waits  # it has not read anything meanwhile

            flood.enough.set()
            async with asyncio.timeout(60):
                read = await seqs(stuck)
            stuck.close()
            journal = await broker.journal.replay(job["id"])
            assert read == [event.seq for event in journal] == list(range(1, len(journal) + 1))
            assert len(read) > BUFFERED_EVENTS
