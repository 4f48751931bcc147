"""Runs the lines of a batch: a window of jobs in Redis, each line's record written as soon as it is known.

Job ids are derived from the run and the line, so that a run that was interrupted finds its jobs again
instead of computing them twice. Knows neither files' formats nor the terminal.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ktqueue.batches.faults import BatchFault
from ktqueue.batches.input import BatchLine, LineFault, Survey, line_id
from ktqueue.batches.output import BatchOutput
from ktqueue.batches.work import Work, failed, failure_record, work_id
from ktqueue.broker.broker import Broker
from ktqueue.broker.jobs import JobRecord
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
from ktqueue.core.request import GenerationRequest, JobClass

PATIENCE = 60.0  # seconds that Redis may be away before the run gives up
FIRST_PAUSE = 0.2  # seconds; doubles up to
LONGEST_PAUSE = 5.0
MAX_ATTEMPTS = 3  # a job whose journal is gone is run again so often
LEAST_WINDOW, LARGEST_WINDOW = 16, 1024
KEPT_DELAYS = 10_000
SKIPS_PER_BREATH = 1_000

Line = BatchLine | LineFault
Told = tuple[float, list[TokenEvent]]  # of one job: when it was made (Unix seconds), and all that it told


async def window_for(broker: Broker) -> int:
    """Lines to have in Redis at once: twice the rows of all workers."""
    rows = sum(worker.max_num_seqs for worker in await broker.models.workers())
    return min(max(2 * rows, LEAST_WINDOW), LARGEST_WINDOW)


async def default_model(broker: Broker, found: Survey, source: Path) -> str | None:
    """The model of lines that name none: the only one that is served. None where no line needs it.

    Raises BatchFault where several are served, Unavailable where none is.
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
    """The lines; those that name no model get this one."""
    for line in lines:
        if model is not None and isinstance(line, BatchLine) and line.body.get("model") is None:
            yield replace(line, body={**line.body, "model": model})
        else:
            yield line


@dataclass(slots=True)
class Statistics:
    """What a run did. Times in seconds."""

    began: float = field(default_factory=time.monotonic)
    tokens: int = 0
    in_flight: int = 0
    away_since: float | None = None  # since when Redis does not answer
    first_token: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_DELAYS))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    def first_token_percentile(self, part: float) -> float | None:
        """Time from submission to first token that this part of the jobs kept under."""
        ordered = sorted(self.first_token)
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else None


class BatchRun:
    """One run. `model` stands in for the lines' own; `window` is how many lines are in Redis at once."""

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
        self._window = asyncio.Semaphore(window)
        self._stopping = False

    def stop(self) -> None:
        """Submit no more; `run` returns when the lines in flight are written."""
        self._stopping = True

    async def run(self, lines: Iterable[Line]) -> None:
        """Run every line that the output does not have; a faulty one fails.

        Raises Unavailable after PATIENCE, OSError.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for count, line in enumerate(lines):
                    if line.custom_id in self._output.ids:
                        if count % SKIPS_PER_BREATH == 0:
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
            name = work_id(line, self._output.run, self._model)
            self._output.fail(failure_record(name, line.custom_id, error.info()))
        finally:
            self.statistics.in_flight -= 1
            self._window.release()

    async def _answer(self, line: BatchLine) -> None:
        work = Work(line, self._output.run, model=self._model, job_class=self._job_class)
        jobs = [self._job(work, place, request) for place, request in enumerate(work.requests)]
        # All are waited for: where one is refused, the others are in the queue all the same, and in the window.
        ends = await asyncio.gather(*jobs, return_exceptions=True)
        results = [_told(end) for end in ends]
        for _, journal in results:
            fault = failed(journal[-1])
            if fault is not None:
                self._output.fail(failure_record(work.id, work.custom_id, fault))
                return
        events = [(place, event) for place, (_, journal) in enumerate(results) for event in journal]
        self._output.answer(work.answer(events, created=int(results[0][0])))

    async def _job(self, work: Work, place: int, request: GenerationRequest) -> Told:
        """Run one job to its end: when it was made, and all its events."""
        for attempt in range(MAX_ATTEMPTS):
            job_id = work.job_id(place, attempt)
            began = time.monotonic()
            try:
                created = await self._submit(request, job_id)
                events = await self._follow(job_id, began)
            except (JobNotFound, JournalRegressed):  # it ended so long ago, or Redis lost it
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
        except IdempotencyConflict:  # an earlier try submitted it in another class: its answer is the same
            return await self._broker.jobs.get(job_id)

    async def _follow(self, job_id: str, began: float) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        async for event in self._broker.journal.follow(job_id):
            if event.token_ids:
                if not self.statistics.tokens or not any(one.token_ids for one in events):
                    self.statistics.first_token.append(time.monotonic() - began)
                self.statistics.tokens += len(event.token_ids)
            events.append(event)
        return events


def _told(end: Told | BaseException) -> Told:
    if isinstance(end, BaseException):
        raise end
    return end
