"""Connections are lent for one command: how many there are, and what cancelled calls and dead ones leave."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ktqueue.broker.redis.connection import RedisConnection
from ktqueue.broker.redis.node import MAX_CONNECTIONS
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import Unavailable

ECHO = "return ARGV[1]"
DIGEST = hashlib.sha1(ECHO.encode()).hexdigest()


@pytest.fixture
async def connection(broker_config: BrokerConfig) -> AsyncIterator[RedisConnection]:
    assert broker_config.url is not None
    opened = RedisConnection(broker_config.url, broker_config, "{t}")
    await opened.open()
    yield opened
    await opened.close()


async def echo(connection: RedisConnection, word: str) -> Any:
    return (await connection.evaluate(DIGEST, ECHO, "{t}", (word,))).decode()


async def test_many_calls_at_once_share_the_connections_and_get_their_own_replies(
    connection: RedisConnection, raw: Any
) -> None:
    before = len(raw.client_list())
    words = [str(number) for number in range(200)]
    assert await asyncio.gather(*(echo(connection, word) for word in words)) == words
    assert 1 < len(raw.client_list()) - before <= MAX_CONNECTIONS


async def test_calls_one_after_the_other_use_one_connection(connection: RedisConnection, raw: Any) -> None:
    await echo(connection, "first")
    before = len(raw.client_list())
    for number in range(20):
        assert await echo(connection, str(number)) == str(number)
    assert len(raw.client_list()) == before


async def test_the_reply_to_a_cancelled_call_reaches_nobody_else(connection: RedisConnection) -> None:
    await echo(connection, "first")
    for turns in range(12):  # cancel after this many turns of the event loop
        task = asyncio.create_task(echo(connection, "lost"))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await echo(connection, "found") == "found"


async def test_a_dead_connection_closes_the_idle_ones_too(connection: RedisConnection, raw: Any) -> None:
    await asyncio.gather(*(echo(connection, str(number)) for number in range(50)))
    raw.client_kill_filter(_type="normal", skipme=True)
    with pytest.raises(Unavailable):
        await echo(connection, "sent into the void")
    words = [str(number) for number in range(50)]
    assert await asyncio.gather(*(echo(connection, word) for word in words)) == words
