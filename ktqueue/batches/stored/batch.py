"""A batch over HTTP, from the status in which its owner finds it to its end.

Each step can be repeated after the death of an owner with the same result. What is done is what the committed segments
have. The ids of the output files are made from the batch's id. A batch that has ended keeps its owner until its objects
are deleted, so nothing is left behind.
"""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ktqueue.batches.concurrency import map_concurrently
from ktqueue.batches.errors import BatchFault
from ktqueue.batches.line_runner import LineOptions, LineRunner
from ktqueue.batches.stored.execution import Execution, ExecutionParts, load_segments
from ktqueue.batches.stored.index import LineIndex
from ktqueue.batches.stored.merge import Merged, merge
from ktqueue.batches.stored.patience import RETRY_SECONDS, Patience
from ktqueue.batches.stored.segments import Segments
from ktqueue.batches.stored.speed import Speed
from ktqueue.batches.stored.validation import check_input
from ktqueue.batches.stored.window import Window
from ktqueue.broker.batches import BatchFacts, BatchLease, BatchRecord, BatchStatus
from ktqueue.broker.broker import Broker
from ktqueue.broker.files import FileFacts, content_name
from ktqueue.broker.models import find_card, model_not_found
from ktqueue.core.errors import KtqueueError, Unavailable
from ktqueue.core.tenants import TenantLimits, batch_limits
from ktqueue.storage.store import NotStored, Store, read_whole

KEEP_SECONDS = 6 * 3_600.0  # jobs of lines can be read so long, so that another owner finds what a dead one has started
BEATS = 5  # renewals in the time of a lease
DELETES_AT_ONCE = 32
SETTLE_SECONDS = 2.0  # until Redis no longer forgets what was written, if its process dies

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Owner:
    """What all batches of one process share. Output files are kept for `file_seconds`, unless the client says it."""

    broker: Broker
    store: Store
    window: Window
    file_seconds: float


class StoredBatch:
    """One batch and its lease. `limits`: those of its tenant."""

    def __init__(self, owner: Owner, lease: BatchLease, record: BatchRecord, limits: TenantLimits | None) -> None:
        self._owner = owner
        self._lease = lease
        self._record = record
        self._facts = record.facts
        self._folder = f"batches/{record.id}/"
        self._input = content_name(record.request.input_file_id)
        self._token = secrets.token_hex(4)
        self._former = record.facts.segments
        self._taken_over = record.status is not BatchStatus.VALIDATING
        self._stop = asyncio.Event()
        self._speed = Speed()
        self._index: LineIndex | None = None
        self._segments: Segments | None = None
        self._execution: Execution | None = None
        self._patience = Patience(record.id)
        self._max_failures = owner.broker.config.max_attempts
        self._runner = LineRunner(
            owner.broker,
            LineOptions(
                tenant=record.tenant,
                limits=None if limits is None else batch_limits(limits),
                keep=KEEP_SECONDS,
                patience=float("inf"),
                outlives_models=True,
                caller=record.caller or record.id,
            ),
        )

    async def run(self) -> None:
        """Run the batch to its end. Raises LeaseLost if another owner has it."""
        self._notice(self._record)
        try:
            async with asyncio.TaskGroup() as group:
                beat = group.create_task(self._beat(), name="lease of a batch")
                await self._advance()
                beat.cancel()
        except ExceptionGroup as several:
            raise several.exceptions[0] from None

    async def leave(self) -> None:
        """Store what is done and give the batch back, so that another owner goes on at once. Call it after `run`."""
        if self._execution is not None:
            await self._execution.flush()
        await self._owner.broker.batches.release(self._lease, is_clean=False)

    async def note_failure(self) -> None:
        """Store that `run` raised an unexpected error. The last owner that may do so leaves a batch that has to end."""
        await self._owner.broker.batches.note_failure(self._lease)

    async def _advance(self) -> None:
        """Run the batch to its end, and delete its objects once Redis cannot forget that end."""
        while True:
            await self._advance_to_end()
            await asyncio.sleep(SETTLE_SECONDS)
            self._notice(await self._patience.call(lambda: self._owner.broker.batches.update(self._lease)))
            if self._record.status.ended:
                break
        await self._clean()

    async def _advance_to_end(self) -> None:
        while not self._record.status.ended:
            try:
                if self._record.failures_without_progress < self._max_failures:
                    await self._leave_status()
                else:
                    await self._give_up()
            except _InputLost as lost:
                end = BatchStatus.CANCELLED if self._is_cancelled() else BatchStatus.FAILED
                facts = replace(self._facts, errors=(lost.fault,), answered=0, failed=0)
                await self._update(facts, (self._record.status, end))

    async def _leave_status(self) -> None:
        match self._record.status:
            case BatchStatus.VALIDATING:
                await self._validate()
            case BatchStatus.IN_PROGRESS:
                await self._execute()
                done = self._is_done()
                facts = replace(self._facts, outcome="completed" if done else "expired")
                if not self._is_cancelled():
                    await self._update(facts, (BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING))
            case _:
                await self._finish()

    # Status validating

    async def _validate(self) -> None:
        findings = await self._patience.call(
            lambda: check_input(self._owner.store, self._input, self._record.request.endpoint, self._why_not_served)
        )
        if self._is_cancelled():
            return
        facts = replace(self._facts, model=findings.model)
        if findings.faults:
            facts = replace(facts, errors=tuple(findings.faults))
            await self._update(facts, (BatchStatus.VALIDATING, BatchStatus.FAILED))
            return
        await self._patience.call(lambda: self._write_index(findings.index))
        self._index = findings.index
        facts = replace(facts, total=len(findings.index))
        await self._update(facts, (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS))

    async def _why_not_served(self, model: str) -> str | None:
        """Why a model cannot be used, or None. Waits while no model is served at all: workers may be starting."""
        while not self._stop.is_set():
            if cards := await self._patience.call(self._owner.broker.models.cards):
                return None if find_card(cards, model) else model_not_found(model, cards).message
            await asyncio.sleep(RETRY_SECONDS)
        return None

    async def _write_index(self, index: LineIndex) -> None:
        async with self._owner.store.create(f"{self._folder}index") as writing:
            await writing.write(index.encode())

    # Status in_progress

    async def _execute(self) -> None:
        """Run the lines without a record, until all have one, or the batch is cancelled or late."""
        execution = await self._loaded()
        if not self._is_done() and not self._stop.is_set():
            await execution.run(self._stop)

    async def _loaded(self) -> Execution:
        """The execution, after the index and the records of former owners were read."""
        if self._execution is None:
            if self._index is None:
                self._index = await self._patience.call(self._read_index)
            index = self._index
            self._segments = await self._patience.call(
                lambda: load_segments(self._owner.store, self._folder, index, self._former)
            )
            parts = ExecutionParts(
                broker=self._owner.broker,
                store=self._owner.store,
                runner=self._runner,
                window=self._owner.window,
                group=(self._record.tenant, self._record.caller, self._facts.model or ""),
                input=self._input,
                endpoint=self._record.request.endpoint,
                run=self._record.id.replace("_", "-", 1),
            )
            self._execution = Execution(parts, index, self._segments, token=self._token, commit=self._commit)
        return self._execution

    async def _read_index(self) -> LineIndex:
        """The index; made again if it is lost. Empty if the batch was cancelled before there was one.

        Raises _InputLost if the input is lost too.
        """
        try:
            return LineIndex.decode(await read_whole(self._owner.store, f"{self._folder}index"))
        except (NotStored, BatchFault) as error:
            if not self._facts.total:
                return LineIndex()
            log.error("%s: %s; it is made again", self._record.id, error)
        findings = await check_input(self._owner.store, self._input, self._record.request.endpoint, _is_served)
        if findings.faults:
            raise _InputLost(findings.faults[0])
        return findings.index

    async def _commit(self, written: int) -> None:
        """Store that the segments up to this number exist, and the counts that follow from all segments."""
        assert self._segments is not None
        assert self._index is not None
        facts = replace(
            self._facts,
            segments=(*self._former, (self._token, written)),
            answered=self._segments.answered,
            failed=self._segments.failed,
            usage=self._segments.usage,
        )
        await self._update(facts)

    def _is_done(self) -> bool:
        assert self._segments is not None
        assert self._index is not None
        return self._segments.done == len(self._index)

    # Status finalizing or cancelling

    async def _finish(self) -> None:
        """Make the output files and end the batch."""
        status, expired = self._record.status, self._facts.outcome == "expired"
        execution = await self._loaded()
        if self._taken_over and (expired or self._is_cancelled()):
            await execution.cancel_leftovers()
        if self._is_cancelled():
            end, unfinished = BatchStatus.CANCELLED, "batch_cancelled"
        else:
            if not expired:
                await self._execute()  # nothing is left to do, unless a segment was lost
                expired = not self._is_done()
            end, unfinished = (BatchStatus.EXPIRED if expired else BatchStatus.COMPLETED), "batch_expired"
        facts = await self._add_files(unfinished)
        await self._update(facts, (status, end))

    async def _give_up(self) -> None:
        """End the batch: its owners failed again and again. What is done goes into the files, unless that fails too."""
        failures, end, unfinished = self._record.failures_without_progress, BatchStatus.FAILED, "batch_failed"
        if self._is_cancelled():
            end, unfinished = BatchStatus.CANCELLED, "batch_cancelled"
        facts = replace(self._facts, answered=0, failed=0)
        if failures == self._max_failures:
            await (await self._loaded()).cancel_leftovers()
            facts, failures = await self._add_files(unfinished), 0
        message = (
            f"the batch failed {self._max_failures} times without progress; it is not tried again; "
            "the logs of its control workers have the details"
        )
        error = {"code": KtqueueError.code, "message": message, "param": None, "line": None}
        facts = replace(facts, errors=(error,))
        await self._update(facts, (self._record.status, end), failures)

    async def _add_files(self, unfinished: str) -> BatchFacts:
        """Merge the records, and enter the files. Returns the facts with their ids, and the final counts."""
        assert self._segments is not None
        assert self._index is not None
        index, segments, facts = self._index, self._segments, self._facts
        output_id, error_id = (_file_id(kind, self._record.id) for kind in ("output", "errors"))
        merged: Merged = await self._patience.call(
            lambda: merge(
                self._owner.store,
                index,
                segments,
                source=self._input,
                output_name=content_name(output_id),
                errors_name=content_name(error_id),
                unfinished=unfinished,
                record_name=self._record.id.replace("_", "-", 1),
            )
        )
        if merged.output_bytes:
            await self._add_file(output_id, "output", merged.output_bytes)
        if merged.error_bytes:
            await self._add_file(error_id, "error", merged.error_bytes)
        return replace(
            facts,
            total=len(index),
            answered=merged.answered,
            failed=merged.failed,
            output_file_id=output_id if merged.output_bytes else None,
            error_file_id=error_id if merged.error_bytes else None,
        )

    async def _add_file(self, file_id: str, kind: str, size: int) -> None:
        facts = FileFacts(
            id=file_id,
            tenant=self._record.tenant,
            filename=f"{self._record.id}_{kind}.jsonl",
            purpose="batch_output",
            size=size,
            seconds=self._record.request.output_seconds or self._owner.file_seconds,
        )
        await self._patience.call(lambda: self._owner.broker.files.add(facts, None))

    async def _clean(self) -> None:
        """Delete everything that only the run needed, and give the batch back.

        If that fails again and again, or the files could not be written, it is kept as long as the batch's record.
        """
        if self._record.failures_without_progress < self._max_failures:
            await self._patience.call(self._delete_objects)
        await self._patience.call(lambda: self._owner.broker.batches.release(self._lease))

    async def _delete_objects(self) -> None:
        names = await self._owner.store.names(self._folder)
        await map_concurrently(self._owner.store.delete, names, DELETES_AT_ONCE)

    # The lease

    async def _beat(self) -> None:
        """Renew the lease and the speed, and notice that the batch is cancelled or late. Raises LeaseLost."""
        while True:
            try:
                speed = self._speed.measured(self._facts.total)
                self._notice(await self._owner.broker.batches.update(self._lease, speed=speed))
                if self._execution is not None:  # after the renewal, which must not wait for it
                    await self._speed.look(self._execution, self._runner)
            except Unavailable as error:
                self._patience.log(error)
            await asyncio.sleep(min(1.0, self._owner.broker.batches.lease_seconds / BEATS))

    def _notice(self, record: BatchRecord) -> None:
        self._record = record
        if self._is_cancelled() or (record.is_late and not self._facts.outcome):
            self._stop.set()

    def _is_cancelled(self) -> bool:
        return self._record.status is BatchStatus.CANCELLING

    async def _update(
        self, facts: BatchFacts, change: tuple[BatchStatus, BatchStatus] | None = None, failures: int = 0
    ) -> None:
        """Store facts, and a change of the status. If the client has cancelled the batch meanwhile, it stays."""
        record = await self._patience.call(
            lambda: self._owner.broker.batches.update(self._lease, facts, change=change, failures=failures)
        )
        self._facts = record.facts
        self._notice(record)


class _InputLost(Exception):
    """The store has neither the input nor its index any more, so nothing is known of the lines."""

    def __init__(self, fault: Mapping[str, Any]) -> None:
        """`fault`: as in the errors of a batch."""
        super().__init__(fault["message"])
        self.fault = fault


async def _is_served(_: str) -> str | None:
    return None


def _file_id(kind: str, batch_id: str) -> str:
    """The id of one of a batch's files, the same whoever makes it."""
    return f"file-{hashlib.sha256(f'{kind}:{batch_id}'.encode()).hexdigest()[:24]}"
