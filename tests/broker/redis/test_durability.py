"""`broker.durability: fsync`: acknowledged jobs are on disk, and a server that cannot do this is refused."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import free_ports
from redis_fleet import Server

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.broker.redis import server_checks
from ktqueue.broker.redis.address import Login, RedisEndpoint
from ktqueue.broker.redis.node import Node
from ktqueue.broker.redis.private_server import PrivateServer
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import ConfigError, Unavailable
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "server", free_ports(1)[0], "appendonly yes")
    yield server
    server.kill()


@pytest.fixture
def config(server: Server) -> BrokerConfig:
    return BrokerConfig(url=f"redis://127.0.0.1:{server.port}", durability="fsync")


def waits(server: Server) -> int:
    """Return the number of WAITAOF calls so far."""
    return int(server("INFO", "commandstats").get("cmdstat_waitaof", {"calls": 0})["calls"])


async def submit_one(config: BrokerConfig, card: Any, make_request: Any) -> None:
    async with await Broker.open(config) as broker:
        lease = await Lease.register(broker, card)
        job = await broker.jobs.submit(make_request())
        await broker.jobs.cancel(job.id)
        await lease.close()


async def test_submits_and_cancels_wait_for_the_disk(
    server: Any, config: BrokerConfig, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    await submit_one(config, card, make_request)
    assert waits(server) == 2
    assert 0 < server("PTTL", "{ktq:s0}:synced") <= 60_000
    server("CONFIG", "SET", "appendfsync", "always")  # the server itself writes before it answers
    await submit_one(config, card, make_request)
    await submit_one(replace(config, durability="process"), card, make_request)
    assert waits(server) == 2


async def test_a_disk_that_does_not_write_is_reported(
    server: Any, config: BrokerConfig, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    async with await Broker.open(replace(config, operation_timeout=1.0, connect_timeout=0.7)) as broker:
        await Lease.register(broker, card)
        server("CONFIG", "SET", "appendfsync", "no")
        with pytest.raises(Unavailable, match=r"(disk|answer) in time"):  # the latter on a slow machine
            await broker.jobs.submit(make_request(), job_id="a")
        # A repeated submit writes nothing and may use another connection. It must wait for the disk too.
        node = Node(RedisEndpoint("127.0.0.1", server.port), Login(), None, 0, connect=5.0, operate=5.0)
        assert await node.sync("{ktq:s0}:synced", 100) == 0
        await node.close()
        server("CONFIG", "SET", "appendfsync", "everysec")
    async with await Broker.open(config) as broker:
        assert (await broker.jobs.submit(make_request(), job_id="a")).id == "a"  # this call waits for the disk
    assert waits(server) >= 3


@pytest.mark.parametrize("settings", [{"appendonly": "no"}, {"appendfsync": "no"}])
async def test_a_server_that_cannot_be_durable_is_refused(server: Any, config: BrokerConfig, settings: Any) -> None:
    for name, value in settings.items():
        server("CONFIG", "SET", name, value)
        with pytest.raises(ConfigError, match=f"{name} {value}"):
            await Broker.open(config)


async def test_a_server_that_has_no_waitaof_is_refused(server: Server, config: BrokerConfig) -> None:
    node = Node(RedisEndpoint("127.0.0.1", server.port), Login(), None, 0, connect=5.0, operate=5.0)
    assert await server_checks.check(node, config)
    with pytest.raises(ConfigError, match="appendfsync is everysec"):
        await server_checks.check(node, config, waitaof_version=(99, 0))
    await node.close()


async def test_the_private_server_writes_before_it_answers(
    tmp_path: Path, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    server = PrivateServer()
    try:
        url = server.start(tmp_path / "state", durability="fsync")
        assert "appendfsync always" in (tmp_path / "state" / "redis.conf").read_text()
        await submit_one(BrokerConfig(url=url, durability="fsync"), card, make_request)
    finally:
        server.stop()


async def test_a_server_without_the_replicas_that_it_needs_is_away(server: Server, config: BrokerConfig) -> None:
    server("CONFIG", "SET", "min-replicas-to-write", "1")
    async with await Broker.open(replace(config, operation_timeout=0.5)) as broker:
        with pytest.raises(Unavailable, match=r"^Redis is away: NOREPLICAS Not enough good replicas to write\.$"):
            await broker.reaper().reap()
