"""Which server has the data now: the one of the URL, the master that the sentinels name, the owner of the slot.

Knows no scripts, and does not judge the server that it names. Everything raises Unavailable while nobody can say.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from ktqueue.broker.redis.address import Address, Endpoint, Kind, Login
from ktqueue.broker.redis.node import Lost, Node, ReplyError
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import ConfigError, Unavailable

GRACE_SECONDS = 0.1  # for those that answer later than the majority
MAX_LEARNED = 8  # nodes of a cluster to be asked where none of the URL answers
SLOTS = 16_384

Answer = tuple[int, Endpoint]  # the epoch of what is told (0: none is told), the server


class Topology(Protocol):
    """Tells who has the data."""

    moves: bool  # may the answer change while the server of the last one still runs?

    async def find(self) -> Endpoint:
        """The server to use from now on. Raises Unavailable, ConfigError."""

    async def close(self) -> None:
        """Drop the connections."""


class Single:
    """The server of the URL."""

    moves = False

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def find(self) -> Endpoint:
        """That one."""
        return self._endpoint

    async def close(self) -> None:
        """There are none."""


class Sentinels:
    """Several sentinels that watch one master under the name of a service."""

    moves = True

    def __init__(self, address: Address, config: BrokerConfig) -> None:
        self._service = address.service
        self._witnesses = _Witnesses(address, address.sentinel_login, config)

    async def find(self) -> Endpoint:
        """The master in the newest epoch that a majority knows, as far as a majority answers."""
        answers, refusals = await self._witnesses.ask(self._witnesses.given, self._question)
        if answers:
            return max(answers, key=lambda answer: answer[0])[1]
        if refusals:
            raise ConfigError(f"the sentinels refuse {self._service!r}: {refusals[0]}", param="broker.url")
        raise Lost(f"Redis is away: no sentinel answers{self._witnesses.silence}", retry_after=1.0)

    async def close(self) -> None:
        """Drop the connections to the sentinels."""
        await self._witnesses.close()

    async def _question(self, sentinel: Node) -> Answer:
        # The address changes at once when a replica was promoted; the record of the master, which has the epoch,
        # only when the other replicas follow.
        record = await sentinel.execute("SENTINEL", "MASTER", self._service)
        host, port = await sentinel.execute("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
        fields = dict(zip(record[::2], record[1::2], strict=True))
        return int(fields[b"config-epoch"]), Endpoint(host.decode(), int(port))


class Cluster:
    """The nodes of a cluster. All keys of an installation lie in one slot."""

    moves = True

    def __init__(self, address: Address, tag: str, config: BrokerConfig) -> None:
        self._slot = key_slot(tag)
        self._witnesses = _Witnesses(address, address.login, config)
        self._learned: tuple[Endpoint, ...] = ()

    async def find(self) -> Endpoint:
        """The owner of the slot, as most of the nodes of the URL see it; others of the cluster where none answers."""
        refusals: list[str] = []
        for endpoints in filter(None, (self._witnesses.given, self._learned)):
            answers, refused = await self._witnesses.ask(endpoints, self._question)
            refusals += refused
            if answers:
                return Counter(endpoint for _, endpoint in answers).most_common(1)[0][0]
        if refusals:
            raise ConfigError(f"Redis refuses CLUSTER SLOTS: {refusals[0]}", param="broker.url")
        raise Lost(f"Redis is away: no node of the cluster answers{self._witnesses.silence}", retry_after=1.0)

    async def close(self) -> None:
        """Drop the connections to the nodes that were asked."""
        await self._witnesses.close()

    async def _question(self, node: Node) -> Answer:
        owner, everybody = None, []
        for low, high, *nodes in await node.execute("CLUSTER", "SLOTS"):
            # A node without a name of its own is the one that answers, under the name by which it was asked.
            told = [Endpoint(host.decode() if host else node.endpoint.host, port) for host, port, *_ in nodes]
            everybody += told
            if low <= self._slot <= high:
                owner = told[0]
        if owner is None:
            raise Unavailable(f"no node of the cluster has slot {self._slot}", retry_after=1.0)
        self._learned = tuple(dict.fromkeys(everybody))[:MAX_LEARNED]
        return 0, owner


class _Witnesses:
    """Servers that are asked who has the data, all at once: one that hangs holds up nobody for long."""

    def __init__(self, address: Address, login: Login, config: BrokerConfig) -> None:
        self.given = address.endpoints
        self._login = login
        self._tls = address.tls
        self._patience = config.connect_timeout
        self._nodes: dict[Endpoint, Node] = {}
        self._fault = ""

    @property
    def silence(self) -> str:
        """Why one of them did not answer, to be appended; nothing where it took too long."""
        return self._fault and f": {self._fault}"

    async def ask(
        self, endpoints: Sequence[Endpoint], question: Callable[[Node], Awaitable[Answer]]
    ) -> tuple[list[Answer], list[str]]:
        """What was answered by all, or by a majority and whoever is not much slower; and what was refused."""
        for endpoint in endpoints:
            if endpoint not in self._nodes:
                self._nodes[endpoint] = Node(
                    endpoint,
                    self._login,
                    self._tls,
                    0,
                    connect=self._patience,
                    operate=self._patience,
                    connections=1,
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
    """That of an address. `tag`: what all keys begin with."""
    if address.kind is Kind.SENTINEL:
        return Sentinels(address, config)
    if address.kind is Kind.CLUSTER:
        return Cluster(address, tag, config)
    return Single(address.endpoints[0])


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
