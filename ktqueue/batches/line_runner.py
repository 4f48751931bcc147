"""Runs single lines of batches: a line's jobs are submitted and followed, and its record is made of their events.

Job ids are made from the name of the line's request, so that an interrupted run finds its jobs again instead of
computing them twice. This module knows neither where lines are read nor where records are written.
"""

import asyncio
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ktqueue.batches.concurrency import map_concurrently
from ktqueue.batches.input import BatchLine
from ktqueue.batches.line_jobs import LineJobs, failure_record, job_id
from ktqueue.broker.broker import Broker
from ktqueue.broker.jobs import JobRecord
from ktqueue.broker.models import find_card
from ktqueue.core.errors import (
    ErrorInfo,
    IdempotencyConflict,
    InvalidRequest,
    JobNotFound,
    JournalRegressed,
    KtqueueError,
    ModelChanged,
    ModelNotFound,
    QueueFull,
    RateLimitExceeded,
    RequestTooLarge,
    TenantLimitReached,
    Unavailable,
    VersionChanged,
)
from ktqueue.core.events import TokenEvent, Usage
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest, JobClass
from ktqueue.core.tenants import DEFAULT_TENANT, TenantLimits

FIRST_PAUSE = 0.2  # seconds; doubles up to LONGEST_PAUSE
LONGEST_PAUSE = 5.0
MAX_ATTEMPTS = 3  # of a job whose journal was lost
MAX_SUBMITTING = 16  # lines that try to submit a job at the same time, so that a full queue is not asked by all
KEPT_DELAYS = 10_000

JobHistory = tuple[float, list[TokenEvent]]  # when a job was created, in Unix seconds, and all its events


@dataclass(slots=True)
class Statistics:
    """Figures of a run. Times in seconds."""

    began: float = field(default_factory=time.monotonic)
    tokens: int = 0
    in_flight: int = 0
    away_since: float | None = None  # monotonic time since which Redis does not answer
    first_token: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_DELAYS))

    def count(self, events: list[TokenEvent]) -> None:
        """Count a job that has ended, with all its events."""
        self.tokens += sum(len(event.token_ids) for event in events)
        timings = events[-1].usage.timings if events[-1].usage else None
        if timings is not None:
            self.first_token.append(timings.queue + timings.tokenise + timings.prefill)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    def first_token_percentile(self, part: float) -> float | None:
        """The percentile `part`, from 0 to 1, of the times from submission to first token."""
        ordered = sorted(self.first_token)
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else None


@dataclass(frozen=True, slots=True)
class InFlight:
    """Lines in flight. tokens: of all answers so far. most_tokens: that one may have, in the mean; None: any number.

    running, waiting: their jobs that have tokens, and those that have none. held_by: what keeps workers from more rows.
    """

    tokens: int = 0
    most_tokens: float | None = None
    running: int = 0
    waiting: int = 0
    held_by: str = ""


@dataclass(frozen=True, slots=True)
class LineResult:
    """A line that has ended: its output record, and its tokens. `failure` is None if it has an answer."""

    record: dict[str, Any]
    failure: ErrorInfo | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineOptions:
    """How the jobs of all lines are submitted. `model` replaces the lines' models.

    `patience`: seconds without Redis after which a line gives up. `keep` and `caller` as in `Jobs.submit`.
    `outlives_models`: a model that nobody serves now, but somebody did, is waited for. A job that had started when its
    model or the workers' version was changed runs again.
    """

    model: str | None = None
    job_class: JobClass = JobClass.BATCH
    tenant: str = DEFAULT_TENANT
    limits: TenantLimits | None = None
    keep: float = 0.0
    patience: float = 60.0
    outlives_models: bool = False
    caller: str = ""


class LineRunner:
    """Runs any number of lines at once."""

    def __init__(self, broker: Broker, options: LineOptions) -> None:
        self.statistics = Statistics()
        self._broker = broker
        self._options = options
        self._card_seen: ModelCard | None = None
        self._jobs: dict[str, int | None] = {}  # of the lines in flight, and the most tokens of each
        self._submitting = asyncio.Semaphore(MAX_SUBMITTING)

    async def run(self, line: BatchLine, name: str, job_ids: list[str] | None = None) -> LineResult:
        """Run a line to its end. `name`: the id of its request. `job_ids` is extended by those that are submitted.

        Raises Unavailable if Redis does not answer for the patience, and KtqueueError if a journal is lost repeatedly.
        """
        self.statistics.in_flight += 1
        job_ids = [] if job_ids is None else job_ids
        try:
            return await self._answer(line, name, job_ids)
        except (InvalidRequest, ModelNotFound, RequestTooLarge) as error:
            return LineResult(failure_record(name, line.custom_id, error.info(), line.url), error.info())
        finally:
            self.statistics.in_flight -= 1
            for job in job_ids:
                self._jobs.pop(job, None)

    async def in_flight(self) -> InFlight:
        """What the lines that run now have so far. Raises Unavailable if Redis does not answer."""
        jobs = dict(self._jobs)
        limits = [most for most in jobs.values() if most is not None]
        lines = max(1, self.statistics.in_flight)
        most = sum(limits) / lines if limits and len(limits) == len(jobs) else None
        events = await self._broker.journal.lengths(list(jobs))
        running = sum(map(bool, events))
        held = await self._held_by() if running < len(events) else ""
        return InFlight(sum(events), most, running, len(events) - running, held)

    async def _held_by(self) -> str:
        """What keeps jobs of the last line's model from more rows, or "workers" if none serves it."""
        name = self._card_seen.name if self._card_seen is not None else ""
        workers = [worker for worker in await self._broker.models.workers() if worker.model == name]
        return ", ".join(sorted({worker.rows_held_by for worker in workers} - {""})) if workers else "workers"

    async def _answer(self, line: BatchLine, name: str, job_ids: list[str]) -> LineResult:
        model, job_class = self._options.model, self._options.job_class
        card = await self._card(model or line.body.get("model"))
        line_jobs = LineJobs(line, name, model=model, card=card, job_class=job_class)
        requests = line_jobs.requests
        # It waits for all: if one is refused, the others are still in the queue and in the window.
        histories = await map_concurrently(
            lambda place: self._job(name, place, requests[place], job_ids), range(len(requests)), len(requests)
        )
        for place, (_, journal) in enumerate(histories):
            fault = line_jobs.failure(place, journal[-1])
            if fault is not None:
                return LineResult(failure_record(name, line.custom_id, fault, line.url), fault)
        events = [(place, event) for place, (_, journal) in enumerate(histories) for event in journal]
        record, usage = line_jobs.answer(events, created=int(histories[0][0]))
        return LineResult(record, usage=usage)

    async def _card(self, model: Any) -> ModelCard | None:
        """The card of a line's model. While Redis does not answer, the one that was last seen."""
        if not isinstance(model, str):
            return None
        with suppress(Unavailable):
            card = await self._broker.models.card(model)
            self._card_seen = card or self._card_seen
            return card
        return self._card_seen if self._card_seen is not None and find_card([self._card_seen], model) else None

    async def _job(self, name: str, place: int, request: GenerationRequest, job_ids: list[str]) -> JobHistory:
        """Run one job to its end."""
        sampling = request.sampling
        most = None if sampling.max_tokens is None else sampling.max_tokens * sampling.n
        for attempt in range(MAX_ATTEMPTS):
            job = job_id(name, place, attempt)
            job_ids.append(job)
            self._jobs[job] = most
            try:
                created = await self._submit(request, job)
                events = await self._broker.journal.whole(job)
            except (JobNotFound, JournalRegressed):  # it has expired, or Redis lost it
                continue
            self.statistics.count(events)
            if not self._starts_again(events[-1], attempt):
                return created, events
        raise KtqueueError(f"the journal of job {job} was lost {MAX_ATTEMPTS} times")

    def _starts_again(self, last: TokenEvent, attempt: int) -> bool:
        is_outlived = last.error is not None and last.error.code in (ModelChanged.code, VersionChanged.code)
        return is_outlived and self._options.outlives_models and attempt + 1 < MAX_ATTEMPTS

    async def _submit(self, request: GenerationRequest, job: str) -> float:
        pause = FIRST_PAUSE
        async with self._submitting:
            while True:
                try:
                    record = await self._record(request, job)
                except RateLimitExceeded as error:
                    await asyncio.sleep(min(error.retry_after or pause, LONGEST_PAUSE))
                except (QueueFull, TenantLimitReached):
                    await asyncio.sleep(pause)
                except Unavailable:
                    now = time.monotonic()
                    self.statistics.away_since = self.statistics.away_since or now
                    if now - self.statistics.away_since > self._options.patience:
                        raise
                    await asyncio.sleep(pause)
                except ModelNotFound:
                    if not self._options.outlives_models:
                        raise
                    await asyncio.sleep(pause)
                else:
                    self.statistics.away_since = None
                    return record.created_at
                pause = min(2 * pause, LONGEST_PAUSE)

    async def _record(self, request: GenerationRequest, job: str) -> JobRecord:
        options = self._options
        try:
            return await self._broker.jobs.submit(
                request,
                job_id=job,
                tenant=options.tenant,
                limits=options.limits,
                keep=options.keep,
                caller=options.caller,
            )
        except IdempotencyConflict:  # it was submitted before in another class; its answer is the same
            return await self._broker.jobs.get(job)
