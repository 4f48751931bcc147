"""The door to Redis (the only importer of redis): a connection pool, and raw connections for subscriptions.

Knows no keys and no scripts. No redis-py default is relied upon, and redis-py itself never retries: its callers know
what may be sent twice. Errors of redis-py come out as Unavailable or ReplyError.
"""

import asyncio
from typing import Any

import redis
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import ConfigError, Unavailable

MAX_CONNECTIONS = 16  # per process; calls beyond it wait their turn

_AWAY = (RedisConnectionError, RedisTimeoutError, ReadOnlyError, OSError)
_AWAY_CODES = frozenset({"MISCONF", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS", "BUSY"})


class OutOfMemory(Unavailable):
    """The server is at its memory limit: reads work, nothing new is taken."""


class ReplyError(Exception):
    """The server answered with an error; its text begins with a code word."""


def connect(url: str, config: BrokerConfig) -> "Redis":
    """A client with every option said. Nothing is sent yet. Raises ConfigError for a URL that is none."""
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=config.operation_timeout,
            protocol=2,
            decode_responses=False,
            encoding="utf-8",
            encoding_errors="strict",
            # With a timeout redis-py sends under asyncio.wait_for, which in Python 3.11 may swallow a cancel, and in a
            # task of its own, which may meet a closed connection. Our own timeouts are around whole calls.
            socket_timeout=None,
            socket_connect_timeout=config.connect_timeout,
            retry=Retry(NoBackoff(), 0),
            retry_on_timeout=False,
            retry_on_error=[],
            health_check_interval=0,
            client_name=None,
            lib_name=None,
            lib_version=None,
        )
    except ValueError as error:
        raise ConfigError(f"broker.url is not a Redis URL: {error}", param="broker.url") from error
    return Redis.from_pool(pool)


def _translate(error: Exception) -> Exception:
    if isinstance(error, AuthenticationError):
        return ConfigError("Redis refuses the password", param="broker.url")
    if isinstance(error, OutOfMemoryError) or " -OOM " in str(error):  # the latter from within a script, Redis 6.2
        return OutOfMemory("Redis has no memory left", retry_after=5.0)
    if isinstance(error, _AWAY) or str(error).partition(" ")[0] in _AWAY_CODES:
        return Unavailable(f"Redis is away: {str(error) or 'no answer in time'}", retry_after=1.0)
    return ReplyError(str(error))


class Connection:
    """All connections of one process to one server; opened as they are needed."""

    def __init__(self, url: str, config: BrokerConfig) -> None:
        self._redis = connect(url, config)
        self._timeout = config.operation_timeout

    async def evaluate(self, digest: str, source: str, key: str, arguments: tuple[bytes | str | int, ...]) -> Any:
        """Run a Lua script once, by its SHA-1 or, where the server does not know that, by its source.

        Raises Unavailable: then it may have run or not. Raises ReplyError with the script's own words.
        """
        try:
            async with asyncio.timeout(self._timeout):  # its TimeoutError is an OSError
                try:
                    return await self._redis.execute_command("EVALSHA", digest, 1, key, *arguments)  # type: ignore[no-untyped-call]
                except NoScriptError:  # a new or restarted server; nothing was run
                    return await self._redis.execute_command("EVAL", source, 1, key, *arguments)  # type: ignore[no-untyped-call]
        except (RedisError, OSError) as error:
            raise _translate(error) from error

    async def facts(self) -> dict[str, Any]:
        """The server's INFO: `redis_version`, `maxmemory_policy` ... Raises Unavailable, ConfigError, ReplyError."""
        try:
            async with asyncio.timeout(self._timeout):
                return {**await self._redis.info("server"), **await self._redis.info("memory")}
        except (RedisError, OSError) as error:
            raise _translate(error) from error

    def subscriber(self) -> "Subscriber":
        """A connection of its own for subscriptions, not yet opened."""
        pool = self._redis.connection_pool
        return Subscriber(pool.connection_class(**pool.connection_kwargs), self._timeout)

    async def close(self) -> None:
        """Close the pool; subscribers are closed by their owners."""
        await self._redis.aclose()


class Subscriber:
    """One raw connection for subscriptions: send and receive may run in different tasks.

    Every call raises Unavailable once the connection is lost; then make a new one.
    """

    def __init__(self, connection: AbstractConnection, timeout: float) -> None:
        self._connection = connection
        self._timeout = timeout  # seconds, to connect and log in

    async def connect(self) -> None:
        """Open it and log in."""
        try:
            async with asyncio.timeout(self._timeout):
                await self._connection.connect()  # type: ignore[no-untyped-call]
        except (RedisError, OSError) as error:
            raise _lost(error) from error

    async def send(self, *words: str) -> None:
        """Send one command without waiting for its reply."""
        if not self._connection.is_connected:  # redis-py would connect anew, without our subscriptions
            raise Unavailable("Redis is away", retry_after=1.0)
        try:
            await self._connection.send_command(*words, check_health=False)
        except (RedisError, OSError) as error:
            raise _lost(error) from error

    async def receive(self, seconds: float) -> list[Any] | None:
        """The next push or reply; None when nothing came within `seconds`."""
        try:
            reply: list[Any] | None = await self._connection.read_response(timeout=seconds)
        except (RedisError, OSError) as error:
            raise _lost(error) from error
        return reply

    async def close(self) -> None:
        """Drop the connection."""
        await self._connection.disconnect(nowait=True)


def _lost(error: Exception) -> Unavailable:
    return Unavailable(f"Redis is away: {error}", retry_after=1.0)


def probe(url: str) -> bool:
    """Does a server answer PING at the URL, now? Blocking; one second at most."""
    client = redis.Redis.from_url(
        url, protocol=2, socket_timeout=1.0, socket_connect_timeout=1.0, retry=None, retry_on_timeout=False,
        health_check_interval=0, lib_name=None, lib_version=None, single_connection_client=False,
    )  # fmt: skip
    try:
        return bool(client.ping())
    except (RedisError, OSError):
        return False
    finally:
        client.close()
