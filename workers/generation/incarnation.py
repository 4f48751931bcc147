"""Incarnation: the work under one lease: claim, tokenise, step, commit, until the lease is lost or the worker drains.

While step n+1 computes, step n is committed and new claims are tokenised. Knows neither processes nor signals.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

from ktqueue.broker.lease import Claim, Lease
from ktqueue.core.config import Config
from ktqueue.core.errors import Cancelled, DeadlineExceeded, ErrorInfo, LeaseLost
from ktqueue.core.events import JobState
from ktqueue.core.request import JobClass
from ktqueue.workers.generation.admission import Refused, Tokeniser
from ktqueue.workers.generation.engine_thread import EngineThread
from ktqueue.workers.generation.heartbeat import Heartbeat
from ktqueue.workers.generation.outbox import Outbox
from ktqueue.workers.generation.rates import Rates
from ktqueue.workers.generation.running_job import RunningJob

STANDING_SECONDS = 10.0  # a batch job that has had no row for so long goes back: another worker may have one
IDLE_SECONDS = 0.5  # a lost wake-up costs no more than this

log = logging.getLogger(__name__)


class Incarnation:
    """One lease's worth of work. `rows` is how many rows the engine has; `draining` is set once, from outside."""

    def __init__(
        self,
        lease: Lease,
        engine: EngineThread,
        tokeniser: Tokeniser,
        config: Config,
        rows: int,
        draining: asyncio.Event,
    ) -> None:
        self._lease = lease
        self._engine = engine
        self._tokeniser = tokeniser
        self._config = config
        self._rows = rows
        self._batch_floor = config.engine.batch_floor(rows)
        self._draining = draining
        self._drain_over = False
        self._intake_over = False
        self._outbox = Outbox(lease, self._cancel)
        self._jobs: dict[str, RunningJob] = {}
        self._admitted: list[RunningJob] = []
        self._admissions: set[asyncio.Task[None]] = set()
        self._suspects: asyncio.Queue[RunningJob] = asyncio.Queue()
        self._aborts: list[str] = []
        self._has_work = False
        self._wake = asyncio.Event()  # something for the next turn, or the drain is over
        self._rows_freed = asyncio.Event()
        self._rates = Rates()
        self._heartbeat = Heartbeat(
            lease,
            engine.clock,
            self.stats,
            lease_seconds=config.broker.lease_seconds,
            stall_seconds=config.worker.stall_seconds,
        )

    async def run(self) -> None:
        """Work until drained. Raises LeaseLost, EngineStalled, or whatever broke the engine."""
        drain = asyncio.create_task(self._drain_timer())
        try:
            async with asyncio.TaskGroup() as group:
                parts = (self._outbox.run(), self._heartbeat.run(), self._try_out())
                background = [group.create_task(part) for part in parts]
                intake = group.create_task(self._intake(group))
                await self._generate()
                await intake
                background += self._admissions  # of jobs that go back to the queue
                await self._outbox.flush()
                if self._jobs:
                    log.info("drained; %d jobs go back to the queue", len(self._jobs))
                await self._lease.close()
                for task in background:
                    task.cancel()
            await self._drop_all()
        except BaseExceptionGroup as faults:
            gravest = _gravest(faults)
            if isinstance(gravest, LeaseLost):
                await self._drop_all()
            raise gravest from faults
        finally:
            drain.cancel()

    def stats(self) -> dict[str, float]:
        """Figures for the heartbeat."""
        told = self._engine.stats
        rates = self._rates.of(time.monotonic(), told)
        return {**told, **rates, "jobs": float(len(self._jobs)), "draining": float(self._draining.is_set())}

    # Claims

    async def _intake(self, group: asyncio.TaskGroup) -> None:
        claims: list[Claim] = []
        while not self._draining.is_set():
            await self._take(claims, group)
            await self._let_go()
            free, interactive = self._room()
            claims = await self._lease.claim(free, interactive, wait=True) if interactive > 0 else []
            if not claims:
                events: list[Coroutine[Any, Any, Any]] = []
                if interactive > 0:
                    events.append(self._lease.wait_for_work(IDLE_SECONDS, interactive_only=free == 0))
                if free == 0:
                    events.append(self._rows_freed.wait())
                claims = await self._until_drain(*events)
        claims += await self._lease.claim(0)  # given while it waited
        await self._lease.release([claim.job_id for claim in claims])
        self._intake_over = True
        self._wake.set()

    async def _let_go(self) -> None:
        """Give back the last batch jobs that have long stood still because interactive ones have their rows."""
        surplus = sum(job.rows for job in self._jobs.values()) - self._rows
        late = time.monotonic() - STANDING_SECONDS
        batch = (job for job in self._jobs.values() if job.request.job_class is JobClass.BATCH)
        released = []
        for job in sorted(batch, key=lambda one: one.rank, reverse=True):
            if surplus > 0 and job.moved_at < late:
                surplus -= job.rows
                released.append(job)
        for job in released:
            job.let_go()
            self._aborts.append(job.id)
            self._forget(job)
        if released:
            await self._lease.release([job.id for job in released])

    def _room(self) -> tuple[int, int]:
        """Rows for any job, and rows for interactive ones: beside the free ones those that the engine would take from
        batch jobs. No more is claimed, so that nothing waits inside the engine for a row that others use."""
        self._rows_freed.clear()
        batch = sum(job.rows for job in self._jobs.values() if job.request.job_class is JobClass.BATCH)
        interactive = sum(job.rows for job in self._jobs.values()) - batch
        return max(0, self._rows - interactive - batch), self._rows - interactive - min(batch, self._batch_floor)

    async def _take(self, claims: list[Claim], group: asyncio.TaskGroup) -> None:
        accepted = [RunningJob(claim) for claim in claims]
        for claim in claims:
            if claim.events or claim.attempt > 1:
                log.info("%s goes on after event %d, try %d", claim.job_id, len(claim.events), claim.attempt)
        self._jobs.update((job.id, job) for job in accepted)
        self._expire()
        for job in accepted:
            if self._is_suspect(job):
                self._suspects.put_nowait(job)
            elif not self._drain_over:
                admission = group.create_task(self._admit(job), name=f"admit {job.id}")
                self._admissions.add(admission)
                admission.add_done_callback(self._admissions.discard)

    def _is_suspect(self, job: RunningJob) -> bool:
        """Is this the last try of a job that shared workers with others before?"""
        return job.futile >= max(1, self._config.broker.max_attempts - 1)

    async def _try_out(self) -> None:
        """Admit suspects one by one, so that a death is that one's fault."""
        while True:
            job = await self._suspects.get()
            if not job.ended:
                await self._lease.try_out(job.id)
                await self._admit(job)
                await job.moved.wait()
                await self._outbox.committed()

    async def _admit(self, job: RunningJob) -> None:
        try:
            job.prompt_token_ids = await self._tokeniser.encode(job.id, job.request)
        except Refused as refused:
            if not job.ended:  # cancelled or expired meanwhile
                self._end(job, JobState.FAILED, refused.reason)
            return
        if job.ended:
            return
        self._admitted.append(job)
        self._wake.set()

    async def _until_drain(self, *events: Coroutine[Any, Any, Any]) -> list[Claim]:
        """Wait for the first of the events, or for the drain; the job that the lease was given meanwhile."""
        tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(one) for one in (*events, self._draining.wait())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next((given for task in done if isinstance(given := task.result(), list)), [])
        finally:
            for task in tasks:
                task.cancel()

    # Steps

    async def _generate(self) -> None:
        while True:
            while not (self._has_work or self._admitted or self._aborts):
                if self._drain_over or (self._intake_over and not self._jobs):
                    return
                self._wake.clear()
                await self._wake.wait()
            if self._drain_over:
                return
            await self._turn()
            await self._outbox.room()

    async def _turn(self) -> None:
        aborts, self._aborts = self._aborts, []
        adds, self._admitted = [job for job in self._admitted if not job.ended], []
        turn = await self._engine.turn(aborts, adds, lambda: not (self._admitted or self._aborts))
        self._has_work = turn.has_work
        for job_id, reason in turn.refused:
            if (job := self._jobs.get(job_id)) is not None:
                self._end(job, JobState.FAILED, reason)
        for output in turn.outputs:
            job = self._jobs.get(output.request_id)
            if job is None:  # ended while the step was under way; its abort comes with the next turn
                continue
            event = job.event(output)
            if event is not None:
                self._outbox.put(job.id, event)
                if output.finish_reason is not None:
                    self._rows_freed.set()
            if job.ended:
                self._forget(job)
                if output.error is not None:
                    self._aborts.append(job.id)
        self._expire()
        self._outbox.seal()

    # Ends

    def _cancel(self, job_ids: set[str]) -> None:
        for job_id in job_ids:
            if (job := self._jobs.get(job_id)) is not None:
                self._abort(job, JobState.CANCELLED, Cancelled("the job was cancelled").info())

    def _expire(self) -> None:
        now = time.time()
        for job in [one for one in self._jobs.values() if one.deadline is not None and one.deadline <= now]:
            late = DeadlineExceeded(
                "the job's deadline passed before it was done", param="expires_in", limit=job.request.expires_in
            )
            self._abort(job, JobState.EXPIRED, late.info())

    def _abort(self, job: RunningJob, state: JobState, error: ErrorInfo) -> None:
        self._aborts.append(job.id)
        self._end(job, state, error)

    def _end(self, job: RunningJob, state: JobState, error: ErrorInfo | None = None) -> None:
        self._outbox.put(job.id, job.end(state, error))
        self._outbox.seal()
        self._forget(job)

    def _forget(self, job: RunningJob) -> None:
        del self._jobs[job.id]
        self._rows_freed.set()
        self._wake.set()

    async def _drop_all(self) -> None:
        # Whoever holds these jobs next, this engine must not go on with them.
        await self._engine.clear([*self._jobs, *self._aborts], self._config.worker.stall_seconds)

    # Drain

    async def _drain_timer(self) -> None:
        await self._draining.wait()
        self._wake.set()
        await asyncio.sleep(self._config.worker.drain_seconds)
        self._drain_over = True
        self._wake.set()


def _gravest(faults: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one exception that says what to do: a lost lease is mended here, anything else ends the process."""
    leaves = [_gravest(one) if isinstance(one, BaseExceptionGroup) else one for one in faults.exceptions]
    return next((fault for fault in leaves if not isinstance(fault, LeaseLost)), leaves[0])
