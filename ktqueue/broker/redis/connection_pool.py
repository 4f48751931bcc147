"""A pool of connections to one server, each lent for one command. Knows no keys, no scripts and no library.

A command notices if the server has closed its connection. Then all idle connections are dropped too, and the caller's
next attempt opens new ones. (redis-py's pool instead tries to read from a connection before it lends it, which takes
about as long as the command itself.)
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol


class PooledConnection(Protocol):
    """A connection. Sending connects if necessary; cancelling `read_response` disconnects."""

    async def send_packed_command(self, command: bytes, check_health: bool) -> None: ...

    async def read_response(self) -> Any: ...

    async def disconnect(self, nowait: bool) -> None: ...


class ConnectionPool:
    """At most `most` connections, opened when they are needed. Further calls wait."""

    def __init__(
        self,
        make: Callable[[], PooledConnection],
        pack: Callable[[tuple[bytes | str | int, ...]], bytes],
        most: int,
        lost: tuple[type[Exception], ...],
    ) -> None:
        """`pack` encodes a command. `lost`: errors that a connection raises once the server is gone."""
        self._make = make
        self._pack = pack
        self._lost = lost
        self._turns = asyncio.Semaphore(most)
        self._idle: list[PooledConnection] = []
        self._lent: set[PooledConnection] = set()
        self._closed = False

    async def call(self, *words: bytes | str | int) -> Any:
        """Send one command once and return its reply. Raises what the connection raises."""
        command = self._pack(words)
        async with self._turns:
            wire = self._idle.pop() if self._idle else self._make()
            self._lent.add(wire)
            try:
                await wire.send_packed_command(command, check_health=False)
                return await wire.read_response()
            except self._lost:
                await self._drop_idle()
                raise
            finally:
                self._lent.discard(wire)
                self._idle.append(wire)
                if self._closed:
                    await self._drop_idle()

    async def close(self) -> None:
        """Disconnect everything. Running calls fail."""
        self._closed = True
        for wire in tuple(self._lent):
            await wire.disconnect(nowait=True)
        await self._drop_idle()

    async def _drop_idle(self) -> None:
        idle, self._idle = self._idle, []
        for wire in idle:
            await wire.disconnect(nowait=True)
