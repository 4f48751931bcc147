"""Outbox: journal events on their way to Redis, in order, with at most one commit in flight.

The engine goes on stepping while a commit is under way, but never more than a few steps ahead. Knows no engine.
"""

import asyncio
from collections.abc import Callable

from ktqueue.broker.lease import Lease
from ktqueue.core.events import TokenEvent


class Outbox:
    """`on_cancel` gets the ids of jobs that a client wants cancelled, as often as Redis repeats them."""

    def __init__(self, lease: Lease, on_cancel: Callable[[set[str]], None], *, steps_ahead: int = 3) -> None:
        self._lease = lease
        self._on_cancel = on_cancel
        self._steps_ahead = steps_ahead
        self._events: list[tuple[str, TokenEvent]] = []
        self._steps = 0  # steps whose events wait for their commit
        self._committing = False
        self._begun = self._done = 0  # commits
        self._filled = asyncio.Event()
        self._taken = asyncio.Event()

    def put(self, job_id: str, event: TokenEvent) -> None:
        """Queue an event. Nothing is sent before the next `seal`."""
        self._events.append((job_id, event))

    def seal(self) -> None:
        """The step is over: send what was put. An empty step is sent too, for its reply carries the cancels."""
        self._steps += 1
        self._filled.set()

    async def room(self) -> None:
        """Wait until fewer than `steps_ahead` steps wait for their commit."""
        while self._steps >= self._steps_ahead:
            await self._changed()

    async def flush(self) -> None:
        """Wait until everything that was put is in the journal."""
        if self._events:
            self.seal()
        while self._steps or self._committing:
            await self._changed()

    async def committed(self) -> None:
        """Wait until what was put up to now, and is sealed or will be, is in the journal."""
        commit = self._begun + 1
        while self._done < commit:
            await self._changed()

    async def run(self) -> None:
        """Commit until cancelled. Raises LeaseLost."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            events, self._events = self._events, []
            self._steps = 0
            self._committing = True
            self._begun += 1
            self._taken.set()
            cancels = await self._lease.commit(events)
            self._committing = False
            self._done += 1
            self._taken.set()
            if cancels:
                self._on_cancel(cancels)

    async def _changed(self) -> None:
        self._taken.clear()
        await self._taken.wait()
