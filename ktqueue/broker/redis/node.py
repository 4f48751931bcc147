"""The connections of one process to one Redis server. The only module that imports redis and hiredis.

Knows no keys, no scripts and no other servers. It sets every option instead of relying on redis-py's defaults, and
redis-py never retries, because only the callers know what may be sent twice. Errors of redis-py are translated to
Unavailable, SlotMoved, ConfigError or ReplyError.
"""

import asyncio
import contextlib
import re
from typing import Any, cast

import hiredis
import redis
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.connection import Connection as PlainConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ktqueue.broker.redis.address import Login, RedisEndpoint, Tls
from ktqueue.broker.redis.connection_pool import ConnectionPool
from ktqueue.core.errors import ConfigError, Unavailable

MAX_CONNECTIONS = 16  # per process and server; further calls wait

_LOST = (RedisConnectionError, RedisTimeoutError, OSError)
_LOST_CODES = frozenset({"MASTERDOWN", "CLUSTERDOWN"})
_IN_SCRIPT = re.compile(r" script: .*@user_script.*")  # where in a script an error occurred
_AWAY_CODES = frozenset({"MISCONF", "NOREPLICAS", "BUSY"})
_MOVING_CODES = frozenset({"ASK", "TRYAGAIN"})


class OutOfMemory(Unavailable):
    """The server is at its memory limit: reads work, but writes of new data are refused."""


class ServerLost(Unavailable):
    """The server does not answer, or does not have the data. Perhaps another server has it now."""


class ReadOnly(ServerLost):
    """The server is a replica."""


class LoginRefused(ConfigError):
    """The server refuses the user or the password."""


class SlotMoved(Exception):
    """The data is on another node of the cluster. Nothing was executed."""

    def __init__(self, endpoint: RedisEndpoint) -> None:
        super().__init__(f"moved to {endpoint}")
        self.endpoint = endpoint


class ReplyError(Exception):
    """The server replied with an error. Its text starts with a code word."""


class NotPermitted(ReplyError):
    """The user lacks the permission."""


def retrieve_error(future: asyncio.Future[Any]) -> None:
    """Mark the error of a future as retrieved, since another way leads to its callers or they have left."""
    if not future.cancelled():
        future.exception()


class _Connection(AbstractConnection):
    """A connection whose error is known to its callers only, and not reported when the connection is freed.

    asyncio also keeps the error in a future, which reports it unless it is retrieved. `StreamReaderProtocol.__del__`
    does that, but the error's traceback refers to the protocol, and the garbage collector may free the future first.
    """

    async def disconnect(self, nowait: bool = False) -> None:
        writer: Any = self._writer
        if writer is not None:
            closed = writer._protocol._get_close_waiter(writer)  # what `wait_closed` awaits, without a task for it
            if closed.done():
                retrieve_error(closed)
            else:
                closed.add_done_callback(retrieve_error)
        await super().disconnect(nowait)


class _TcpConnection(_Connection, PlainConnection):
    pass


class _TlsConnection(_Connection, SSLConnection):
    pass


class _UnixConnection(_Connection, UnixDomainSocketConnection):
    pass


class Node:
    """A pool of connections and subscriptions to one server, opened when they are needed."""

    def __init__(
        self, endpoint: RedisEndpoint, login: Login, tls: Tls | None, database: int, *, connect: float, operate: float,
        connections: int = MAX_CONNECTIONS,
    ) -> None:  # fmt: skip
        """Does not connect yet. `connect` and `operate` are time limits in seconds."""
        self.endpoint = endpoint
        self._options = _options(endpoint, login, tls, database, connect)
        self.pool = BlockingConnectionPool(max_connections=connections, timeout=cast(int, operate), **self._options)
        self._scripts = ConnectionPool(self._make, _pack, connections, _LOST)
        self._redis = Redis.from_pool(self.pool)
        self._raw: set[AbstractConnection] = set()
        self._closed = False

    async def execute(self, *words: bytes | str | int) -> Any:
        """Send one command and return the reply. The caller sets a time limit.

        Raises Unavailable, SlotMoved, ConfigError or ReplyError.
        """
        try:
            return await self._redis.execute_command(*words)  # type: ignore[no-untyped-call]
        except (RedisError, OSError) as error:
            raise _translate(error, self.endpoint) from error
        finally:
            await self._close_late()

    async def evaluate(self, digest: str, source: str, key: str, arguments: tuple[bytes | str | int, ...]) -> Any:
        """Run a Lua script once, by its SHA-1 or, if the server does not know it, by its source.

        Raises Unavailable, and then the script may have run or not; SlotMoved; ReplyError with the script's error.
        """
        try:
            try:
                return await self._scripts.call("EVALSHA", digest, 1, key, *arguments)
            except NoScriptError:  # a new or restarted server; nothing was executed
                return await self._scripts.call("EVAL", source, 1, key, *arguments)
        except (RedisError, OSError) as error:
            raise _translate(error, self.endpoint) from error

    async def sync(self, key: str, milliseconds: int) -> int:
        """Write `key` for a minute and wait until that is on the server's disk, at most `milliseconds`.

        Returns 0 if it is not on disk by then. Raises Unavailable or ReplyError.
        """
        try:
            async with self._redis.pipeline(transaction=False) as pipeline:  # WAITAOF refers to its own connection
                pipeline.execute_command("SET", key, "", "PX", 60_000)
                pipeline.execute_command("WAITAOF", 1, 0, milliseconds)
                return int((await pipeline.execute())[1][0])
        except (RedisError, OSError) as error:
            raise _translate(error, self.endpoint) from error

    def raw(self) -> AbstractConnection:
        """A separate connection for subscriptions, not opened yet. Close it with `drop`."""
        connection = self._make()
        self._raw.add(connection)
        return connection

    async def drop(self, connection: AbstractConnection) -> None:
        """Disconnect a connection that `raw` returned."""
        self._raw.discard(connection)
        await connection.disconnect(nowait=True)

    async def close(self) -> None:
        """Disconnect everything. Running calls and subscriptions fail."""
        self._closed = True
        for connection in tuple(self._raw):
            await self.drop(connection)
        await self._scripts.close()
        with contextlib.suppress(RedisError, OSError):  # a paused server does not answer
            await self._redis.aclose()

    def _make(self) -> AbstractConnection:
        return self.pool.connection_class(**self.pool.connection_kwargs)

    async def _close_late(self) -> None:
        if self._closed:  # a call that waited has opened a connection after `close`
            with contextlib.suppress(RedisError, OSError):
                await self._redis.aclose()


class RedisSubscriber:
    """One connection for subscriptions. `send` and `receive` may run in different tasks.

    Once the connection is lost, every call raises Unavailable. Then make a new subscriber.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._connection = node.raw()

    async def connect(self) -> None:
        """Connect and log in. The caller sets a time limit."""
        try:
            await self._connection.connect()  # type: ignore[no-untyped-call]
        except (RedisError, OSError) as error:
            raise _lost(error) from error

    async def send(self, *words: str) -> None:
        """Send one command without waiting for its reply."""
        if not self._connection.is_connected:  # redis-py would reconnect, without our subscriptions
            raise ServerLost("Redis is away", retry_after=1.0)
        try:
            await self._connection.send_command(*words, check_health=False)
        except (RedisError, OSError) as error:
            raise _lost(error) from error

    async def receive(self) -> list[Any]:
        """Wait for the next push or reply and return it."""
        try:
            reply: list[Any] = await self._connection.read_response()
        except (RedisError, OSError) as error:
            raise _lost(error) from error
        return reply

    async def close(self) -> None:
        """Close the connection."""
        await self._node.drop(self._connection)


def _pack(words: tuple[bytes | str | int, ...]) -> bytes:
    """Encode a command. redis-py's asyncio connections do not use the encoder in C."""
    packed: bytes = hiredis.pack_command(words)  # type: ignore[arg-type] # its stub knows of one word alone
    return packed


def _translate(error: Exception, endpoint: RedisEndpoint) -> Exception:
    """Translate an error of redis-py or of the operating system into one of ours."""
    text = str(error)
    code = text.partition(" ")[0]
    if isinstance(error, AuthenticationError):
        return LoginRefused(f"Redis at {endpoint} refuses the user or the password of broker.url", param="broker.url")
    if code == "MOVED":  # MOVED 3999 127.0.0.1:6381; without a host it is the host that answered
        host, _, port = text.split(" ")[2].rpartition(":")
        return SlotMoved(RedisEndpoint(host or endpoint.host, int(port)))
    if code in _MOVING_CODES:
        # The slot moves to another node key by key, and a script on either node would see a part of the data only. So
        # ASK is not followed. Once the whole slot has moved, the reply is MOVED.
        return Unavailable("Redis is away: the slot moves between nodes of the cluster", retry_after=1.0)
    if isinstance(error, OutOfMemoryError) or " -OOM " in text:  # the latter from within a script, Redis 6.2
        return OutOfMemory("Redis has no memory left", retry_after=5.0)
    if isinstance(error, ReadOnlyError) or " -READONLY " in text:
        return ReadOnly(f"Redis is away: {endpoint} is a replica", retry_after=1.0)
    if isinstance(error, _LOST) or code in _LOST_CODES:
        return ServerLost(f"Redis is away: {text or 'no answer in time'}", retry_after=1.0)
    if code in _AWAY_CODES:
        return Unavailable(f"Redis is away: {_IN_SCRIPT.sub('', text)}", retry_after=1.0)
    if isinstance(error, NoPermissionError) or "ACL failure in script" in text or "executing the script can't" in text:
        return NotPermitted(text)
    return ReplyError(text)


def _lost(error: Exception) -> Unavailable:
    return ServerLost(f"Redis is away: {error}", retry_after=1.0)


def _options(endpoint: RedisEndpoint, login: Login, tls: Tls | None, database: int, connect: float) -> dict[str, Any]:
    """All options of a connection."""
    options: dict[str, Any] = {
        "username": login.username,
        "password": login.password,
        "db": database,
        "protocol": 2,
        "decode_responses": False,
        "encoding": "utf-8",
        "encoding_errors": "strict",
        # With a timeout, redis-py sends under asyncio.wait_for, which may swallow a cancellation in Python 3.11, and
        # in a separate task, which may find a closed connection. Our own time limits are around whole calls.
        "socket_timeout": None,
        "socket_connect_timeout": connect,
        "retry": Retry(NoBackoff(), 0),
        "retry_on_timeout": False,
        "retry_on_error": [],
        "health_check_interval": 0,
        "client_name": None,
        "lib_name": None,
        "lib_version": None,
    }
    if endpoint.port == 0:
        return {**options, "connection_class": _UnixConnection, "path": endpoint.host}
    options |= {"host": endpoint.host, "port": endpoint.port, "socket_keepalive": True}
    if tls is None:
        return {**options, "connection_class": _TcpConnection}
    return {
        **options,
        "connection_class": _TlsConnection,
        "ssl_ca_certs": tls.ca_certs,
        "ssl_certfile": tls.certfile,
        "ssl_keyfile": tls.keyfile,
        "ssl_cert_reqs": "required" if tls.verify else "none",
        "ssl_check_hostname": tls.check_hostname,
    }


def probe(url: str) -> bool:
    """Whether a server answers PING at the URL now. Blocks for at most a second."""
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
