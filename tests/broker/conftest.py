"""Fixtures of the broker's tests: a short lease, an open broker, a model card, a connection that can be cut."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import pytest
import redis

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.core.config import BrokerConfig
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest, SamplingParams


@pytest.fixture
def config(broker_config: BrokerConfig) -> BrokerConfig:
    """Settings with a lease of half a second."""
    return replace(broker_config, lease_seconds=0.5)


@pytest.fixture
async def broker(config: BrokerConfig) -> AsyncIterator[Broker]:
    async with await Broker.open(config) as opened:
        yield opened


@pytest.fixture
def raw(redis_url: str, redis_direct: str) -> Any:
    """A plain Redis client, which reads and changes keys directly."""
    with redis.Redis.from_url(redis_direct) as client:
        yield client


@pytest.fixture
def card() -> ModelCard:
    return ModelCard(
        name="tale",
        created=1,
        max_model_len=512,
        vocab_size=256,
        architecture="test",
        quantization="none",
        max_num_seqs=32,
    )


@pytest.fixture
def make_request() -> Callable[..., GenerationRequest]:
    def make(prompt: str = "Once", *, sampling: SamplingParams | None = None, **fields: Any) -> GenerationRequest:
        return GenerationRequest(
            **{"model": "tale", "prompt": prompt, "sampling": sampling or SamplingParams(), **fields}
        )

    return make


@pytest.fixture
async def expire_leases(broker: Broker, card: ModelCard) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Wait until leases have expired. Another worker renews its own meanwhile, so that this is not an outage."""
    bystander = await Lease.register(broker, replace(card, name="bystander"))

    async def wait() -> None:
        lease = broker.config.lease_seconds
        renewals, last = 0, time.monotonic()
        while renewals < 6:
            await asyncio.sleep(lease / 5)
            await bystander.beat({})
            late = time.monotonic() - last > lease / 2  # this machine paused: an outage, which extends all leases
            renewals, last = 0 if late else renewals + 1, time.monotonic()

    yield wait
    await bystander.close()


@pytest.fixture
async def lease(broker: Broker, card: ModelCard) -> AsyncIterator[Lease]:
    """The lease of a worker."""
    lease = await Lease.register(broker, card)
    yield lease
    await lease.close()


class Proxy:
    """Passes bytes between a client and the server. It can lose the reply to the next command that contains a word."""

    def __init__(self, server_path: str) -> None:
        self._server_path = server_path
        self._lose: bytes | None = None
        self.lost = 0

    def lose_reply_to(self, word: str) -> None:
        """Pass on the next request with the word, then cut the connection before its reply."""
        self._lose = word.encode()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_unix_connection(self._server_path)
        cut = False

        async def requests() -> None:
            nonlocal cut
            while data := await reader.read(1 << 20):
                if self._lose is not None and self._lose in data:
                    self._lose = None
                    cut = True
                upstream_writer.write(data)
                await upstream_writer.drain()

        async def replies() -> None:
            while data := await upstream_reader.read(1 << 20):
                if cut:
                    self.lost += 1
                    return
                writer.write(data)
                await writer.drain()

        tasks = [asyncio.create_task(requests()), asyncio.create_task(replies())]
        with contextlib.suppress(OSError):
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for closing in (writer, upstream_writer):
            closing.close()
            with contextlib.suppress(OSError):
                await closing.wait_closed()


@pytest.fixture
async def proxy(config: BrokerConfig, tmp_path: Path) -> AsyncIterator[tuple[Proxy, BrokerConfig]]:
    """A Proxy, and settings whose URL leads through it."""
    assert config.url is not None
    if not config.url.startswith("unix:"):
        pytest.skip("the proxy needs a server on a unix socket")
    parts = urlsplit(config.url)
    proxy = Proxy(unquote(parts.path))
    path = tmp_path / "proxy.sock"
    server = await asyncio.start_unix_server(proxy.serve, path)
    async with server:
        yield proxy, replace(config, url=urlunsplit(parts._replace(path=str(path))))
