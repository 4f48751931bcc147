"""EngineThread: the one thread that calls the engine, seen from the event loop as one awaitable turn after another.

Knows requests and outputs; no leases, no journals.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

from ktqueue.core.errors import ErrorInfo
from ktqueue.engine.engine import Engine
from ktqueue.engine.outputs import SequenceOutput
from ktqueue.workers.generation.admission import reason_for
from ktqueue.workers.generation.heartbeat import EngineStalled, StepClock
from ktqueue.workers.generation.running_job import RunningJob

STATS_SECONDS = 0.25  # figures older than this are taken anew at the end of a turn

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn gave. `refused` are jobs that the engine did not take, with the reason."""

    outputs: list[SequenceOutput]
    refused: list[tuple[str, ErrorInfo]] = field(default_factory=list)
    has_work: bool = False


class EngineThread:
    """`stats` are the engine's figures as of the last turns; `clock` shows how long the turn under way takes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._stats_at = 0.0
        self.clock = StepClock()
        self.stats: dict[str, float] = {}
        self._take_stats()

    async def turn(self, aborts: Sequence[str], adds: Sequence[RunningJob], go_on: Callable[[], bool]) -> Turn:
        """Abort, add, then make one step if there is anything to do. An exception here means that the engine broke.

        `go_on` is called in the engine's thread when the step is done: whether nobody waits for the next turn, so that
        a GPU may begin with its step.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._turn, aborts, adds, go_on)

    async def clear(self, request_ids: Sequence[str], within: float) -> None:
        """Wait for the step under way, then drop the given requests. Raises EngineStalled after `within` seconds."""
        try:
            async with asyncio.timeout(within):
                await asyncio.get_running_loop().run_in_executor(self._thread, self._abort, request_ids)
        except TimeoutError as error:
            raise EngineStalled(f"the step under way did not end within {within:g} s", limit=within) from error

    def close(self) -> None:
        """Let the thread go."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _turn(self, aborts: Sequence[str], adds: Sequence[RunningJob], go_on: Callable[[], bool]) -> Turn:
        self.clock.start()
        try:
            self._abort(aborts)
            refused = [(job.id, reason) for job in adds if (reason := self._add(job)) is not None]
            outputs = self._engine.step(go_on) if self._engine.has_work else []
            has_work = self._engine.has_work
            if not has_work or time.monotonic() - self._stats_at > STATS_SECONDS:
                self._take_stats()
            return Turn(outputs, refused, has_work)
        finally:
            self.clock.stop()

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._engine.abort(request_id)

    def _add(self, job: RunningJob) -> ErrorInfo | None:
        try:
            self._engine.add(
                job.id,
                job.prompt_token_ids,
                job.request.sampling,
                job_class=job.request.job_class,
                arrival=job.rank,
                emitted=job.emitted if job.resumed else (),
            )
        except Exception as error:  # one bad request ends one job
            self._engine.abort(job.id)
            return reason_for(error, job.id, "adding the request to the engine")
        return None

    def _take_stats(self) -> None:
        told = asdict(self._engine.stats()) | dict(self._engine.model_stats())
        self.stats = {name: float(value) for name, value in told.items() if isinstance(value, int | float)}
        self._stats_at = time.monotonic()
