"""EngineThread: the one thread that calls the engine. The event loop awaits one step after another.

Knows requests, outputs and statistics; no leases and no journals.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

from ktqueue.broker.models import HELD_BY
from ktqueue.core.errors import ErrorInfo
from ktqueue.core.thread_names import name_thread
from ktqueue.engine.engine import Engine
from ktqueue.engine.outputs import SequenceOutput
from ktqueue.profiling.records import StepRecord
from ktqueue.workers.generation.admission import error_info
from ktqueue.workers.generation.heartbeat import EngineStalled, StepClock
from ktqueue.workers.generation.running_job import RunningJob

STATS_SECONDS = 0.25  # at the end of a step, statistics older than this are refreshed
RATE_COUNTERS = ("generation_tokens", "batch_tokens", "prompt_tokens")
RATE_WINDOW_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outputs of one step. `refused`: ids of jobs that the engine did not accept, each with the reason. `record`: that
    of the step, while a profile is written."""

    outputs: list[SequenceOutput]
    refused: list[tuple[str, ErrorInfo]] = field(default_factory=list)
    has_work: bool = False
    record: StepRecord | None = None


class EngineThread:
    """Calls an engine in a thread. `stats`: the engine's latest statistics. `clock` measures the current step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, "engine", name_thread, ("ktq-engine",))
        self._stats_taken_at = 0.0
        self.clock = StepClock()
        self.stats: dict[str, float] = {}
        self._take_stats()

    async def step(
        self, aborts: Sequence[str], adds: Sequence[RunningJob], *, launch_next: Callable[[], bool]
    ) -> StepResult:
        """Abort requests, add jobs, and run one step if the engine has work. An exception means that the engine broke.

        `launch_next` is called in the engine's thread at the end of the step. It says whether no request is waiting to
        be added or aborted, so that a GPU may launch the next step at once.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._step, aborts, adds, launch_next)

    async def clear(self, request_ids: Sequence[str], within: float) -> None:
        """Wait for the current step, then abort these requests. Raises EngineStalled after `within` seconds."""
        try:
            async with asyncio.timeout(within):
                await asyncio.get_running_loop().run_in_executor(self._thread, self._abort, request_ids)
        except TimeoutError as error:
            raise EngineStalled(f"the current step did not end within {within:g} s", limit=within) from error

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _step(self, aborts: Sequence[str], adds: Sequence[RunningJob], launch_next: Callable[[], bool]) -> StepResult:
        self.clock.start()
        try:
            self._abort(aborts)
            refused = [(job.id, reason) for job in adds if (reason := self._add(job)) is not None]
            outputs = self._engine.step(launch_next) if self._engine.has_work else []
            has_work = self._engine.has_work
            if not has_work:
                self._engine.forget_grammars()
            if not has_work or time.monotonic() - self._stats_taken_at > STATS_SECONDS:
                self._take_stats()
            recorder = self._engine.recorder
            return StepResult(outputs, refused, has_work, recorder.take() if recorder is not None else None)
        finally:
            self.clock.stop()

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._engine.abort(request_id)

    def _add(self, job: RunningJob) -> ErrorInfo | None:
        try:
            self._engine.add(
                job.id,
                job.prompt.token_ids,
                job.request.sampling,
                job_class=job.request.job_class,
                arrival=job.rank,
                emitted=job.emitted if job.resumed else (),
                prompt_entries=job.prompt_entries,
                bad_words=job.prompt.bad_words,
                matcher=job.prompt.matcher,
                owner=job.owner,
            )
        except Exception as error:  # a bad request ends its own job only
            self._engine.abort(job.id)
            return error_info(error, job.id, "adding the request to the engine")
        return None

    def _take_stats(self) -> None:
        stats = asdict(self._engine.stats()) | dict(self._engine.model_stats())
        self.stats = {name: float(value) for name, value in stats.items() if isinstance(value, int | float)}
        if held_by := stats["rows_held_by"]:
            self.stats[f"{HELD_BY}{held_by}"] = 1.0
        self._stats_taken_at = time.monotonic()


class TokenRates:
    """Tokens per second over the last RATE_WINDOW_SECONDS, computed from counters that only grow.

    `update` is called at each heartbeat. If heartbeats are further apart than the window, the rate is that between the
    last two.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, dict[str, float]]] = deque()

    def update(self, now: float, stats: Mapping[str, float]) -> dict[str, float]:
        """Return `NAME_per_second` for each of RATE_COUNTERS. `now`: seconds of a clock that only grows."""
        self._samples.append((now, {name: stats.get(name, 0.0) for name in RATE_COUNTERS}))
        while len(self._samples) > 2 and now - self._samples[1][0] >= RATE_WINDOW_SECONDS:
            self._samples.popleft()
        begin, before = self._samples[0]
        seconds = now - begin
        latest = self._samples[-1][1]
        return {
            f"{name}_per_second": (latest[name] - before[name]) / seconds if seconds else 0.0 for name in RATE_COUNTERS
        }
