"""Reads journals: replays the events that exist and follows new ones. Knows nothing of the writers.

A journal is the list of a job's events, numbered from 1 without gaps, and it only grows. The worker's commit appends
events and publishes them on the job's channel. A reader subscribes first, then reads the journal, then takes events
from the channel. Whenever a number is missing, a message may be lost or the channel is quiet, it reads the journal
again. So it sees each event once and in order, whatever happens to connections. A new worker continues the numbers
where the dead one stopped, and the reader notices nothing.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace

from ktqueue.broker.job_ends import LOOKED_UP, JobEnds
from ktqueue.broker.job_record import job_not_found
from ktqueue.broker.keys import Keys
from ktqueue.broker.redis.hub import Hub
from ktqueue.broker.scripts import Scripts
from ktqueue.core.codec import NewerFormat, decode_event
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import InvalidRequest, JobNotFound, JournalRegressed, Unavailable
from ktqueue.core.events import JobState, TokenEvent

PAGE = 1_000  # entries read at once, unless they have more bytes than a mailbox may hold
QUIET_SECONDS, LONGEST_QUIET = 1.0, 8.0  # a reader without messages reads the journal, at growing intervals
OUTAGE_SECONDS = 60.0  # how long a reader waits for Redis
OUTAGE_PAUSE = 0.25  # seconds between attempts


@dataclass(frozen=True, slots=True)
class _Page:
    """Events after a seq, the seq of the journal's last event, and whether the job has ended."""

    events: list[TokenEvent]
    tail: int
    ended: bool


class Journal:
    """The journals of all jobs."""

    def __init__(self, scripts: Scripts, hub: Hub, keys: Keys, config: BrokerConfig, max_mailbox_bytes: int) -> None:
        self._scripts = scripts
        self._hub = hub
        self._keys = keys
        self._config = config
        self._ends = JobEnds(scripts, hub, keys, config)
        self._max_mailbox_bytes = max_mailbox_bytes

    async def replay(self, job_id: str, after: int = 0, *, lenient: bool = False) -> list[TokenEvent]:
        """The events after seq `after` that exist now. `lenient` as in `follow`.

        Raises JobNotFound, Unavailable, or JournalRegressed if the journal ends before `after`.
        """
        events: list[TokenEvent] = []
        while True:
            last = events[-1].seq if events else after
            page = await self._page(job_id, last, self._max_mailbox_bytes, lenient)
            events += page.events
            if not page.events or page.events[-1].seq == page.tail:
                return events

    async def close(self) -> None:
        """Stop. Nobody may read any more."""
        await self._ends.close()

    async def whole(self, job_id: str) -> list[TokenEvent]:
        """Wait for the end of a job, and return all its events. It costs Redis far less than `follow`.

        Raises Unavailable after a minute without Redis, JobNotFound, or JournalRegressed if the end is lost.
        """
        await self._ends.wait(job_id)
        events: list[TokenEvent] = []
        while not events or events[-1].state is None:
            last = events[-1] if events else None
            after = last.seq if last else 0
            page = await self._page_after_outage(job_id, after, last, self._max_mailbox_bytes, lenient=False)
            if not page.events:
                raise JournalRegressed(f"the journal of job {job_id} has no end", limit=page.tail, value=after)
            events += page.events
        return events

    async def lengths(self, job_ids: Sequence[str]) -> list[int]:
        """How many events each of these jobs has so far: about one for each token. Raises Unavailable."""
        found: list[int] = []
        for start in range(0, len(job_ids), LOOKED_UP):
            found += await self._scripts.call("count_events", *job_ids[start : start + LOOKED_UP])
        return found

    async def follow(
        self, job_id: str, after: int = 0, *, journals: int = 1, lenient: bool = False
    ) -> AsyncGenerator[TokenEvent, None]:
        """Yield the events after seq `after`, each once and in order, up to the one that ends the job.

        A reader needs at most three times the bytes of a mailbox: messages that wait, messages that it took, and a page
        of the journal. A caller that follows several `journals` at once shares these bytes among them.

        An event that a newer version wrote raises NewerFormat; with `lenient` it has only its seq and `format`. Close
        the generator to unsubscribe. Reconnects are invisible; Unavailable is raised after a minute without Redis.
        Raises JobNotFound; JournalRegressed if the journal ends before `after`, or no longer has the event that was
        yielded last, because a failover lost it.
        """
        room = self._max_mailbox_bytes // journals
        mailbox = await self._hub.subscribe(
            self._keys.journal_channel(job_id), max_bytes=room, seconds=self._config.operation_timeout
        )
        last = after
        previous: TokenEvent | None = None
        must_read, quiet_seconds = True, QUIET_SECONDS
        try:
            while True:
                while must_read:
                    page = await self._page_after_outage(job_id, last, previous, room, lenient)
                    for event in page.events:
                        last, previous = event.seq, event
                        yield event
                        if event.state is not None:
                            return
                    if page.ended and last == page.tail:  # the reader has seen the end already
                        return
                    must_read = bool(page.events) and last < page.tail
                mail = await mailbox.take(quiet_seconds)
                quiet_seconds = QUIET_SECONDS if mail.messages else min(quiet_seconds * 2, LONGEST_QUIET)
                must_read = mail.missed or not mail.messages
                for message in mail.messages:
                    head, _, body = message.partition(b":")
                    seq = int(head) if head.isdigit() else 0  # 0: not an event of ours
                    if seq <= last:
                        continue
                    if seq > last + 1:
                        must_read = True
                        break
                    last, previous = seq, _decoded(seq, body, lenient)
                    yield previous
                    if previous.state is not None:
                        return
                    must_read = must_read or previous.format is not None  # it may be the end, which the record shows
        finally:
            await self._hub.unsubscribe(mailbox)

    async def _page_after_outage(
        self, job_id: str, after: int, previous: TokenEvent | None, room: int, lenient: bool
    ) -> _Page:
        """The events after a seq. If `previous` is the event at that seq, it must still be in the journal."""
        loop = asyncio.get_running_loop()
        end = loop.time() + OUTAGE_SECONDS
        while True:
            try:
                if previous is None:
                    return await self._page(job_id, after, room, lenient)
                page = await self._page(job_id, after - 1, room, lenient)
                if page.events[:1] != [previous]:
                    raise JournalRegressed(
                        f"the journal of job {job_id} no longer has the event that was read at {after}",
                        limit=page.tail,
                        value=after,
                    )
                return replace(page, events=page.events[1:])
            except Unavailable:
                if loop.time() > end:
                    raise
            await asyncio.sleep(OUTAGE_PAUSE)

    async def _page(self, job_id: str, after: int, room: int, lenient: bool) -> _Page:
        if after < 0:
            raise InvalidRequest.must_be("after", "0 or the number of an event", after, limit=0)
        state, tail, entries = await self._scripts.call("read_journal", job_id, after, PAGE, room)
        if state is None and tail == 0:
            raise job_not_found(job_id)
        ended = state is not None and JobState(state.decode()).terminal
        if ended and tail == 0:
            raise JobNotFound(f"the journal of job {job_id} has expired", param="job_id")
        if after > tail:
            raise JournalRegressed(
                f"the journal of job {job_id} ends at {tail}, before {after}", limit=tail, value=after
            )
        first = int(entries[0][0].split(b"-")[0]) if entries else after + 1
        if first > after + 1:
            raise JournalRegressed(
                f"the journal of job {job_id} begins at {first}: earlier events are lost", limit=first, value=after + 1
            )
        return _Page([_decoded(int(key.split(b"-")[0]), fields[1], lenient) for key, fields in entries], tail, ended)


def _decoded(seq: int, data: bytes, lenient: bool) -> TokenEvent:
    try:
        return decode_event(seq, data)
    except NewerFormat as fault:
        if not lenient:
            raise
        return TokenEvent(seq=seq, format=int(fault.value or 0))
