"""Outbox: events on their way to the journals, in order, with at most one commit in flight.

The engine continues while a commit is in flight, but never more than a few steps ahead. Knows no engine.
"""

import asyncio
import time
from collections.abc import Callable

from ktqueue.broker.lease import Lease
from ktqueue.core.events import TokenEvent


class Outbox:
    """Events that are not committed yet.

    `on_cancel` receives the ids of jobs that must stop, each time that Redis reports them. `steps_ahead`: how many
    steps may wait for their commit.
    """

    def __init__(self, lease: Lease, on_cancel: Callable[[set[str]], None], *, steps_ahead: int = 3) -> None:
        self._lease = lease
        self._on_cancel = on_cancel
        self._steps_ahead = steps_ahead
        self._events: list[tuple[str, TokenEvent]] = []
        self._committed: list[Callable[[float], None]] = []  # to be called after the next commit
        self._sealed_steps = 0  # steps whose events wait for their commit
        self._committing = False
        self._commits_begun = self._commits_done = 0
        self._filled = asyncio.Event()
        self._progressed = asyncio.Event()

    def put(self, job_id: str, event: TokenEvent) -> None:
        """Queue an event. Nothing is sent before the next `seal`."""
        self._events.append((job_id, event))

    def seal(self, committed: Callable[[float], None] | None = None) -> None:
        """Release the events of a finished step for the next commit. `committed` is called then, with the time.

        A step without events is committed too, because the reply names the jobs to stop.
        """
        if committed is not None:
            self._committed.append(committed)
        self._sealed_steps += 1
        self._filled.set()

    async def has_room(self) -> None:
        """Wait until fewer than `steps_ahead` steps wait for their commit."""
        while self._sealed_steps >= self._steps_ahead:
            await self._change()

    async def flush(self) -> None:
        """Wait until all queued events are in their journals."""
        if self._events:
            self.seal()
        while self._sealed_steps or self._committing:
            await self._change()

    async def committed(self) -> None:
        """Wait until the events that were queued up to now are in their journals."""
        commit = self._commits_begun + bool(self._events)
        while self._commits_done < commit:
            await self._change()

    async def run(self) -> None:
        """Commit until cancelled. Raises LeaseLost."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            events, self._events = self._events, []
            committed, self._committed = self._committed, []
            self._sealed_steps = 0
            self._committing = True
            self._commits_begun += 1
            self._progressed.set()
            cancels = await self._lease.commit(events)
            self._committing = False
            self._commits_done += 1
            self._progressed.set()
            if committed:
                now = time.monotonic()
                for call in committed:
                    call(now)
            if cancels:
                self._on_cancel(cancels)

    async def _change(self) -> None:
        self._progressed.clear()
        await self._progressed.wait()
