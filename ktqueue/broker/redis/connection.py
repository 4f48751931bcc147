"""A process's way to the server that has the data, wherever that is now. Knows no keys and no scripts.

A call that fails is not sent again from here, but for the one case in which nothing was run (MOVED): the callers know
what may be sent twice. Their next try finds the server anew.
"""

import asyncio
import contextlib
from typing import Any

from ktqueue.broker.redis.address import Endpoint, Kind, read_address
from ktqueue.broker.redis.node import Lost, Moved, Node, ReadOnly, Subscriber
from ktqueue.broker.redis.server_checks import check
from ktqueue.broker.redis.topology import make_topology
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import ConfigError, Unavailable

WATCH_SECONDS = 1.0  # how often a process asks whether the data has moved on; a hanging server says nothing itself
MAX_MOVES = 5  # in one call
DISK_SHARE = 0.8  # of the time of a call may be spent on waiting for the disk


class Connection:
    """All connections of one process to one installation; opened as they are needed."""

    def __init__(self, url: str, config: BrokerConfig, tag: str) -> None:
        """`tag`: what all keys begin with. Sends nothing yet. Raises ConfigError for a URL that is none."""
        self._address = read_address(url, config.password_file)
        self._config = config
        self._tag = tag
        self._timeout = config.operation_timeout
        self._topology = make_topology(self._address, tag, config)
        self._node: Node | None = None  # the one to use; None: unknown
        self._last: Node | None = None  # the one that was used last
        self._hint: Endpoint | None = None  # what a node of the cluster said
        self._wait_for_disk = False
        self._search: asyncio.Task[Node] | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Find the server and check it. Raises Unavailable, ConfigError."""
        try:
            async with asyncio.timeout(self._timeout):
                await self._find()
        except TimeoutError as error:
            raise Lost("Redis is away: no answer in time", retry_after=1.0) from error

    async def evaluate(
        self, digest: str, source: str, key: str, arguments: tuple[bytes | str | int, ...], *, durable: bool = False
    ) -> Any:
        """Run a Lua script once. `durable`: what it wrote is on disk afterwards, if the settings ask for that.

        Raises Unavailable: then it may have run or not. Raises ReplyError with the script's own words, ConfigError.
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
                    except Moved as moved:
                        await self._follow(node, moved)
        except TimeoutError as error:
            await self._lose(node)
            raise Lost("Redis is away: no answer in time", retry_after=1.0) from error
        except Lost as error:
            await self._lose(node, entirely=isinstance(error, ReadOnly))
            raise
        raise Unavailable("Redis is away: the nodes of the cluster do not agree", retry_after=1.0)

    async def subscriber(self) -> Subscriber:
        """A connection of its own for subscriptions, opened. Raises Unavailable, ConfigError.

        In a cluster a PUBLISH reaches subscribers of every node, first those of the node that publishes, which is the
        owner of the slot. SPUBLISH, which would spare the other nodes, is not in 6.2.
        """
        node: Node | None = None
        try:
            async with asyncio.timeout(self._timeout):
                node = self._node or await self._find()
                subscriber = Subscriber(node)
                try:
                    await subscriber.connect()
                except BaseException:
                    await subscriber.close()
                    raise
                return subscriber
        except TimeoutError as error:
            await self._lose(node)
            raise Lost("Redis is away: no answer in time", retry_after=1.0) from error
        except Lost:
            await self._lose(node)
            raise

    async def close(self) -> None:
        """Drop all connections; subscribers are closed by their owners."""
        for task in (self._watcher, self._search):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._last is not None:
            await self._last.close()
        await self._topology.close()

    async def _find(self) -> Node:
        """One search for all who wait."""
        if self._search is None or self._search.done():
            self._search = asyncio.create_task(self._look(), name="ktqueue-find-redis")
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
                raise Lost("Redis is away: no answer in time", retry_after=1.0) from error
            raise
        self._node = self._last = node
        if old is not None and old is not node:
            await old.close()
        if self._topology.moves and self._watcher is None:
            self._watcher = asyncio.create_task(self._watch(), name="ktqueue-watch-redis")
        return node

    async def _lose(self, node: Node | None, *, entirely: bool = False) -> None:
        """The next call finds the server anew. `entirely`: whoever still uses this one must do so too."""
        if node is None or node is not self._last:
            return
        self._node = None
        if entirely:  # perhaps the name leads elsewhere now, which open connections do not see
            self._last = None
            await node.close()

    async def _follow(self, node: Node, moved: Moved) -> None:
        if self._address.kind is not Kind.CLUSTER:
            raise ConfigError("Redis is a cluster: say redis+cluster:// in broker.url", param="broker.url") from moved
        if node is self._node:
            self._hint = moved.endpoint
            await self._lose(node)

    async def _sync(self, node: Node) -> None:
        """Wait until all that was written is on disk. The write of its own makes that hold for a repeated call too."""
        local = await node.sync(f"{self._tag}:synced", int(self._timeout * DISK_SHARE * 1000))
        if local < 1:
            raise Unavailable("Redis has not written to its disk in time", retry_after=1.0)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            node = self._node
            if node is None:
                continue  # the next call looks
            with contextlib.suppress(Unavailable, ConfigError):
                endpoint = await self._topology.find()
                if node is self._node and endpoint != node.endpoint:
                    await self._lose(node, entirely=True)
