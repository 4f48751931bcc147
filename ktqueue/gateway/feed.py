"""A Feed reads the journals of one HTTP response ahead, into a bounded buffer. It knows no HTTP.

One `take` waits for all that can happen: events, the heartbeat's time, the client's leaving, the gateway's stop. If the
client reads slowly, the buffer fills and then the journal's mailbox, which falls back to replay. Neither grows further.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import aclosing

from ktqueue.broker.journal import Journal
from ktqueue.broker.redis.wake_up import WakeUp
from ktqueue.core.errors import KtqueueError, Unavailable
from ktqueue.core.events import TokenEvent

logger = logging.getLogger(__name__)

BUFFERED_EVENTS = 256
Batch = list[tuple[int, TokenEvent]]  # (place of the job in the request, event)


class Feed:
    """Events of one or more jobs as they arrive, those of each job in order.

    `lenient`: as in Journal.follow.
    """

    def __init__(self, journal: Journal, job_ids: Sequence[str], *, after: int = 0, lenient: bool = False) -> None:
        self._journal = journal
        self._lenient = lenient
        self.buffered: deque[tuple[int, TokenEvent]] = deque()  # read and not taken yet, at most BUFFERED_EVENTS
        self._wake = WakeUp()
        self._has_room = asyncio.Event()
        self._interruption: KtqueueError | None = None
        self._fault: KtqueueError | None = None
        self._journals = self._open_journals = len(job_ids)
        self._pumps = [
            asyncio.create_task(self._pump(place, job_id, after), name=f"feed {job_id}")
            for place, job_id in enumerate(job_ids)
        ]

    @property
    def ended(self) -> bool:
        """Whether every journal was read to its end and all events were taken."""
        return self._open_journals == 0 and not self.buffered and self._fault is None

    def interrupt(self, error: KtqueueError) -> None:
        """Make the current or next `take` raise `error`. The first error wins."""
        self._interruption = self._interruption or error
        self._wake.set()

    async def take(self, timeout_seconds: float) -> Batch:
        """All buffered events, oldest first. Empty if none arrived in time or all journals have ended.

        Raises the error given to `interrupt` at once, and the error of a journal after its last event.
        """
        if not self.buffered and self._interruption is None and self._fault is None and self._open_journals:
            self._wake.clear()
            if not await self._wake.wait(timeout_seconds):
                return []
        if self._interruption is not None:
            raise self._interruption
        if self.buffered:
            batch = list(self.buffered)
            self.buffered.clear()
            self._has_room.set()
            return batch
        if self._fault is not None:
            raise self._fault
        return []

    async def close(self) -> None:
        """Stop reading."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _pump(self, place: int, job_id: str, after: int) -> None:
        try:
            following = self._journal.follow(job_id, after, journals=self._journals, lenient=self._lenient)
            async with aclosing(following) as events:
                async for event in events:
                    while len(self.buffered) >= BUFFERED_EVENTS:
                        self._has_room.clear()
                        await self._has_room.wait()
                    self.buffered.append((place, event))
                    self._wake.set()
        except KtqueueError as error:
            self._fault = self._fault or error
        except Exception:
            logger.exception("cannot read the journal of job %s", job_id)
            self._fault = self._fault or Unavailable("the job's journal cannot be read")
        finally:
            self._open_journals -= 1
            self._wake.set()
