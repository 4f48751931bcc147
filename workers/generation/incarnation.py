"""Incarnation: the work under one lease. It claims jobs, tokenises them, runs steps and commits their tokens.

It ends when the worker has drained, when the lease is lost, or when the engine breaks. While step n+1 is computed, the
events of step n are committed and the prompts of new jobs are tokenised. Knows neither processes nor signals.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

from ktqueue.broker.lease import NO_ROWS, Claim, Lease
from ktqueue.core.config import Config
from ktqueue.core.errors import Cancelled, DeadlineExceeded, ErrorInfo, LeaseLost
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.core.request import JobClass
from ktqueue.core.tenants import Owner
from ktqueue.engine.outputs import SequenceOutput
from ktqueue.profiling.token_log import TokenLog
from ktqueue.profiling.writer import RecordWriter
from ktqueue.workers.generation.admission import AdmissionRefused, NoGrammarMemory, TokeniserThreads
from ktqueue.workers.generation.engine_thread import EngineThread, TokenRates
from ktqueue.workers.generation.heartbeat import Heartbeat
from ktqueue.workers.generation.outbox import Outbox
from ktqueue.workers.generation.running_job import GATHERED_SECONDS, RunningJob

NO_ROW_SECONDS = 10.0  # then a batch job goes back to the queue, because another worker may have a free row
EXTRA_SHARE = 8  # one more row for each so many may be claimed for owners with few rows
MOST_UNSTARTED = 64  # rows of batch jobs without a token here, beyond which no batch job is claimed
IDLE_SECONDS = 0.5  # longest pause between two claims, so that a lost wake-up costs no more

log = logging.getLogger(__name__)


class Incarnation:
    """A worker for as long as it holds one lease.

    `rows`: number of rows of the engine. `draining` is set from outside, once. `no_row_seconds`: time without a row,
    after which a batch job goes back to the queue. `profile` gets the times of tokens, from steps that have a record.
    """

    def __init__(
        self,
        lease: Lease,
        engine: EngineThread,
        tokeniser: TokeniserThreads,
        config: Config,
        rows: int,
        draining: asyncio.Event,
        no_row_seconds: float = NO_ROW_SECONDS,
        profile: RecordWriter | None = None,
    ) -> None:
        self._tokens = TokenLog(profile) if profile is not None else None
        self._lease = lease
        self._engine = engine
        self._tokeniser = tokeniser
        self._config = config
        self._rows = rows
        self._no_row_seconds = no_row_seconds
        self._batch_floor = config.engine.batch_floor(rows)
        self._draining = draining
        self._drain_time_is_over = False
        self._claiming_is_over = False
        self._outbox = Outbox(lease, self._cancel)
        self._jobs: dict[str, RunningJob] = {}
        self._admitted: list[RunningJob] = []  # the next step adds them to the engine
        self._aborts: list[str] = []  # ids of jobs that the next step aborts
        self._admissions: set[asyncio.Task[None]] = set()
        self._suspects: asyncio.Queue[RunningJob] = asyncio.Queue()
        self._engine_has_work = False
        self._wake = asyncio.Event()  # there is something to do for the next step, or the drain time is over
        self._rows_freed = asyncio.Event()
        self._rates = TokenRates()
        self._heartbeat = Heartbeat(
            lease,
            engine.clock,
            self.stats,
            lease_seconds=config.broker.lease_seconds,
            stall_seconds=config.worker.stall_seconds,
        )

    async def run(self) -> None:
        """Work until drained. Raises LeaseLost, EngineStalled, or whatever broke the engine."""
        drain = asyncio.create_task(self._limit_drain())
        try:
            async with asyncio.TaskGroup() as group:
                parts = (self._outbox.run(), self._heartbeat.run(), self._run_suspects())
                background = [group.create_task(part) for part in parts]
                claiming = group.create_task(self._claim_jobs(group))
                await self._run_steps()
                await claiming
                background += self._admissions  # of jobs that go back to the queue
                for job in self._jobs.values():
                    self._write_gathered(job)
                await self._outbox.flush()
                if self._jobs:
                    log.info("drained; %d unfinished jobs return to the queue", len(self._jobs))
                await self._lease.close()
                for task in background:
                    task.cancel()
            await self._clear_engine()
        except BaseExceptionGroup as errors:
            cause = _decisive(errors)
            if isinstance(cause, LeaseLost):
                await self._clear_engine()
            raise cause from errors
        finally:
            drain.cancel()

    def stats(self) -> dict[str, float]:
        """The engine's statistics, tokens per second, and this worker's state, for the heartbeat."""
        stats = self._engine.stats
        rates = self._rates.update(time.monotonic(), stats)
        return {**stats, **rates, "jobs": float(len(self._jobs)), "draining": float(self._draining.is_set())}

    # Claim

    async def _claim_jobs(self, group: asyncio.TaskGroup) -> None:
        """Claim jobs for free rows until the worker drains."""
        claims: list[Claim] = []
        while not self._draining.is_set():
            await self._accept(claims, group)
            await self._release_jobs_without_a_row()
            free, interactive = self._free_rows()
            extra = 0 if interactive > 0 else max(0, max(1, self._rows // EXTRA_SHARE) + interactive)
            claims = await self._lease.claim(
                free, max(0, interactive), wait=True, extra=extra, rows=self._interactive_rows() if extra else NO_ROWS
            )
            if not claims:
                queued = self._lease.wait_for_work(
                    IDLE_SECONDS, interactive_only=free == 0, prompt_only=interactive <= 0
                )
                events: list[Coroutine[Any, Any, Any]] = [queued]
                if free == 0:
                    events.append(self._rows_freed.wait())
                claims = await self._first_of(*events)
        claims += await self._lease.claim(0)  # a job that was handed to this lease while it waited
        await self._lease.release([claim.job_id for claim in claims])
        self._claiming_is_over = True
        self._wake.set()

    def _free_rows(self) -> tuple[int, int]:
        """Return the rows free for any job, and those for interactive jobs, which also take rows from batch jobs.

        Only jobs for these rows are claimed, so that no job waits inside the engine for a row. Batch jobs are claimed
        only while more rows raise the tokens computed in a second, and few of them wait for their first token: with a
        full cache they would wait long, and another worker may be free.
        """
        self._rows_freed.clear()
        batch, unstarted, interactive = 0, 0, 0
        for job in self._jobs.values():
            if job.request.job_class is JobClass.BATCH:
                batch += job.rows
                unstarted += 0 if job.progressed.is_set() else job.rows
            else:
                interactive += job.rows
        wanted = min(self._rows, int(self._engine.stats["rows_wanted"]))
        free = min(self._rows - interactive, wanted) - batch
        free = min(free, max(MOST_UNSTARTED, 2 * self._batch_floor) - unstarted)
        return max(0, free), self._rows - interactive - min(batch, self._batch_floor)

    def _interactive_rows(self) -> Counter[Owner]:
        """The rows of each owner of interactive jobs."""
        rows: Counter[Owner] = Counter()
        for job in self._jobs.values():
            if job.request.job_class is JobClass.INTERACTIVE:
                rows[job.owner] += job.rows
        return rows

    async def _first_of(self, *events: Coroutine[Any, Any, Any]) -> list[Claim]:
        """Wait for the first of the events, or for the drain. Returns the job that was handed to the lease, if any."""
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(event) for event in (*events, self._draining.wait())]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return next((claims for wait in done if isinstance(claims := wait.result(), list)), [])
        finally:
            for wait in waits:
                wait.cancel()

    async def _release_jobs_without_a_row(self) -> None:
        """Return batch jobs to the queue that lost their rows to interactive jobs `no_row_seconds` ago.

        The jobs with the highest rank number go first.
        """
        surplus = sum(job.rows for job in self._jobs.values()) - self._rows
        oldest_output = time.monotonic() - self._no_row_seconds
        batch = (job for job in self._jobs.values() if job.request.job_class is JobClass.BATCH)
        released = []
        for job in sorted(batch, key=lambda job: job.rank, reverse=True):
            if surplus > 0 and job.last_output_at < oldest_output:
                surplus -= job.rows
                released.append(job)
        if released:
            await self._release(released)

    async def _release(self, jobs: list[RunningJob]) -> None:
        """Return jobs to the queue."""
        for job in jobs:
            job.release()
            self._aborts.append(job.id)
            self._forget(job)
        await self._lease.release([job.id for job in jobs])

    # Admit

    async def _accept(self, claims: list[Claim], group: asyncio.TaskGroup) -> None:
        """Start the admission of claimed jobs. Suspects are admitted one at a time, by `_run_suspects`."""
        accepted = [RunningJob(claim) for claim in claims]
        for claim in claims:
            if claim.events or claim.attempt > 1:
                log.info("%s continues after event %d, attempt %d", claim.job_id, len(claim.events), claim.attempt)
        self._jobs.update((job.id, job) for job in accepted)
        if self._tokens is not None:
            for claim, job in zip(claims, accepted, strict=True):
                waited = job.waited if claim.attempt == 1 else 0.0  # the first worker wrote how long it waited
                positions = [len(choice.token_ids) for choice in job.emitted]
                self._tokens.claimed(job.id, job.last_output_at, waited=waited, positions=positions)
        self._expire()
        for job in accepted:
            if self._is_suspect(job):
                self._suspects.put_nowait(job)
            elif not self._drain_time_is_over:
                admission = group.create_task(self._admit(job), name=f"admit {job.id}")
                self._admissions.add(admission)
                admission.add_done_callback(self._admissions.discard)

    def _is_suspect(self, job: RunningJob) -> bool:
        """Whether this is the last attempt of a job whose earlier workers died while they ran it among others."""
        return job.deaths_without_progress >= max(1, self._config.broker.max_attempts - 1)

    async def _run_suspects(self) -> None:
        """Admit suspects one at a time, so that a death of this worker is charged to the right job."""
        while True:
            job = await self._suspects.get()
            if not job.ended:
                await self._lease.start_trial(job.id)
                await self._admit(job)
                await job.progressed.wait()
                await self._outbox.committed()

    async def _admit(self, job: RunningJob) -> None:
        """Tokenise the prompt, so that the next step adds the job to the engine.

        A refusal ends the job. A batch job without memory for its grammar goes back to the queue.
        """
        tokens = self._tokens
        began = None if tokens is None else lambda: tokens.tokenising(job.id, time.monotonic())
        try:
            job.tokenised(await self._tokeniser.encode(job.id, job.request, began))
        except AdmissionRefused as refused:
            if job.ended:  # it may have been cancelled or have expired while it was tokenised
                return
            if isinstance(refused, NoGrammarMemory) and job.request.job_class is JobClass.BATCH:
                await self._release([job])
            else:
                self._end(job, JobState.FAILED, refused.reason)
            return
        if job.ended:
            return
        for event in job.prompt_events():
            self._outbox.put(job.id, event)
        if job.request.prompt_only:
            self._end(job, JobState.DONE)
            return
        if tokens is not None:
            tokens.tokenised(job.id, time.monotonic())
        self._admitted.append(job)
        self._wake.set()

    # Step and commit

    async def _run_steps(self) -> None:
        """Run step after step until the worker has drained."""
        while True:
            while not (self._engine_has_work or self._admitted or self._aborts):
                if self._drain_time_is_over or (self._claiming_is_over and not self._jobs):
                    return
                self._wake.clear()
                await self._wake.wait()
            if self._drain_time_is_over:
                return
            await self._step()
            await self._outbox.has_room()

    async def _step(self) -> None:
        """Run one step of the engine and queue its events for the next commit."""
        aborts, self._aborts = self._aborts, []
        adds, self._admitted = [job for job in self._admitted if not job.ended], []
        if self._tokens is not None:
            for added in adds:
                self._tokens.added(added.id, time.monotonic())
        result = await self._engine.step(aborts, adds, launch_next=lambda: not (self._admitted or self._aborts))
        self._engine_has_work = result.has_work
        for job_id, reason in result.refused:
            if (job := self._jobs.get(job_id)) is not None:
                self._end(job, JobState.FAILED, reason)
        now = time.monotonic()
        for output in result.outputs:
            if self._tokens is not None and result.record is not None:
                self._tokens.token(result.record, output.request_id, output.index, len(output.token_ids), now)
            self._record(output, now)
        for job in self._jobs.values():
            if job.gathered_at is not None and now - job.gathered_at > GATHERED_SECONDS:
                self._write_gathered(job)
        self._expire()
        self._outbox.seal(self._tokens.published() if self._tokens is not None else None)

    def _write_gathered(self, job: RunningJob) -> None:
        self._put(job, job.gathered_events())

    def _put(self, job: RunningJob, events: Sequence[TokenEvent]) -> None:
        for event in events:
            self._outbox.put(job.id, event)
        if events and self._tokens is not None:
            self._tokens.publish(job.id)

    def _record(self, output: SequenceOutput, now: float) -> None:
        """Turn an output into events of its job."""
        job = self._jobs.get(output.request_id)
        if job is None:  # it ended during this step, and the next step aborts it
            return
        has_started = job.progressed.is_set()
        events = job.events(output, now, followed=job.id in self._lease.followed)
        self._put(job, events)
        if events and (output.finish_reason is not None or not has_started):
            self._rows_freed.set()
        if job.ended:
            self._forget(job)
            if output.error is not None:
                self._aborts.append(job.id)

    # Ends of jobs

    def _cancel(self, job_ids: set[str]) -> None:
        for job_id in job_ids:
            if (job := self._jobs.get(job_id)) is not None:
                self._abort(job, JobState.CANCELLED, Cancelled("the job was cancelled").info())

    def _expire(self) -> None:
        now = time.monotonic()
        for job in [job for job in self._jobs.values() if job.deadline is not None and job.deadline <= now]:
            late = DeadlineExceeded(
                "the job's deadline passed before it was done", param="expires_in", limit=job.request.expires_in
            )
            self._abort(job, JobState.EXPIRED, late.info())

    def _abort(self, job: RunningJob, state: JobState, error: ErrorInfo) -> None:
        self._aborts.append(job.id)
        self._end(job, state, error)

    def _end(self, job: RunningJob, state: JobState, error: ErrorInfo | None = None) -> None:
        """Commit the job's last event."""
        self._write_gathered(job)
        self._outbox.put(job.id, job.end(state, error))
        self._outbox.seal()
        self._forget(job)

    def _forget(self, job: RunningJob) -> None:
        del self._jobs[job.id]
        if self._tokens is not None:
            self._tokens.ended(job.id)
        self._rows_freed.set()
        self._wake.set()

    # End of the incarnation

    async def _limit_drain(self) -> None:
        """Once the worker drains, end it after `worker.drain_seconds`."""
        await self._draining.wait()
        self._wake.set()
        await asyncio.sleep(self._config.worker.drain_seconds)
        self._drain_time_is_over = True
        self._wake.set()

    async def _clear_engine(self) -> None:
        """Drop all jobs from the engine, because another worker may run them by now."""
        await self._engine.clear([*self._jobs, *self._aborts], self._config.worker.stall_seconds)


def _decisive(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The exception that decides what happens next. A lost lease is survivable; anything else ends the process."""
    leaves = [_decisive(error) if isinstance(error, BaseExceptionGroup) else error for error in errors.exceptions]
    return next((leaf for leaf in leaves if not isinstance(leaf, LeaseLost)), leaves[0])
