"""Reading journals: replay what is there, follow what comes. Knows nothing of who writes them."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from ktqueue.broker.keys import Keys
from ktqueue.broker.redis.hub import Hub
from ktqueue.broker.scripts import Scripts
from ktqueue.core.codec import NewerFormat, decode_event
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import JobNotFound, JournalRegressed, Unavailable
from ktqueue.core.events import JobState, TokenEvent

PAGE = 1_000  # entries read at once, if they have no more bytes than a mailbox may hold
QUIET_SECONDS, LONGEST_QUIET = 1.0, 8.0  # a reader that hears nothing looks at the journal, ever less often
OUTAGE_SECONDS = 60.0  # how long a reader waits for Redis to come back
OUTAGE_PAUSE = 0.25  # seconds between its tries


@dataclass(frozen=True, slots=True)
class _Page:
    """Entries after a seq; the seq of the last entry there is; has the job ended."""

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
        self._max_mailbox_bytes = max_mailbox_bytes

    async def replay(self, job_id: str, after: int = 0, *, lenient: bool = False) -> list[TokenEvent]:
        """The events after seq `after` that are there now; `lenient` as in `follow`.

        Raises JobNotFound; JournalRegressed when `after` is more than there is; Unavailable.
        """
        events: list[TokenEvent] = []
        while True:
            last = events[-1].seq if events else after
            page = await self._page(job_id, last, self._max_mailbox_bytes, lenient)
            events += page.events
            if not page.events or page.events[-1].seq == page.tail:
                return events

    async def follow(
        self, job_id: str, after: int = 0, *, journals: int = 1, lenient: bool = False
    ) -> AsyncGenerator[TokenEvent, None]:
        """The events after seq `after`, each once and in order, as they come, up to the one that has a state.

        A reader holds at most three mailboxes' bytes: what waits for it, what it took from there, and a page of the
        journal. One who follows several `journals` at once has these for them all.
        An event that a newer version wrote raises NewerFormat; with `lenient` it comes with its seq and `format` alone.
        Close the generator to unsubscribe. Survives reconnects; Unavailable only when Redis stays away for a minute.
        Raises JobNotFound; JournalRegressed when `after` is more than there is, or when the journal no longer holds
        the event that was told last: a failover lost it, and perhaps another one has its place by now.
        """
        room = self._max_mailbox_bytes // journals
        mailbox = await self._hub.subscribe(
            self._keys.journal_channel(job_id), max_bytes=room, seconds=self._config.operation_timeout
        )
        last = after
        told: TokenEvent | None = None
        look, quiet = True, QUIET_SECONDS
        try:
            while True:
                while look:
                    page = await self._page_after_outage(job_id, last, told, room, lenient)
                    for event in page.events:
                        last, told = event.seq, event
                        yield event
                        if event.state is not None:
                            return
                    if page.ended and last == page.tail:  # the reader has seen the end before
                        return
                    look = bool(page.events) and last < page.tail
                mail = await mailbox.take(quiet)
                quiet = QUIET_SECONDS if mail.messages else min(quiet * 2, LONGEST_QUIET)
                look = mail.missed or not mail.messages
                for message in mail.messages:
                    head, _, body = message.partition(b":")
                    seq = int(head)
                    if seq <= last:
                        continue
                    if seq > last + 1:
                        look = True
                        break
                    last, told = seq, _decoded(seq, body, lenient)
                    yield told
                    if told.state is not None:
                        return
                    look = look or told.format is not None  # perhaps it was the end: the record knows
        finally:
            await self._hub.unsubscribe(mailbox)

    async def _page_after_outage(
        self, job_id: str, after: int, told: TokenEvent | None, room: int, lenient: bool
    ) -> _Page:
        """The entries after a seq; where that was `told`, it must still be there."""
        loop = asyncio.get_running_loop()
        end = loop.time() + OUTAGE_SECONDS
        while True:
            try:
                if told is None:
                    return await self._page(job_id, after, room, lenient)
                page = await self._page(job_id, after - 1, room, lenient)
                if page.events[:1] != [told]:
                    raise JournalRegressed(
                        f"the journal of job {job_id} no longer holds what was read at {after}",
                        limit=page.tail,
                        value=after,
                    )
                return replace(page, events=page.events[1:])
            except Unavailable:
                if loop.time() > end:
                    raise
            await asyncio.sleep(OUTAGE_PAUSE)

    async def _page(self, job_id: str, after: int, room: int, lenient: bool) -> _Page:
        state, tail, entries = await self._scripts.call("read_journal", job_id, after, PAGE, room)
        if state is None and tail == 0:
            raise JobNotFound(f"no job {job_id[:80]!r}: never submitted, or its record has expired", param="job_id")
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
                f"the journal of job {job_id} begins at {first}: the events before are lost",
                limit=first,
                value=after + 1,
            )
        return _Page([_decoded(int(key.split(b"-")[0]), fields[1], lenient) for key, fields in entries], tail, ended)


def _decoded(seq: int, data: bytes, lenient: bool) -> TokenEvent:
    try:
        return decode_event(seq, data)
    except NewerFormat as fault:
        if not lenient:
            raise
        return TokenEvent(seq=seq, format=int(fault.value or 0))
