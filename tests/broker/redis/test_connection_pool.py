"""Connections are lent for one command: how many there are, and what cancelled calls and dead ones leave."""

import asyncio
import gc
import hashlib
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
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


@pytest.fixture
async def reports(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the event loop reports of errors that nobody has retrieved, once the garbage collector has run."""
    # Python retrieves the error of a stream here, but only if the garbage collector frees the error's future later.
    monkeypatch.delattr(asyncio.StreamReaderProtocol, "__del__", raising=False)
    contexts: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: contexts.append(context))
    return contexts


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


async def test_the_errors_of_dead_connections_reach_their_callers_only(
    connection: RedisConnection, raw: Any, reports: list[dict[str, Any]]
) -> None:
    subscriber = await connection.subscriber()
    await subscriber.send("SUBSCRIBE", "{t}")
    await subscriber.receive()
    await asyncio.gather(*(echo(connection, str(number)) for number in range(50)))
    for kind in ("normal", "pubsub"):
        raw.client_kill_filter(_type=kind, skipme=True)
    lost = await asyncio.gather(
        echo(connection, "sent into the void"), subscriber.send("PING"), subscriber.receive(), return_exceptions=True
    )
    assert isinstance(lost[0], Unavailable)
    assert isinstance(lost[2], Unavailable)
    await subscriber.close()
    assert await echo(connection, "found") == "found"
    del lost, subscriber  # the errors refer to the connections
    gc.collect()
    assert reports == []


async def test_a_search_that_ends_after_its_callers_have_left_is_not_reported(
    broker_config: BrokerConfig, tmp_path: Path, reports: list[dict[str, Any]]
) -> None:
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "mute.sock"))
        mute.listen()
        url = f"unix://{tmp_path}/mute.sock?password=any"
        connection = RedisConnection(url, replace(broker_config, operation_timeout=0.1), "{t}")
        for _ in range(2):
            with pytest.raises(Unavailable):
                await connection.open()
            searches = [task for task in asyncio.all_tasks() if task.get_name() == "ktqueue-find-redis"]
            if searches:
                await asyncio.wait(searches)
            searches.clear()
        gc.collect()
        assert reports == []
        await connection.close()
