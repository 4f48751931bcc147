"""What an engine notes of its steps: their times so far for its statistics, and a record of each for a profile."""

from dataclasses import dataclass

from ktqueue.core.expert_work import ExpertUses, ExpertWork, PlacesExperts
from ktqueue.engine.batch import BatchBuilder
from ktqueue.engine.gpu.device_model import DeviceModel, expert_counts
from ktqueue.engine.pages import Pages
from ktqueue.engine.prepared_step import NextStep
from ktqueue.engine.runner import Runner
from ktqueue.engine.scheduler import Scheduler
from ktqueue.engine.step_plan import StepPlan
from ktqueue.engine.step_sampler import StepSampler
from ktqueue.operators.named_ranges import NamedRange, name_methods
from ktqueue.profiling.records import RoutingRecord, StepMoments, StepRecord, Totals
from ktqueue.profiling.writer import RecordWriter

_WRAP = 1 << 32  # of the counts of uses


@dataclass(slots=True)
class StepTimes:
    """Number of steps, and seconds of wall time in their parts: see EngineStats."""

    steps: int = 0
    schedule: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    commit: float = 0.0

    def add(self, step: StepMoments) -> None:
        """Add one step."""
        self.steps += 1
        self.schedule += step.built - step.began
        self.forward += step.launched - step.built + step.waited
        self.sample += step.sampled - step.launched - step.waited
        self.commit += step.ended - step.sampled


class StepRecorder:
    """Records each step of one engine. The uses of experts are recorded every `routing_seconds`, if they are counted.

    `prompt_tokens`: computed so far.
    """

    def __init__(
        self,
        writer: RecordWriter,
        routing_seconds: float,
        model: DeviceModel,
        pages: Pages,
        runner: Runner,
        next_step: NextStep,
        prompt_tokens: int,
    ) -> None:
        self.writer = writer
        self._routing_seconds = routing_seconds
        self._counts = expert_counts(model)
        if isinstance(self._counts, PlacesExperts):
            self._counts.count_each_step()
        self._model = model
        self._pages = pages
        self._runner = runner
        self._next = next_step
        self._totals = Totals(prompt_tokens, runner.replayed, next_step.taken, self._work_so_far())
        self._steps = self._routed_steps = 0
        self._next_routing = 0.0  # seconds of the monotonic clock
        self._uses: ExpertUses | None = None
        self._last: StepRecord | None = None

    def record(self, moments: StepMoments, plan: StepPlan, *, sampled: int, prompt_tokens: int) -> None:
        """Record a step. sampled: its rows that got a token. prompt_tokens: computed so far."""
        self._steps += 1
        before, pages = self._totals, self._pages
        self._totals = Totals(prompt_tokens, self._runner.replayed, self._next.taken, self._work_so_far())
        self._last = StepRecord(
            self._steps,
            moments,
            len(plan.rows),
            sampled,
            plan.tokens,
            pages.total,
            pages.available,
            self._totals,
            before,
        )
        self.writer.put_step(self._last)
        if moments.ended > self._next_routing and self._counts is not None:
            self._next_routing = moments.ended + self._routing_seconds
            self._record_routing(moments.ended, self._counts.expert_uses())

    def take(self) -> StepRecord | None:
        """The record of the last step, unless it was taken before."""
        record, self._last = self._last, None
        return record

    def _work_so_far(self) -> ExpertWork | None:
        return self._counts.expert_work() if self._counts is not None else None

    def _record_routing(self, now: float, uses: ExpertUses | None) -> None:
        """Record the uses since the last call; the first call only begins."""
        before, self._uses = self._uses, uses
        steps, self._routed_steps = self._steps - self._routed_steps, self._steps
        if uses is not None and before is not None:
            new = [[(b - a) % _WRAP for a, b in zip(*rows, strict=True)] for rows in zip(before, uses, strict=True)]
            self.writer.put("routing", RoutingRecord(now, steps, new, self._model.statistics()))


def name_parts(
    named_range: NamedRange, scheduler: Scheduler, builder: BatchBuilder, runner: Runner, sampler: StepSampler
) -> None:
    """Run the parts of each step inside ranges with their names, for profilers of a GPU."""
    name_methods(scheduler, {"schedule": "schedule"}, named_range)
    name_methods(builder, {"build": "build"}, named_range)
    name_methods(runner, {"execute": "launch", "prepare": "prepare next", "wait": "wait"}, named_range)
    name_methods(sampler, {"sample": "sample"}, named_range)
