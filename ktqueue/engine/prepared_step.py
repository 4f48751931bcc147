"""The next step, built while the device still computes the current one. See docs/adr/0025."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ktqueue.engine.batch import Batch, BatchBuilder
from ktqueue.engine.rows import Rows
from ktqueue.engine.runner import Runner
from ktqueue.engine.scheduler import Scheduler
from ktqueue.engine.sequence import SequenceStatus
from ktqueue.engine.step_plan import StepPlan
from ktqueue.engine.token_masks import TokenMasks


@dataclass(slots=True)
class PreparedStep:
    """A decode step whose token ids are not known yet: `BatchBuilder.write_token_ids` adds them to `batch`.

    While the version of the rows is still `version`, the scheduler would plan exactly this step. Otherwise the step is
    dropped, which wastes nothing: pages allocated for it belong to the sequences. `launches_at_once`: launching it
    takes no time and no memory. `logits`: the result, once the step is launched, at the time `launched`.
    """

    plan: StepPlan
    batch: Batch
    version: int
    launches_at_once: bool
    logits: torch.Tensor | None = None
    launched: float = 0.0

    def is_next(self, version: int) -> bool:
        """Whether this is the next step. A launched step is, unless all its sequences were aborted since."""
        if self.logits is None:
            return self.version == version
        return any(sequence.status is SequenceStatus.RUNNING for sequence in self.plan.rows)


class NextStep:
    """Prepares the step after the current one. `taken`: number of prepared steps that were really the next."""

    def __init__(
        self, rows: Rows, scheduler: Scheduler, builder: BatchBuilder, runner: Runner, masks: TokenMasks
    ) -> None:
        self.taken = 0
        self._rows = rows
        self._scheduler = scheduler
        self._builder = builder
        self._runner = runner
        self._masks = masks
        self._prepared: PreparedStep | None = None

    def prepare(self) -> None:
        """Build the next step without its token ids, while the device computes the current one."""
        plan = self._scheduler.plan_next_step()
        if plan is not None:
            batch = self._builder.build(plan.rows)
            launches_at_once = self._runner.prepare(batch)
            self._prepared = PreparedStep(plan, batch, self._rows.version, launches_at_once)

    def launch(self, may_launch: Callable[[], bool]) -> None:
        """Launch the prepared step if it is valid, costs no time, is not long, and the caller agrees."""
        prepared = self._prepared
        if prepared is None or not prepared.launches_at_once or self._scheduler.is_long(prepared.plan):
            return
        if prepared.is_next(self._rows.version) and may_launch():
            self._builder.write_token_ids(prepared.batch, prepared.plan.rows)
            self._masks.begin(prepared.plan.rows)
            prepared.launched = time.monotonic()
            prepared.logits = self._runner.execute(prepared.batch)

    def take(self) -> PreparedStep | None:
        """The prepared step with its token ids, if it is still the next one."""
        prepared, self._prepared = self._prepared, None
        if prepared is None or not prepared.is_next(self._rows.version):
            return None
        self.taken += 1
        if prepared.logits is None:
            self._builder.write_token_ids(prepared.batch, prepared.plan.rows)
        return prepared

    @property
    def is_launched(self) -> bool:
        """Whether the device computes it already."""
        return self._prepared is not None and self._prepared.logits is not None

    def close(self) -> None:
        """Wait for a step that is launched already."""
        if self.is_launched:
            self._runner.wait()
