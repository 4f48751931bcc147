"""The open connections of a listener, limited in total and by address, and which one is closed when a limit is reached.

A connection whose request is being answered is busy and stays open. All others can be closed to make room for a new
one: those that are silent, in the middle of a request, or do not read their answer.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Protocol

from ktqueue.core.errors import KtqueueError
from ktqueue.gateway.errors import TooManyConnections, TooManyFromAddress

MAX_LINGERING = 16  # connections whose last bytes are read and thrown away, so that their clients get the answer
MAX_OVERFLOW = 64  # connections beyond the limits; each may send one request, which is refused unless it is a probe


class EvictableConnection(Protocol):
    """A connection that can be closed to make room. Hashable by identity."""

    def evict(self) -> None:
        """Close at once, without an answer."""


class Connections:
    """Counts connections by address. All IPv6 addresses of a /64 count as one, since one client can use them all."""

    def __init__(self, limit: int, *, per_address: int = 0, trusted: Sequence[str] = ()) -> None:
        """`limit`: in total. `per_address`: for each address that is not in the `trusted` networks; 0 for no limit."""
        self._limit = limit
        self._per_address = per_address
        self._trusted = [ip_network(network, strict=False) for network in trusted]
        self._addresses: dict[EvictableConnection, str] = {}
        self._counts: Counter[str] = Counter()
        # By address, the longest idle first; no empty entries.
        self._idle: dict[str, dict[EvictableConnection, None]] = {}
        self._overflow: dict[EvictableConnection, None] = {}
        self._lingering: dict[EvictableConnection, None] = {}

    def __len__(self) -> int:
        return len(self._addresses) + len(self._overflow)

    def enter(self, connection: EvictableConnection, host: str) -> KtqueueError | None:
        """Count a new connection, which is idle at first.

        If a limit is reached, the connection that was idle longest is closed: one of this address for its own limit,
        one of the address with the most connections for the total limit. If none is idle, returns the error with which
        the requests of the new connection must be refused.
        """
        address, trusted = self._group(host)
        refusal: KtqueueError | None = None
        if self._per_address and not trusted and self._counts[address] >= self._per_address:
            if not self._evict_one(address):
                refusal = TooManyFromAddress(
                    f"one address may have {self._per_address} connections (gateway.max_sockets_per_address)",
                    limit=self._per_address,
                    value=self._counts[address],
                )
        elif len(self._addresses) >= self._limit:
            fullest = max(self._idle, key=self._counts.__getitem__, default=None)
            if fullest is None or not self._evict_one(fullest):
                refusal = TooManyConnections(
                    f"this gateway has at most {self._limit} connections (gateway.max_sockets)",
                    limit=self._limit,
                    value=len(self._addresses),
                )
        if refusal is not None:
            self._add_limited(connection, self._overflow, MAX_OVERFLOW)
            return refusal
        self._addresses[connection] = address
        self._counts[address] += 1
        self.idle(connection)
        return None

    def idle(self, connection: EvictableConnection) -> None:
        """Mark a connection as idle: no request is being answered, so it may be closed for a new one."""
        address = self._addresses.get(connection)
        if address is not None:
            self._idle.setdefault(address, {}).setdefault(connection)

    def busy(self, connection: EvictableConnection) -> None:
        """Mark a connection as busy: a request is being answered."""
        address = self._addresses.get(connection)
        if address is not None:
            self._not_idle(connection, address)

    def linger(self, connection: EvictableConnection, *, on: bool = True) -> None:
        """Note that all further input of this connection is thrown away. The oldest such connections are closed."""
        if not on:
            self._lingering.pop(connection, None)
        elif connection not in self._lingering:
            self._add_limited(connection, self._lingering, MAX_LINGERING)

    def leave(self, connection: EvictableConnection) -> None:
        """Forget a closed connection. Calling it again is no error."""
        self._overflow.pop(connection, None)
        self._lingering.pop(connection, None)
        address = self._addresses.pop(connection, None)
        if address is not None:
            self._not_idle(connection, address)
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]

    def _not_idle(self, connection: EvictableConnection, address: str) -> None:
        idle = self._idle.get(address)
        if idle is not None:
            idle.pop(connection, None)
            if not idle:
                del self._idle[address]

    def _add_limited(self, connection: EvictableConnection, few: dict[EvictableConnection, None], limit: int) -> None:
        if len(few) >= limit:
            self._evict(next(iter(few)))
        few[connection] = None

    def _evict_one(self, address: str) -> bool:
        idle = self._idle.get(address)
        if not idle:
            return False
        self._evict(next(iter(idle)))
        return True

    def _evict(self, connection: EvictableConnection) -> None:
        self.leave(connection)
        connection.evict()

    def _group(self, host: str) -> tuple[str, bool]:
        """The key under which a peer's address is counted, and whether it is trusted."""
        address = _parse(host)
        if address is None:  # a Unix socket
            return host, True
        if any(address in network for network in self._trusted):
            return str(address), True
        return client_address(host), False


def client_address(host: str) -> str:
    """The address that stands for a client: an IPv4 address, the /64 of an IPv6 one, else `host` itself."""
    address = _parse(host)
    if address is None or address.version == 4:
        return host if address is None else str(address)
    return str(ip_network((address, 64), strict=False))


@lru_cache(maxsize=1024)
def _parse(host: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address
