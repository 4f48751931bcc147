"""Finds the server that has the data: the server of the URL, the sentinels' master, or the owner of the cluster's slot.

Knows no scripts, and does not check the server that it finds. Raises Unavailable while no server can be found.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from ktqueue.broker.redis.address import Address, DeploymentKind, Login, RedisEndpoint
from ktqueue.broker.redis.node import Node, ReplyError, ServerLost
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import ConfigError, Unavailable

GRACE_SECONDS = 0.1  # for answers that are slower than the majority's
MAX_LEARNED = 8  # nodes of a cluster to ask if none of the URL's nodes answers
SLOTS = 16_384

Answer = tuple[int, RedisEndpoint]  # the epoch of the answer (0: none), the server


class Topology(Protocol):
    """Knows where the data is."""

    moves: bool  # whether the data can move while its last server still runs

    async def find(self) -> RedisEndpoint:
        """The server to use from now on. Raises Unavailable or ConfigError."""

    async def close(self) -> None:
        """Close the connections."""


class SingleServer:
    """One server, without failover."""

    moves = False

    def __init__(self, endpoint: RedisEndpoint) -> None:
        self._endpoint = endpoint

    async def find(self) -> RedisEndpoint:
        """The server of the URL."""
        return self._endpoint

    async def close(self) -> None:
        """Nothing to close."""


class Sentinels:
    """Sentinels that watch one master under the name of a service."""

    moves = True

    def __init__(self, address: Address, config: BrokerConfig) -> None:
        self._service = address.service
        self._voters = _Voters(address, address.sentinel_login, config)

    async def find(self) -> RedisEndpoint:
        """The master of the newest epoch among the answers, of which a majority is awaited."""
        answers, refusals = await self._voters.ask(self._voters.configured, self._question)
        if answers:
            return max(answers, key=lambda answer: answer[0])[1]
        if refusals:
            raise ConfigError(f"the sentinels refuse {self._service!r}: {refusals[0]}", param="broker.url")
        raise ServerLost(f"Redis is away: no sentinel answers{self._voters.silence}", retry_after=1.0)

    async def close(self) -> None:
        """Close the connections to the sentinels."""
        await self._voters.close()

    async def _question(self, sentinel: Node) -> Answer:
        # After a promotion the address changes at once, but the master's record with the epoch only once the other
        # replicas follow.
        record = await sentinel.execute("SENTINEL", "MASTER", self._service)
        host, port = await sentinel.execute("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
        fields = dict(zip(record[::2], record[1::2], strict=True))
        return int(fields[b"config-epoch"]), RedisEndpoint(host.decode(), int(port))


class Cluster:
    """The nodes of a cluster. All keys of an installation are in one slot."""

    moves = True

    def __init__(self, address: Address, tag: str, config: BrokerConfig) -> None:
        self._slot = key_slot(tag)
        self._voters = _Voters(address, address.login, config)
        self._learned: tuple[RedisEndpoint, ...] = ()

    async def find(self) -> RedisEndpoint:
        """The owner of the slot, as most nodes of the URL see it. If none answers, other known nodes are asked."""
        refusals: list[str] = []
        for endpoints in filter(None, (self._voters.configured, self._learned)):
            answers, refused = await self._voters.ask(endpoints, self._question)
            refusals += refused
            if answers:
                return Counter(endpoint for _, endpoint in answers).most_common(1)[0][0]
        if refusals:
            raise ConfigError(f"Redis refuses CLUSTER SLOTS: {refusals[0]}", param="broker.url")
        raise ServerLost(f"Redis is away: no node of the cluster answers{self._voters.silence}", retry_after=1.0)

    async def close(self) -> None:
        """Close the connections to the nodes that were asked."""
        await self._voters.close()

    async def _question(self, node: Node) -> Answer:
        owner, known = None, []
        for low, high, *nodes in await node.execute("CLUSTER", "SLOTS"):
            # A node without a host is the one that answers.
            endpoints = [RedisEndpoint(host.decode() if host else node.endpoint.host, port) for host, port, *_ in nodes]
            known += endpoints
            if low <= self._slot <= high:
                owner = endpoints[0]
        if owner is None:
            raise Unavailable(f"no node of the cluster has slot {self._slot}", retry_after=1.0)
        self._learned = tuple(dict.fromkeys(known))[:MAX_LEARNED]
        return 0, owner


class _Voters:
    """Servers that are asked in parallel where the data is, so that one that hangs causes only a short delay."""

    def __init__(self, address: Address, login: Login, config: BrokerConfig) -> None:
        self.configured = address.endpoints
        self._login = login
        self._tls = address.tls
        self._patience = config.connect_timeout
        self._nodes: dict[RedisEndpoint, Node] = {}
        self._fault = ""

    @property
    def silence(self) -> str:
        """Why one of them did not answer, as a suffix for a message. Empty if it took too long."""
        return self._fault and f": {self._fault}"

    async def ask(
        self, endpoints: Sequence[RedisEndpoint], question: Callable[[Node], Awaitable[Answer]]
    ) -> tuple[list[Answer], list[str]]:
        """Ask all endpoints. Returns the answers of a majority and of those not much slower, and the refusals."""
        for endpoint in endpoints:
            if endpoint not in self._nodes:
                self._nodes[endpoint] = Node(
                    endpoint, self._login, self._tls, 0, connect=self._patience, operate=self._patience, connections=1
                )
        pending = {asyncio.ensure_future(question(self._nodes[endpoint])) for endpoint in endpoints}
        answers: list[Answer] = []
        refusals: list[str] = []
        self._fault = ""
        end = asyncio.get_running_loop().time() + self._patience
        try:
            while pending:
                enough = 2 * len(answers) > len(endpoints)
                left = end - asyncio.get_running_loop().time()
                done, pending = await asyncio.wait(
                    pending, timeout=GRACE_SECONDS if enough else max(0.0, left), return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                for task in done:
                    self._sort(task, answers, refusals)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        return answers, refusals

    async def close(self) -> None:
        for node in self._nodes.values():
            await node.close()

    def _sort(self, task: "asyncio.Future[Answer]", answers: list[Answer], refusals: list[str]) -> None:
        try:
            answers.append(task.result())
        except Unavailable as error:
            self._fault = error.message.removeprefix("Redis is away: ")
        except (ReplyError, ConfigError) as error:
            refusals.append(str(error))


def make_topology(address: Address, tag: str, config: BrokerConfig) -> Topology:
    """Make the topology of an address. `tag`: the beginning of all keys."""
    if address.kind is DeploymentKind.SENTINEL:
        return Sentinels(address, config)
    if address.kind is DeploymentKind.CLUSTER:
        return Cluster(address, tag, config)
    return SingleServer(address.endpoints[0])


def key_slot(key: str) -> int:
    """The slot of a key: CRC-16 (XMODEM: polynomial 0x1021, from 0) of its hash tag, modulo 16,384.

    Source: the cluster specification of Redis, "Hash tags".
    """
    start = key.find("{")
    if start >= 0:
        end = key.find("}", start)
        if end > start + 1:
            key = key[start + 1 : end]
    crc = 0
    for byte in key.encode():
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ 0x1021 if crc & 0x8000 else crc << 1) & 0xFFFF
    return crc % SLOTS
