"""Runs the lines of a stored batch that have no record yet, and stores their records in segments."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from ktqueue.batches.concurrency import map_concurrently
from ktqueue.batches.input import LineFault, parse_line
from ktqueue.batches.line_jobs import failure_record, job_id
from ktqueue.batches.line_runner import LineResult, LineRunner
from ktqueue.batches.stored.index import LineIndex
from ktqueue.batches.stored.patience import Patience
from ktqueue.batches.stored.segments import Segments, StoredRecord
from ktqueue.batches.stored.window import Window
from ktqueue.broker.batches import BatchUsage
from ktqueue.broker.broker import Broker
from ktqueue.core.codec import dumps_line
from ktqueue.core.errors import Cancelled, ErrorInfo, JobNotFound, KtqueueError, Unavailable
from ktqueue.core.events import Usage
from ktqueue.storage.store import NotStored, Store, read_whole

SEGMENT_SECONDS, LONGEST_SEGMENT_SECONDS = 1.0, 5.0  # between two segments; grows with their number
SEGMENT_BYTES = 4 << 20  # of records after which a segment is written earlier
MAX_PENDING_BYTES = 32 << 20  # of records that are not stored yet; then no further line begins
END_SECONDS = 10.0  # in which running lines end after their jobs were cancelled
CANCELS_AT_ONCE = 64
MAX_LEFTOVERS = 8192  # lines of a dead owner that are searched for jobs to cancel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionParts:
    """What an execution works with. `run`: the beginning of the names of its requests.

    `group`: tenant, caller and model of the lines, which share places of the window with others.
    """

    broker: Broker
    store: Store
    runner: LineRunner
    window: Window
    group: tuple[str, str, str]
    input: str
    endpoint: str
    run: str


@dataclass(slots=True)
class _Running:
    """A line in flight, and the ids of its jobs."""

    task: asyncio.Task[None]
    job_ids: list[str] = field(default_factory=list)


class Execution:
    """One owner's run over the lines. `commit` stores that segments up to a number exist, and may raise LeaseLost."""

    def __init__(
        self,
        parts: ExecutionParts,
        index: LineIndex,
        segments: Segments,
        *,
        token: str,
        commit: Callable[[int], Awaitable[None]],
    ) -> None:
        self._parts = parts
        self._index = index
        self._segments = segments
        self._token = token
        self._commit = commit
        self._order = index.order()
        self._running: dict[int, _Running] = {}
        self._pending: list[tuple[StoredRecord, list[str]]] = []
        self._pending_bytes = 0
        self._has_room, self._is_due = asyncio.Event(), asyncio.Event()
        self._has_room.set()
        self._written = 0
        self._begun = 0  # pending records whose segment is being stored, the first ones
        self._stopping = False
        self._flushing = asyncio.Lock()
        self._patience = Patience(parts.run)

    @property
    def ended(self) -> tuple[int, int]:
        """How many lines have ended, whether stored yet or not, and the tokens of their answers."""
        records = [record for record, _ in self._pending if not self._segments.has(record.place)]
        tokens = sum(record.usage.completion for record in records)
        return self._segments.done + len(records), self._segments.usage.completion + tokens

    async def run(self, stop: asyncio.Event) -> None:
        """Run until every line has a record, or until `stop`, when the jobs in flight are cancelled.

        When this returns, the records of all lines that have ended are stored and committed. Raises what `commit`
        raises; then nothing more is stored.
        """
        flusher = asyncio.create_task(self._flush_regularly(), name="segments")
        work = asyncio.create_task(self._work(), name="lines")
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({flusher, work, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if flusher.done():
                flusher.result()
            if work.done():
                work.result()
            else:
                await self._stop(work)
        finally:
            tasks = [flusher, work, stopped, *(line.task for line in self._running.values())]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self.flush()

    async def flush(self) -> None:
        """Store the records of all lines that have ended, commit them, and forget their jobs."""
        async with self._flushing:
            while self._pending:
                # A flush that is cancelled is repeated with the same records: the store may still be writing them, and
                # whichever write ends last, the segment is the same.
                self._begun = self._begun or len(self._pending)
                pending = self._pending[: self._begun]
                records, name = [record for record, _ in pending], segment_name(self._token, self._written + 1)
                await self._patience.call(partial(self._segments.write, name, records))
                await self._commit(self._written + 1)
                self._written += 1
                del self._pending[: self._begun]
                self._begun = 0
                self._pending_bytes -= sum(len(record.data) for record, _ in pending)
                self._has_room.set()
                with suppress(Unavailable):  # their records expire later
                    await self._parts.broker.jobs.forget([job for _, job_ids in pending for job in job_ids])

    async def cancel_leftovers(self) -> None:
        """Cancel the jobs of lines without a record that an earlier owner has submitted."""
        places = [place for place in self._order if not self._segments.has(place)][:MAX_LEFTOVERS]
        await map_concurrently(self._cancel_jobs_of, places, CANCELS_AT_ONCE)

    async def _work(self) -> None:
        for place in self._order:
            if self._segments.has(place):
                continue
            size = self._index.span(place)[1]
            await self._has_room.wait()
            await self._parts.window.acquire(size, self._parts.group)
            job_ids: list[str] = []
            task = asyncio.create_task(self._line(place, job_ids))
            self._running[place] = _Running(task, job_ids)
            task.add_done_callback(partial(self._end, place, size))  # also if it is cancelled before it has begun
        while self._running:
            await asyncio.wait([line.task for line in self._running.values()])

    async def _stop(self, work: asyncio.Task[None]) -> None:
        """Begin no further line, and cancel the jobs of those in flight. Those that are done keep their answers."""
        self._stopping = True
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        lines = list(self._running.values())
        if not lines:
            return
        await self._cancel_jobs_in(lines)
        _, unfinished = await asyncio.wait([line.task for line in lines], timeout=END_SECONDS)
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
        await self._cancel_jobs_in([line for line in lines if line.task in unfinished])

    async def _cancel_jobs_in(self, lines: list[_Running]) -> None:
        """Cancel the jobs of these lines. A line of which no job was submitted yet ends at once."""

        async def cancel(line: _Running) -> None:
            found = [await self._cancel(job) for job in line.job_ids]
            if not any(found):
                line.task.cancel()

        await map_concurrently(cancel, lines, CANCELS_AT_ONCE)

    async def _line(self, place: int, job_ids: list[str]) -> None:
        result = await self._result(place, job_ids)
        if self._stopping and result.failure is not None and result.failure.code == Cancelled.code:
            return
        record = StoredRecord(place, result.failure is None, dumps_line(result.record), _usage_of(result.usage))
        self._pending.append((record, job_ids))
        self._pending_bytes += len(record.data)
        if self._pending_bytes >= SEGMENT_BYTES:
            self._is_due.set()
        if self._pending_bytes >= MAX_PENDING_BYTES:
            self._has_room.clear()

    def _end(self, place: int, size: int, _: asyncio.Task[None]) -> None:
        self._running.pop(place, None)
        self._parts.window.release(size, self._parts.group)

    async def _result(self, place: int, job_ids: list[str]) -> LineResult:
        number = self._index.number(place)
        name, url = self._name(place), self._parts.endpoint
        custom_id = f"line-{number}"
        while True:
            try:
                data = await self._read(place)
                line = parse_line("line", number, data, urls=(url,), plain_allowed=False)
                custom_id = line.custom_id
                result = await self._parts.runner.run(line, name, job_ids)
            except NotStored:
                info = ErrorInfo(code="file_not_found", message="the input file was deleted", status=404)
                return LineResult(failure_record(name, custom_id, info, url), info)
            except LineFault as fault:
                return LineResult(failure_record(name, custom_id, fault.info(), url), fault.info())
            except Unavailable as error:
                await self._patience.wait(error)
            except KtqueueError as error:
                return LineResult(failure_record(name, custom_id, error.info(), url), error.info())
            except Exception:
                log.exception("%s line %d failed", self._parts.run, number)
                info = ErrorInfo(code=KtqueueError.code, message="an unexpected error; the log has the details")
                return LineResult(failure_record(name, custom_id, info, url), info)
            else:
                return result

    async def _read(self, place: int) -> bytes:
        return await read_whole(self._parts.store, self._parts.input, *self._index.span(place))

    async def _flush_regularly(self) -> None:
        while True:
            seconds = min(SEGMENT_SECONDS + self._written / 100, LONGEST_SEGMENT_SECONDS)
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._is_due.wait()
            self._is_due.clear()
            await self.flush()

    def _name(self, place: int) -> str:
        return f"{self._parts.run}-{self._index.number(place)}"

    async def _cancel(self, job: str) -> bool:
        """Cancel a job. Returns whether there is one."""
        try:
            await self._patience.call(lambda: self._parts.broker.jobs.cancel(job))
        except JobNotFound:
            return False
        return True

    async def _cancel_jobs_of(self, place: int) -> None:
        prompt = 0
        while await self._cancel(job_id(self._name(place), prompt)):
            prompt += 1


def segment_name(token: str, number: int) -> str:
    """The name of an owner's segment, from 1."""
    return f"out-{token}-{number:06d}"


async def load_segments(store: Store, folder: str, index: LineIndex, written: tuple[tuple[str, int], ...]) -> Segments:
    """The records that earlier owners have committed. Lines of a segment that cannot be read run again."""
    segments = Segments(store, folder, len(index))
    names = [segment_name(token, number) for token, count in written for number in range(1, count + 1)]
    for fault in await segments.load(names):
        log.error("%s: %s; its lines run again", folder, fault)
    return segments


def _usage_of(usage: Usage | None) -> BatchUsage:
    if usage is None:
        return BatchUsage()
    return BatchUsage(
        prompt=usage.prompt_tokens,
        cached=usage.cached_tokens,
        completion=usage.completion_tokens,
        reasoning=usage.reasoning_tokens,
    )
