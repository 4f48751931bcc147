"""A Feed reads the journals of one HTTP response ahead into a bounded buffer.

It is what makes waiting possible: for events, for a heartbeat's time, for the client to leave and for
the gateway to stop, all in one `take`. A slow client fills the buffer, and then the journal's own
mailbox, which falls back to replay: nothing grows. Knows no HTTP.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from ktqueue.broker.journal import Journal
from ktqueue.broker.redis.wake_up import Bell
from ktqueue.core.errors import KtqueueError, Unavailable
from ktqueue.core.events import TokenEvent

logger = logging.getLogger(__name__)

BUFFERED_EVENTS = 256
Batch = list[tuple[int, TokenEvent]]


class Feed:
    """Events of one or more jobs as they come: (place of the job, event), each job's in order.

    `lenient`: as in Journal.follow.
    """

    def __init__(self, journal: Journal, job_ids: Sequence[str], *, after: int = 0, lenient: bool = False) -> None:
        self._journal = journal
        self._lenient = lenient
        self._events: deque[tuple[int, TokenEvent]] = deque()
        self._wake = Bell()
        self._room = asyncio.Event()
        self._interruption: KtqueueError | None = None
        self._fault: KtqueueError | None = None
        self._journals = self._running = len(job_ids)
        self._pumps = [
            asyncio.create_task(self._pump(place, job_id, after), name=f"feed {job_id}")
            for place, job_id in enumerate(job_ids)
        ]

    @property
    def ended(self) -> bool:
        """Every journal was read to its end, and everything read was taken."""
        return self._running == 0 and not self._events and self._fault is None

    def interrupt(self, error: KtqueueError) -> None:
        """Let the next `take`, also one that waits, raise `error` (the first one wins)."""
        self._interruption = self._interruption or error
        self._wake.ring()

    async def take(self, timeout_seconds: float) -> Batch:
        """All events that wait, oldest first; nothing if none came in time or all journals have ended.

        Raises what `interrupt` was given, at once; and what a journal raised, after its last event.
        """
        if not self._events and self._interruption is None and self._fault is None and self._running:
            self._wake.clear()
            if not await self._wake.wait(timeout_seconds):
                return []
        if self._interruption is not None:
            raise self._interruption
        if self._events:
            batch = list(self._events)
            self._events.clear()
            self._room.set()
            return batch
        if self._fault is not None:
            raise self._fault
        return []

    async def close(self) -> None:
        """Stop reading."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def _events_of(self, job_id: str, after: int) -> AsyncGenerator[TokenEvent, None]:
        return self._journal.follow(job_id, after, journals=self._journals, lenient=self._lenient)

    async def _pump(self, place: int, job_id: str, after: int) -> None:
        try:
            async with aclosing(self._events_of(job_id, after)) as events:
                async for event in events:
                    while len(self._events) >= BUFFERED_EVENTS:
                        self._room.clear()
                        await self._room.wait()
                    self._events.append((place, event))
                    self._wake.ring()
        except KtqueueError as error:
            self._fault = self._fault or error
        except Exception:
            logger.exception("the journal of job %s cannot be read", job_id)
            self._fault = self._fault or Unavailable("the job's journal cannot be read")
        finally:
            self._running -= 1
            self._wake.ring()
