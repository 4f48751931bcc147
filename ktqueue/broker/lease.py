"""One incarnation of a worker: its right to run jobs, and what it may do under that right.

The lease's id is the fencing token: every call that changes a job carries it, and the scripts refuse it once the
lease has lapsed by the server's clock. A worker that has lost its lease drops its jobs and registers anew.
"""

import asyncio
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ktqueue.broker.job_record import MICROSECONDS
from ktqueue.broker.process_name import process_name
from ktqueue.broker.redis.hub import Mailbox
from ktqueue.broker.scripts import Refused
from ktqueue.broker.terminal_events import Terminal, microseconds, milliseconds
from ktqueue.core import codec
from ktqueue.core.codec import (
    NewerFormat,
    decode_event,
    decode_request,
    dumps,
    encode_card,
    encode_card_more,
    encode_event,
)
from ktqueue.core.errors import JournalRegressed, KtqueueError, LeaseLost, Unavailable
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest, JobClass

if TYPE_CHECKING:
    from ktqueue.broker.broker import Broker

OUTAGE_LEASES = 30  # a worker waits so many lease times for Redis to come back; the scripts bridge no longer gap
MAX_EVENTS = 1_000  # in one script call, and decoded in one go; a longer commit is several
MAILBOX_BYTES = 1 << 17  # a request that is handed over, and wake-ups


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A job to run. `events` is its journal so far: go on at the next seq. `deadline` in Unix seconds.

    `futile`: so many workers in a row died over it before it had a token more; see `try_out`.
    `rank` orders the jobs of a class, the lowest first: the arrival in Unix seconds, shifted by the priority.
    """

    job_id: str
    request: GenerationRequest
    attempt: int
    futile: int
    events: list[TokenEvent]
    deadline: float | None
    rank: float


class Lease:
    """Made by `register`. Calls may overlap; every one raises LeaseLost, after which none succeeds."""

    def __init__(self, broker: "Broker", lease_id: str, card: ModelCard, mailbox: Mailbox) -> None:
        self.id = lease_id
        self.card = card
        self._broker = broker
        self._mailbox = mailbox
        self._terminal = Terminal.of(broker.config)
        self._lease = microseconds(broker.config.lease_seconds)
        self._patience = OUTAGE_LEASES * broker.config.lease_seconds
        self._claim = 0  # the number of the last one
        self._answered = True  # it gave jobs: the next one has a new number
        self._steps = 0
        self._look_again: float | None = None  # when a job that was left to another worker is anybody's
        self._untold: set[str] = set()  # jobs to stop that the next commit tells of
        self._claiming = asyncio.Lock()
        self._stepping = asyncio.Lock()

    @classmethod
    async def register(cls, broker: "Broker", card: ModelCard) -> "Lease":
        """Become a worker of the model under a new identity. Raises Unavailable."""
        host = socket.gethostname()
        name = re.sub(r"[^A-Za-z0-9.-]", "-", host)[:64]
        lease_id = f"{name}-{os.getpid()}-{secrets.token_hex(4)}"
        mailbox = await broker.hub.subscribe(
            broker.keys.wake_channel(card.name),
            broker.keys.worker_channel(lease_id),
            max_bytes=MAILBOX_BYTES,
            seconds=broker.config.operation_timeout,
        )
        lease = cls(broker, lease_id, card, mailbox)
        try:
            await broker.scripts.call(
                "register_worker",
                lease_id,
                lease._lease,
                card.name,
                encode_card(card),
                dumps({"host": host, "process": process_name(os.getpid())}),
                milliseconds(broker.config.model_ttl),
                encode_card_more(card),
                card.digest,
                codec.VERSION,
            )
        except BaseException:
            await broker.hub.unsubscribe(mailbox)
            raise
        return lease

    async def beat(self, stats: Mapping[str, float]) -> None:
        """Renew the lease and tell the worker's statistics; call it every quarter of the lease time."""
        await self._call("renew_lease", dumps(dict(stats)), milliseconds(self._broker.config.model_ttl))

    async def claim(self, limit: int, interactive_limit: int = 0, *, wait: bool = False) -> list[Claim]:
        """Take waiting jobs of the model for `limit` free rows, a row for each choice.

        Interactive jobs may fill `interactive_limit` rows in all, where that is more: those that the engine then takes
        from batch jobs that run.

        `wait`: where there is none, this lease may be given one as soon as it is submitted; `wait_for_work` returns
        it, or the next claim, whatever its limits. The caller's free rows must not become fewer until then.

        A job whose record or journal a newer version wrote goes to workers of such a version, at no cost of a try; one
        that is no record at all fails here, alone. A claim that failed half-way may leave jobs with this lease, which
        the next one returns.
        """
        config, terminal = self._broker.config, self._terminal
        async with self._claiming:
            if self._answered:
                self._claim += 1
                self._answered = False
            jobs, again = await self._call(
                "claim_jobs",
                self._claim,
                limit,
                max(limit, interactive_limit),
                config.batch_share,
                terminal.expired,
                terminal.job_ttl,
                terminal.journal_ttl,
                "1" if wait else "",
            )
            self._look_again = None if again == 0 else time.monotonic() + again / MICROSECONDS
            claims = await self._readable(jobs)
            self._answered = bool(jobs)
        return claims

    async def _readable(self, jobs: Iterable[Sequence[Any]]) -> list[Claim]:
        claims: list[Claim] = []
        unreadable: list[tuple[str, TokenEvent]] = []
        newer: list[str | int] = []
        for place, (job_id, request, attempt, futile, deadline, rank, entries) in enumerate(jobs):
            if place:
                await asyncio.sleep(0)  # a beat may be due
            try:
                claims.append(
                    Claim(
                        job_id=job_id.decode(),
                        request=decode_request(request),
                        attempt=attempt,
                        futile=futile,
                        events=await _decoded(entries),
                        deadline=None if deadline is None else int(deadline) / MICROSECONDS,
                        rank=int(rank) / MICROSECONDS,
                    )
                )
            except NewerFormat as fault:
                newer += (job_id.decode(), int(fault.value or 0))
            except KtqueueError as fault:
                tail = _seq(entries[-1][0]) if entries else 0
                last = TokenEvent(seq=tail + 1, state=JobState.FAILED, error=fault.info())
                unreadable.append((job_id.decode(), last))
        if unreadable:
            self._untold |= await self.commit(unreadable)
        if newer:
            await self._put_aside(newer)
        return claims

    async def _put_aside(self, newer: Sequence[str | int]) -> None:
        """Leave jobs to workers that read their formats. `newer`: job ids, each with its format behind it."""
        terminal = self._terminal
        await self._call(
            "requeue_unreadable", terminal.cancelled, terminal.expired, terminal.job_ttl, terminal.journal_ttl, *newer
        )

    async def commit(self, events: Sequence[tuple[str, TokenEvent]]) -> set[str]:
        """Append a step's events to their journals; a job whose event has a state ends with it.

        Returns the ids of jobs to stop: cancelled, expired, or no longer this worker's. Events of a job that has
        ended are dropped, and its id is among the returned. The events of a job come in order of seq.
        """
        async with self._stepping:
            stop, self._untold = self._untold, set()
            for start in range(0, max(len(events), 1), MAX_EVENTS):
                self._steps += 1
                arguments: list[bytes | str | int] = []
                for job_id, event in events[start : start + MAX_EVENTS]:
                    arguments += (job_id, event.seq, encode_event(event), _end(event))
                reply = await self._call(
                    "commit_events", self._steps, self._terminal.job_ttl, self._terminal.journal_ttl, *arguments
                )
                stop.update(job_id.decode() for job_id in reply)
        return stop

    async def try_out(self, job_id: str) -> None:
        """Call it before anything is done for a suspect: until it has a token more, this worker's death is its fault,
        and of no other job here. One at a time."""
        await self._call("start_trial", job_id)

    async def release(self, job_ids: Iterable[str]) -> None:
        """Put running jobs back at their old place in the queue without using up a try."""
        await self._release("", tuple(job_ids))

    async def close(self) -> None:
        """Leave: jobs still running go back to the queue. A lease that is lost already is left to the reaper."""
        try:
            await self._release("1", ())
        except (LeaseLost, Unavailable):
            pass
        finally:
            await self._broker.hub.unsubscribe(self._mailbox)

    async def wait_for_work(
        self,
        timeout: float,  # noqa: ASYNC109
        *,
        interactive_only: bool = False,
    ) -> list[Claim]:
        """Return when a job (an interactive one) was queued since the last call, or after `timeout` seconds.

        Sooner where the last claim left a job to a worker that knows its prefix: for at most 20 ms. What it returns
        is the job that this lease was given, if its last claim said that it would wait; else claim again.
        """
        end = time.monotonic() + timeout
        if self._look_again is not None:
            end = min(end, self._look_again)
        while (left := end - time.monotonic()) > 0:
            mail = await self._mailbox.take(left)
            for message in mail.messages:
                if (job := self._handed(message)) is not None:
                    claims = await self._readable([job])
                    self._answered = True
                    return claims
            if mail.missed or JobClass.INTERACTIVE.encode() in mail.messages or not interactive_only:
                break
        return []

    def _handed(self, message: bytes) -> Sequence[Any] | None:
        """The job that `submit` gave to the last claim; None for a wake-up, and for what an earlier claim returned."""
        head, line, request = message.partition(b"\n")
        if not line:
            return None
        number, job_id, deadline, rank = head.split(b" ")
        if int(number) != self._claim or self._answered:
            return None
        return job_id, request, 1, 0, None if deadline == b"-" else deadline, rank, ()

    async def _release(self, leave: str, job_ids: tuple[str, ...]) -> None:
        terminal = self._terminal
        await self._call(
            "release_jobs",
            leave,
            terminal.cancelled,
            terminal.expired,
            terminal.job_ttl,
            terminal.journal_ttl,
            *job_ids,
            patience=self._broker.config.connect_timeout if leave else None,
        )

    async def _call(self, name: str, *arguments: bytes | str | int, patience: float | None = None) -> Any:
        try:
            return await self._broker.scripts.call(
                name, self.id, self._lease, *arguments, patience=self._patience if patience is None else patience
            )
        except Unavailable as error:
            raise LeaseLost(f"the lease of {self.id} has lapsed: {error}") from error
        except Refused as refused:  # a hole in a journal: the server has lost what it had acknowledged
            raise LeaseLost(f"the journal does not fit: {refused}") from refused


async def _decoded(entries: Sequence[Any]) -> list[TokenEvent]:
    """A journal's entries as events, with breaths: those of many long journals take longer than a lease. Raises
    CodecError, JournalRegressed."""
    events: list[TokenEvent] = []
    for start in range(0, len(entries), MAX_EVENTS):
        if start:
            await asyncio.sleep(0)
        events += [decode_event(_seq(key), fields[1]) for key, fields in entries[start : start + MAX_EVENTS]]
    if events and events[0].seq != 1:
        raise JournalRegressed(
            "the beginning of the job's journal is lost: nothing can go on from it", value=events[0].seq
        )
    return events


def _seq(key: bytes) -> int:
    return int(key.split(b"-")[0])


def _end(event: TokenEvent) -> str:
    """What the script needs to know of a job's end: its state, the tokens that it used, and whether it would fail
    again: "done 42", "failed 42 final"."""
    if event.state is None:
        return ""
    used = "" if event.usage is None else event.usage.prompt_tokens + event.usage.completion_tokens
    final = event.state is JobState.FAILED and event.error is not None and event.error.status < 500
    return f"{event.state.value} {used} {'final' if final else ''}".rstrip()
