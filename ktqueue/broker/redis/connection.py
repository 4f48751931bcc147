"""Connects a process to the server that has the data, also after failovers. Knows no keys and no scripts.

A failed call is not repeated here, because only callers know what may be sent twice. The one exception is MOVED, after
which nothing was executed. The caller's next attempt searches for the server again.
"""

import asyncio
import contextlib
import random
from typing import Any

from ktqueue.broker.redis.address import DeploymentKind, RedisEndpoint, read_address
from ktqueue.broker.redis.node import (
    LoginRefused,
    Node,
    ReadOnly,
    RedisSubscriber,
    ServerLost,
    SlotMoved,
    retrieve_error,
)
from ktqueue.broker.redis.server_checks import check
from ktqueue.broker.redis.topology import make_topology
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import ConfigError, Unavailable

WATCH_SECONDS = 1.0  # between checks whether the data has moved; a hanging server does not say so
MAX_MOVES = 5  # redirections followed in one call
DISK_SHARE = 0.8  # share of a call's time that it may wait for the disk


class RedisConnection:
    """All connections of one process to one installation, opened when they are needed."""

    def __init__(self, url: str, config: BrokerConfig, tag: str) -> None:
        """`tag`: the beginning of all keys. Does not connect yet. Raises ConfigError for an invalid URL."""
        self._address = read_address(url, config.password_file)
        self._config = config
        self._tag = tag
        self._timeout = config.operation_timeout
        self._topology = make_topology(self._address, tag, config)
        self._node: Node | None = None  # the node to use, or None if it is unknown
        self._last: Node | None = None  # the node that was used last
        self._hint: RedisEndpoint | None = None  # where a node of the cluster redirected us
        self._wait_for_disk = False
        self._search: asyncio.Task[Node] | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Find the server and check it. Raises Unavailable, ConfigError."""
        try:
            async with asyncio.timeout(self._timeout):
                await self._find()
        except TimeoutError as error:
            raise ServerLost("Redis is away: no answer in time", retry_after=1.0) from error

    async def evaluate(
        self, digest: str, source: str, key: str, arguments: tuple[bytes | str | int, ...], *, durable: bool = False
    ) -> Any:
        """Run a Lua script once. With `durable`, its writes are on disk afterwards, if the settings require that.

        Raises Unavailable, and then the script may have run or not; ReplyError with the script's error; ConfigError.
        """
        node: Node | None = None
        try:
            async with asyncio.timeout(self._timeout):  # its TimeoutError is an OSError
                for _ in range(MAX_MOVES):
                    node = self._node or await self._find()
                    try:
                        reply = await node.evaluate(digest, source, key, arguments)
                        if durable and self._wait_for_disk:
                            await self._sync(node)
                        return reply
                    except SlotMoved as moved:
                        await self._follow(node, moved)
        except TimeoutError as error:
            await self._lose(node)
            raise ServerLost("Redis is away: no answer in time", retry_after=1.0) from error
        except ServerLost as error:
            await self._lose(node, entirely=isinstance(error, ReadOnly))
            raise
        except LoginRefused as error:  # `open` has logged in, so users of the server have changed, perhaps for a moment
            await self._lose(node)
            raise ServerLost(f"Redis is away: {error.message}", param=error.param, retry_after=1.0) from error
        raise Unavailable("Redis is away: the nodes of the cluster do not agree", retry_after=1.0)

    async def subscriber(self) -> RedisSubscriber:
        """Open a separate connection for subscriptions. Raises Unavailable or ConfigError.

        In a cluster, PUBLISH reaches the subscribers of every node, and those of the publishing node first, which owns
        the slot. SPUBLISH would spare the other nodes, but 6.2 does not have it.
        """
        node: Node | None = None
        try:
            async with asyncio.timeout(self._timeout):
                node = self._node or await self._find()
                subscriber = RedisSubscriber(node)
                try:
                    await subscriber.connect()
                except BaseException:
                    await subscriber.close()
                    raise
                return subscriber
        except TimeoutError as error:
            await self._lose(node)
            raise ServerLost("Redis is away: no answer in time", retry_after=1.0) from error
        except ServerLost:
            await self._lose(node)
            raise

    async def close(self) -> None:
        """Close all connections. Subscribers are closed by their owners."""
        for task in (self._watcher, self._search):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._last is not None:
            await self._last.close()
        await self._topology.close()

    async def _find(self) -> Node:
        """Find the server. Concurrent calls share one search."""
        if self._search is None or self._search.done():
            self._search = asyncio.create_task(self._look(), name="ktqueue-find-redis")
            self._search.add_done_callback(retrieve_error)  # if all calls have reached their time limits
        return await asyncio.shield(self._search)

    async def _look(self) -> Node:
        endpoint, self._hint = self._hint or await self._topology.find(), None
        old, node = self._last, self._last
        if node is None or node.endpoint != endpoint:
            node = Node(
                endpoint,
                self._address.login,
                self._address.tls,
                self._address.database,
                connect=self._config.connect_timeout,
                operate=self._timeout,
            )
        try:
            async with asyncio.timeout(self._timeout):
                self._wait_for_disk = await check(node, self._config)
        except BaseException as error:
            if node is not old:
                await node.close()
            if isinstance(error, TimeoutError):
                raise ServerLost("Redis is away: no answer in time", retry_after=1.0) from error
            raise
        self._node = self._last = node
        if old is not None and old is not node:
            await old.close()
        if self._topology.moves and self._watcher is None:
            self._watcher = asyncio.create_task(self._watch(), name="ktqueue-watch-redis")
        return node

    async def _lose(self, node: Node | None, *, entirely: bool = False) -> None:
        """Make the next call search for the server again. `entirely`: also break the calls that still use this node."""
        if node is None or node is not self._last:
            return
        self._node = None
        if entirely:  # the host name may have a new address, which open connections do not notice
            self._last = None
            await node.close()

    async def _follow(self, node: Node, moved: SlotMoved) -> None:
        if self._address.kind is not DeploymentKind.CLUSTER:
            raise ConfigError("Redis is a cluster: use redis+cluster:// in broker.url", param="broker.url") from moved
        if node is self._node:
            self._hint = moved.endpoint
            await self._lose(node)

    async def _sync(self, node: Node) -> None:
        """Wait until all writes are on disk. `sync` writes too, so that this also holds for a repeated call."""
        local = await node.sync(f"{self._tag}:synced", int(self._timeout * DISK_SHARE * 1000))
        if local < 1:
            raise Unavailable("Redis has not written to its disk in time", retry_after=1.0)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            node = self._node
            if node is None:
                continue  # the next call searches
            with contextlib.suppress(Unavailable, ConfigError):
                endpoint = await self._topology.find()
                if node is self._node and endpoint != node.endpoint:
                    await self._lose(node, entirely=True)


def jittered(seconds: float) -> float:
    """A random time from half of `seconds` to all of it, so that clients of a lost server return at different times."""
    return seconds * random.uniform(0.5, 1.0)
