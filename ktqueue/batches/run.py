"""Runs the lines of a batch: a limited number of jobs in Redis, each line's record written when its jobs end.

Job ids are made from the run and the line, so that an interrupted run finds its jobs again instead of computing them
twice. This module knows neither file formats nor the terminal.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ktqueue.batches.errors import BatchFault
from ktqueue.batches.input import BatchLine, LineFault, Survey, line_id
from ktqueue.batches.line_jobs import LineJobs, failure_record, request_id
from ktqueue.batches.output import BatchOutput
from ktqueue.broker.broker import Broker
from ktqueue.broker.jobs import JobRecord
from ktqueue.broker.models import find_card
from ktqueue.core.errors import (
    IdempotencyConflict,
    InvalidRequest,
    JobNotFound,
    JournalRegressed,
    KtqueueError,
    ModelNotFound,
    QueueFull,
    RequestTooLarge,
    Unavailable,
)
from ktqueue.core.events import TokenEvent
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest, JobClass

PATIENCE = 60.0  # seconds without an answer from Redis before the run fails
FIRST_PAUSE = 0.2  # seconds; doubles up to LONGEST_PAUSE
LONGEST_PAUSE = 5.0
MAX_ATTEMPTS = 3  # of a job whose journal was lost
LEAST_WINDOW, LARGEST_WINDOW = 16, 1024
KEPT_DELAYS = 10_000
SKIPS_PER_PAUSE = 1_000  # finished lines that are skipped before other tasks run

Line = BatchLine | LineFault
JobHistory = tuple[float, list[TokenEvent]]  # when a job was created, in Unix seconds, and all its events


async def window_for(broker: Broker) -> int:
    """Number of lines to keep in Redis: twice the rows of all workers."""
    rows = sum(worker.max_num_seqs for worker in await broker.models.workers())
    return min(max(2 * rows, LEAST_WINDOW), LARGEST_WINDOW)


async def default_model(broker: Broker, found: Survey, source: Path) -> str | None:
    """The model for lines that name none: the only one that is served. None if no line needs it.

    Raises BatchFault if several are served, Unavailable if none is.
    """
    if found.modelless is None:
        return None
    served = sorted(card.name for card in await broker.models.cards())
    if not served:
        raise Unavailable("no worker serves a model yet")
    if len(served) > 1:
        raise BatchFault(
            f"{source}:{found.modelless}: names no model, and several are served "
            f"({', '.join(served)}): --model chooses one for all lines"
        )
    return served[0]


def with_model(lines: Iterable[Line], model: str | None) -> Iterator[Line]:
    """The lines, with `model` in those that name none."""
    for line in lines:
        if model is not None and isinstance(line, BatchLine) and line.body.get("model") is None:
            yield replace(line, body={**line.body, "model": model})
        else:
            yield line


@dataclass(slots=True)
class Statistics:
    """Figures of a run. Times in seconds."""

    began: float = field(default_factory=time.monotonic)
    tokens: int = 0
    in_flight: int = 0
    away_since: float | None = None  # monotonic time since which Redis does not answer
    first_token: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_DELAYS))

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


class BatchRun:
    """One run. `model` replaces the lines' models; `window` is the number of lines in Redis at once."""

    def __init__(
        self,
        broker: Broker,
        output: BatchOutput,
        *,
        window: int,
        model: str | None = None,
        job_class: JobClass = JobClass.BATCH,
    ) -> None:
        self.statistics = Statistics()
        self._broker = broker
        self._output = output
        self._model = model
        self._job_class = job_class
        self._cards: list[ModelCard] = []
        self._window = asyncio.Semaphore(window)
        self._stopping = False

    def stop(self) -> None:
        """Submit no further lines. `run` returns when the lines in flight are written."""
        self._stopping = True

    async def run(self, lines: Iterable[Line]) -> None:
        """Run every line that has no record in the output. A faulty line gets a failure record.

        Raises Unavailable if Redis does not answer for PATIENCE seconds, and OSError.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for count, line in enumerate(lines):
                    if line.custom_id in self._output.ids:
                        if count % SKIPS_PER_PAUSE == 0:
                            await asyncio.sleep(0)
                        continue
                    if isinstance(line, LineFault):
                        name = f"batch-{self._output.run}-{line_id(line.number)}"
                        self._output.fail(failure_record(name, line.custom_id, line.info()))
                        continue
                    await self._window.acquire()
                    if self._stopping:
                        return
                    group.create_task(self._line(line))
        except ExceptionGroup as several:
            raise several.exceptions[0] from None

    async def _line(self, line: BatchLine) -> None:
        self.statistics.in_flight += 1
        try:
            await self._answer(line)
        except (InvalidRequest, ModelNotFound, RequestTooLarge) as error:
            name = request_id(line, self._output.run, self._model)
            self._output.fail(failure_record(name, line.custom_id, error.info()))
        finally:
            self.statistics.in_flight -= 1
            self._window.release()

    async def _answer(self, line: BatchLine) -> None:
        card = await self._card(self._model or line.body.get("model"))
        line_jobs = LineJobs(line, self._output.run, model=self._model, card=card, job_class=self._job_class)
        jobs = [self._job(line_jobs, place, request) for place, request in enumerate(line_jobs.requests)]
        # Wait for all: if one is refused, the others are still in the queue and in the window.
        outcomes = await asyncio.gather(*jobs, return_exceptions=True)
        histories = [_raise_if_error(outcome) for outcome in outcomes]
        for place, (_, journal) in enumerate(histories):
            fault = line_jobs.failure(place, journal[-1])
            if fault is not None:
                self._output.fail(failure_record(line_jobs.id, line_jobs.custom_id, fault))
                return
        events = [(place, event) for place, (_, journal) in enumerate(histories) for event in journal]
        self._output.answer(line_jobs.answer(events, created=int(histories[0][0])))

    async def _card(self, model: Any) -> ModelCard | None:
        """The card of a line's model. While Redis does not answer, the one that was last seen."""
        with suppress(Unavailable):
            self._cards = await self._broker.models.cards()
        return find_card(self._cards, model)

    async def _job(self, line_jobs: LineJobs, place: int, request: GenerationRequest) -> JobHistory:
        """Run one job to its end."""
        for attempt in range(MAX_ATTEMPTS):
            job_id = line_jobs.job_id(place, attempt)
            began = time.monotonic()
            try:
                created = await self._submit(request, job_id)
                events = await self._follow(job_id, began)
            except (JobNotFound, JournalRegressed):  # it has expired, or Redis lost it
                continue
            if events and events[0].seq == 1:
                return created, events
        raise KtqueueError(f"the journal of job {job_id} was lost {MAX_ATTEMPTS} times")

    async def _submit(self, request: GenerationRequest, job_id: str) -> float:
        pause = FIRST_PAUSE
        while True:
            try:
                record = await self._record(request, job_id)
            except QueueFull as error:
                await asyncio.sleep(error.retry_after or pause)
            except Unavailable:
                now = time.monotonic()
                self.statistics.away_since = self.statistics.away_since or now
                if now - self.statistics.away_since > PATIENCE:
                    raise
                await asyncio.sleep(pause)
            else:
                self.statistics.away_since = None
                return record.created_at
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _record(self, request: GenerationRequest, job_id: str) -> JobRecord:
        try:
            return await self._broker.jobs.submit(request, job_id=job_id)
        except IdempotencyConflict:  # it was submitted before in another class; its answer is the same
            return await self._broker.jobs.get(job_id)

    async def _follow(self, job_id: str, began: float) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        async for event in self._broker.journal.follow(job_id):
            if event.token_ids:
                if not self.statistics.tokens or not any(earlier.token_ids for earlier in events):
                    self.statistics.first_token.append(time.monotonic() - began)
                self.statistics.tokens += len(event.token_ids)
            events.append(event)
        return events


def _raise_if_error(outcome: JobHistory | BaseException) -> JobHistory:
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
