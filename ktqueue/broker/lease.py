"""A worker's lease: the time-limited right to run jobs. How a job survives the death of its worker:

1. A worker registers under a new id and gets a lease, which it renews four times per lease time.
2. It claims jobs. Redis notes under the worker's id which jobs it runs.
3. After each step, one `commit` appends the new events to the journals of all its jobs.
4. If the worker dies, nobody renews the lease, and it expires by the clock of Redis.
5. Then the reaper of any other worker or gateway puts the jobs back at their old places in the queue.
6. Another worker claims a job together with its journal, and its engine continues after the last journaled token.
7. The worker's id is a fencing token: every call carries it, and the scripts refuse it once the lease has expired. So
   a worker that was only slow cannot write to a job that now belongs to another worker.
8. A worker that has lost its lease drops its jobs and registers under a new id.
"""

import asyncio
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ktqueue.broker.job_record import MICROSECONDS
from ktqueue.broker.models import process_name
from ktqueue.broker.redis.hub import Mailbox
from ktqueue.broker.scripts import ScriptRefused
from ktqueue.broker.terminal_events import TerminalEvents, microseconds, milliseconds
from ktqueue.core import codec
from ktqueue.core.codec import (
    CodecError,
    NewerFormat,
    decode_event,
    decode_request,
    dumps,
    encode_card,
    encode_card_more,
    encode_event,
    loads,
)
from ktqueue.core.errors import JournalRegressed, KtqueueError, LeaseLost, Unavailable
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest, JobClass
from ktqueue.core.tenants import NOBODY, Owner

if TYPE_CHECKING:
    from ktqueue.broker.broker import Broker

OUTAGE_LEASES = 30  # lease times that a worker waits for Redis; the scripts extend no lease for longer
MAX_EVENTS = 1_000  # in one script call, and decoded without a pause; a longer commit is split
PROMPT_WAKE_UP = b"prompt"  # the message of `submit_job.lua` about a job that takes no row
NEWCOMER_WAKE_UP = b"newcomer"  # about an interactive job of a caller that had none waiting
MAILBOX_BYTES = 1 << 17  # for a job that `submit` hands over, and for wake-ups

DecodeEvent = Callable[[int, bytes], TokenEvent]  # of a seq and the stored event


NO_ROWS: Mapping[Owner, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A job to run. events: its journal so far; continue at the next seq. deadline: in seconds of `time.monotonic()`.

    deaths_without_progress: number of workers in a row that died without adding a token; see `start_trial`. rank: order
    of the jobs of a class, the lowest first: the arrival in Unix seconds plus the priority's offset. waited: seconds
    from the arrival to the first claim, by the server's clock. owner: not known of a job that an older gateway handed
    over.
    """

    job_id: str
    request: GenerationRequest
    attempt: int
    deaths_without_progress: int
    events: list[TokenEvent]
    deadline: float | None
    rank: float
    waited: float = 0.0
    owner: Owner = NOBODY


class Lease:
    """A worker's lease on its jobs, made by `register`.

    Calls may overlap. Each may raise LeaseLost, and after that all calls fail.
    """

    def __init__(
        self, broker: "Broker", lease_id: str, card: ModelCard, mailbox: Mailbox, decode: DecodeEvent = decode_event
    ) -> None:
        self.id = lease_id
        self.card = card
        self._broker = broker
        self.mailbox = mailbox  # wake-ups of the model, and jobs that are handed to this worker
        self._decode = decode
        self._terminal = TerminalEvents.of(broker.config)
        self._lease = microseconds(broker.config.lease_seconds)
        self._patience = OUTAGE_LEASES * broker.config.lease_seconds
        self._claim_number = 0  # number of the last claim
        self._answered = True  # the last claim returned jobs, so the next one gets a new number
        self._steps = self._acknowledged_steps = 0
        self._look_again_at: float | None = None  # time of the next claim: until then a job is left to another worker
        self._pending_stops: set[str] = set()  # ids of jobs to stop that the next commit returns
        self.followed: frozenset[str] = frozenset()  # ids of jobs whose last event here had a live reader
        self._claiming = asyncio.Lock()
        self._stepping = asyncio.Lock()

    @classmethod
    async def register(
        cls, broker: "Broker", card: ModelCard, *, process: str | None = None, decode: DecodeEvent = decode_event
    ) -> "Lease":
        """Register as a worker of the model under a new id. Raises Unavailable, or ScriptRefused if keys are damaged.

        `process`: the name of the process whose death ends the lease; by default this process. See `process_name`.
        `decode` reads the events of journals.
        """
        host = socket.gethostname()
        name = re.sub(r"[^A-Za-z0-9.-]", "-", host)[:64]
        lease_id = f"{name}-{os.getpid()}-{secrets.token_hex(4)}"
        mailbox = await broker.hub.subscribe(
            broker.keys.wake_channel(card.name),
            broker.keys.worker_channel(lease_id),
            max_bytes=MAILBOX_BYTES,
            seconds=broker.config.operation_timeout,
        )
        lease = cls(broker, lease_id, card, mailbox, decode)
        try:
            await broker.scripts.call(
                "register_worker",
                lease_id,
                lease._lease,
                card.name,
                encode_card(card),
                dumps({"host": host, "process": process or process_name(os.getpid())}),
                milliseconds(broker.config.model_ttl),
                encode_card_more(card),
                card.digest,
                codec.VERSION,
                "1",
            )
        except BaseException:
            await broker.hub.unsubscribe(mailbox)
            raise
        return lease

    async def beat(self, stats: Mapping[str, float]) -> None:
        """Renew the lease and publish the worker's statistics. Call it every quarter of the lease time."""
        ttl = milliseconds(self._broker.config.model_ttl)
        await self._call("renew_lease", dumps(dict(stats)), ttl, self._acknowledged_steps)

    async def claim(
        self,
        limit: int,
        interactive_limit: int = 0,
        *,
        wait: bool = False,
        extra: int = 0,
        rows: Mapping[Owner, int] = NO_ROWS,
    ) -> list[Claim]:
        """Claim waiting jobs of the model for `limit` free rows. A job takes a row for each choice.

        A job that wants only its prompt takes none, so it is claimed even if no row is free.

        Interactive jobs may fill `interactive_limit` rows if that is more; the engine takes these rows from running
        batch jobs.

        If no row is left, one interactive job may take up to `extra` rows more, if its owner has fewer rows here than
        another, whose jobs then lose them. `rows`: those of the owners of interactive jobs.

        With `wait`, if there is no job, a job may be handed to this lease as soon as it is submitted. `wait_for_work`
        or the next claim returns it, whatever the limits. The caller's free rows must not decrease until then.

        A job that a newer version wrote goes back to the queue for workers of that version and does not count as an
        attempt. A damaged job fails alone. If a claim fails half-way, the next claim returns the jobs it took.
        """
        config, terminal = self._broker.config, self._terminal
        async with self._claiming:
            if self._answered:
                self._claim_number += 1
                self._answered = False
            jobs, again = await self._call(
                "claim_jobs",
                self._claim_number,
                limit,
                max(limit, interactive_limit),
                config.batch_share,
                terminal.expired,
                terminal.job_ttl,
                terminal.journal_ttl,
                "1" if wait else "",
                extra,
                *(word for owner, count in rows.items() for word in (owner.tenant, owner.caller, count)),
            )
            self._look_again_at = None if again == 0 else time.monotonic() + again / MICROSECONDS
            claims = await self._readable(jobs)
            self._answered = bool(jobs)
        return claims

    async def _readable(self, jobs: Iterable[Sequence[Any]]) -> list[Claim]:
        claims: list[Claim] = []
        unreadable: list[tuple[str, TokenEvent]] = []
        newer: list[str | int] = []
        for place, job in enumerate(jobs):
            job_id, request, attempt, deaths_without_progress, left, rank, entries, waited, owner = job
            if place:
                await asyncio.sleep(0)  # lets a due renewal run
            try:
                decoded = decode_request(request)
                seconds = decoded.expires_in if left is None else left / MICROSECONDS
                claims.append(
                    Claim(
                        job_id=job_id.decode(),
                        request=decoded,
                        attempt=attempt,
                        deaths_without_progress=deaths_without_progress,
                        events=await _decoded(entries, decoded.sampling.n, self._decode),
                        deadline=None if seconds is None else time.monotonic() + seconds,
                        rank=int(rank) / MICROSECONDS,
                        waited=waited / MICROSECONDS,
                        owner=_owner(owner),
                    )
                )
            except NewerFormat as fault:
                newer += (job_id.decode(), int(fault.value or 0))
            except KtqueueError as fault:
                tail = _seq(entries[-1][0]) if entries else 0
                last = TokenEvent(seq=tail + 1, state=JobState.FAILED, error=fault.info())
                unreadable.append((job_id.decode(), last))
        if unreadable:
            self._pending_stops |= await self.commit(unreadable)
        if newer:
            await self._requeue_unreadable(newer)
        return claims

    async def _requeue_unreadable(self, newer: Sequence[str | int]) -> None:
        """Hand jobs back for workers that can read their format. `newer`: job ids, each followed by its format."""
        terminal = self._terminal
        await self._call(
            "requeue_unreadable", terminal.cancelled, terminal.expired, terminal.job_ttl, terminal.journal_ttl, *newer
        )

    async def commit(self, events: Sequence[tuple[str, TokenEvent]]) -> set[str]:
        """Append a step's events to the journals, in order of seq for each job. An event with a state ends its job.

        Returns the ids of jobs to stop: they were cancelled, have expired, or belong to another worker. Events of a job
        that has ended are dropped, and its id is returned too.
        """
        async with self._stepping:
            stop, self._pending_stops = self._pending_stops, set()
            for start in range(0, max(len(events), 1), MAX_EVENTS):
                self._steps += 1
                part = events[start : start + MAX_EVENTS]
                arguments: list[bytes | str | int] = []
                for job_id, event in part:
                    arguments += (job_id, event.seq, encode_event(event), _end(event))
                stopped, followed = await self._call(
                    "commit_events", self._steps, self._terminal.job_ttl, self._terminal.journal_ttl, *arguments
                )
                self._acknowledged_steps = self._steps
                stop.update(job_id.decode() for job_id in stopped)
                gone = stop.union(job_id for job_id, _ in part)
                self.followed = self.followed - gone | {job_id.decode() for job_id in followed}
        return stop

    async def start_trial(self, job_id: str) -> None:
        """Announce the start of a job that may have killed its workers. Only one job may be on trial.

        Until the job has a new token, a death of this worker counts for this job and for no other.
        """
        await self._call("start_trial", job_id)

    async def release(self, job_ids: Iterable[str]) -> None:
        """Put running jobs back at their old place in the queue. This does not count as an attempt."""
        ids = tuple(job_ids)
        self.followed -= set(ids)
        await self._release("", ids)

    async def close(self) -> None:
        """End the lease: running jobs go back to the queue. If the lease is lost already, the reaper does this."""
        try:
            await self._release("1", ())
        except (LeaseLost, Unavailable):
            pass
        finally:
            await self._broker.hub.unsubscribe(self.mailbox)

    async def wait_for_work(
        self,
        timeout: float,  # noqa: ASYNC109
        *,
        interactive_only: bool = False,
        prompt_only: bool = False,
    ) -> list[Claim]:
        """Return when a job was queued, or after `timeout` seconds.

        With `interactive_only` it must be interactive. With `prompt_only` it must be a job without rows, or an
        interactive job of a caller that had none waiting.

        It returns within 20 ms if the last claim left a job to a worker that has its prefix cached. The result is the
        job that was handed to this lease, if the last claim had `wait`. If it is empty, claim again.
        """
        wanted = {PROMPT_WAKE_UP, NEWCOMER_WAKE_UP if prompt_only else JobClass.INTERACTIVE.encode()}
        end = time.monotonic() + timeout
        if self._look_again_at is not None:
            end = min(end, self._look_again_at)
        while (left := end - time.monotonic()) > 0:
            mail = await self.mailbox.take(left)
            for message in mail.messages:
                if (job := self._job_from_message(message)) is not None:
                    claims = await self._readable([job])
                    self._answered = True
                    return claims
            if mail.missed or not wanted.isdisjoint(mail.messages) or not (interactive_only or prompt_only):
                break
        return []

    def _job_from_message(self, message: bytes) -> Sequence[Any] | None:
        """The job that `submit` handed to the last claim; None for a wake-up, or if a claim returned it already."""
        head, line, request = message.partition(b"\n")
        number, *words = head.split(b" ", 4)
        if not line or number != b"%d" % self._claim_number or self._answered or len(words) < 3:
            return None
        job_id, _, rank, *owner = words
        return job_id, request, 1, 0, None, rank, (), 0, b"".join(owner)

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
            raise LeaseLost(f"the lease of {self.id} has expired: {error}") from error
        except ScriptRefused as refused:  # a gap in a journal: the server has lost acknowledged events
            raise LeaseLost(f"the journal in Redis does not match: {refused}") from refused


async def _decoded(entries: Sequence[Any], choices: int, decode: DecodeEvent) -> list[TokenEvent]:
    """Decode a journal's entries, with pauses for a renewal: many long journals take longer than a lease.

    Raises CodecError, also for an event of a choice that the job does not have, or JournalRegressed.
    """
    events: list[TokenEvent] = []
    for start in range(0, len(entries), MAX_EVENTS):
        if start:
            await asyncio.sleep(0)
        events += [decode(_seq(key), fields[1]) for key, fields in entries[start : start + MAX_EVENTS]]
    for event in events:
        if not 0 <= event.index < choices:
            raise CodecError(f"the journal has an event of choice {event.index}, of {choices}", value=event.index)
    if events and events[0].seq != 1:
        raise JournalRegressed(
            "the beginning of the job's journal is lost, so the job cannot be continued", value=events[0].seq
        )
    return events


def _owner(data: bytes) -> Owner:
    """Read `["tenant", "caller", weight]`; empty from an older gateway."""
    return Owner(*loads(data)) if data else NOBODY


def _seq(key: bytes) -> int:
    return int(key.split(b"-")[0])


def _end(event: TokenEvent) -> str:
    """A job's end for the script: its state, the tokens that it used, and `final` if a retry would fail too.

    For example "done 42" or "failed 42 final". Empty for an event that does not end the job.
    """
    if event.state is None:
        return ""
    used = "" if event.usage is None else event.usage.prompt_tokens + event.usage.completion_tokens
    final = event.state is JobState.FAILED and event.error is not None and event.error.status < 500
    return f"{event.state.value} {used} {'final' if final else ''}".rstrip()
