"""The next step, built while the device still computes the current one. See docs/adr/0025 and 0058."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch

from ktqueue.engine.batch import Batch, BatchBuilder
from ktqueue.engine.drafts import Drafts
from ktqueue.engine.logits import Logits
from ktqueue.engine.rows import Rows
from ktqueue.engine.runner import DeviceTokens, Runner
from ktqueue.engine.scheduler import Scheduler
from ktqueue.engine.sequence import Sequence, SequenceStatus
from ktqueue.engine.step_plan import StepPlan
from ktqueue.engine.token_masks import TokenMasks

STEPS_AFTER_REDRAW = 16  # that are not launched ahead after one was launched with a wrong token

MayLaunch = Callable[[], bool]
"""Says whether the next step may be launched now. Requests that are added after that join one step later."""


def never() -> bool:
    """A MayLaunch that always refuses."""
    return False


@dataclass(slots=True)
class PreparedStep:
    """A decode step whose token ids are not known yet: `BatchBuilder.write_token_ids` adds them to `batch`.

    If the version of the rows is `version` once the current step is done, the scheduler would plan exactly this step.
    Otherwise the step is dropped, which wastes nothing: pages allocated for it belong to the sequences.
    `launches_at_once`: launching it takes no time and no memory. `logits`: the result, once the step is launched. It
    began at the time `launched`, or when the step before was done. Rows of sequences that have ended since are ignored.
    """

    plan: StepPlan
    batch: Batch
    version: int
    launches_at_once: bool
    logits: Logits | None = None
    launched: float = 0.0

    def is_next(self, version: int) -> bool:
        """Whether this is the next step. A launched step is, unless all its sequences have ended since."""
        if self.logits is None:
            return self.version == version
        return any(sequence.status is SequenceStatus.RUNNING for sequence in self.plan.rows)


class NextStep:
    """Prepares the step after the current one.

    `taken`: number of prepared steps that were really the next. `ahead`: those of them that were launched before the
    host knew their tokens. `drafts`: None for an engine that never drafts. A step with drafts is not prepared, because
    drafts follow from the tokens before. So a step is dropped if drafts are better, and not launched ahead if they will
    probably be.
    """

    def __init__(
        self,
        rows: Rows,
        scheduler: Scheduler,
        builder: BatchBuilder,
        runner: Runner,
        masks: TokenMasks,
        drafts: Drafts | None = None,
    ) -> None:
        self.taken = self.ahead = 0
        self._patience = 0  # steps until one may be launched ahead again
        self._rows = rows
        self._scheduler = scheduler
        self._builder = builder
        self._runner = runner
        self._masks = masks
        self._drafts = drafts
        self._prepared: PreparedStep | None = None

    def prepare(self, sequences: Many[Sequence], may_launch: MayLaunch, tokens: torch.Tensor, are_final: bool) -> None:
        """Build the next step without its token ids, while the device computes the current one.

        `tokens`, [sequences] int64 on the device, are the token ids that the current step chooses for `sequences`. If
        the next step needs no others, it is launched with them, unless it would make a request wait for too long.
        `are_final`: see Meanwhile. If they may be wrong, the step keeps the states that it reads, so that it can be
        computed again.
        """
        plan = self._scheduler.plan_next_step(may_repeat=not are_final)
        if plan is None:
            return
        batch = self._builder.build(plan.rows)
        launches_at_once = self._runner.prepare(batch)
        prepared = PreparedStep(plan, batch, self._rows.version + plan.ending, launches_at_once)
        self._prepared = prepared
        self._patience = max(0, self._patience - 1)
        waits = self._patience > 0 or (self._drafts is not None and self._drafts.may_be_wanted(plan))
        if launches_at_once and not waits and self._scheduler.may_launch_ahead(plan):
            places = {sequence: place for place, sequence in enumerate(sequences)}
            if plan.rows.keys() <= places.keys() and may_launch():
                known = DeviceTokens(tokens, [places[sequence] for sequence in plan.rows])
                prepared.logits = self._runner.execute(batch, known)

    def launch(self, may_launch: MayLaunch, *, redrawn: bool) -> None:
        """Launch the prepared step if it is valid, costs no time, is not long, and the caller agrees.

        Call it once the sequences have their tokens. If the step was launched ahead, nothing is left to do, unless a
        token was `redrawn` since.
        """
        prepared = self._prepared
        if prepared is None:
            return
        if prepared.logits is not None:
            if not redrawn:
                prepared.launched = time.monotonic()  # about when the device began with it
                self.ahead += 1
                self._masks.begin({one: 1 for one in prepared.plan.rows if one.status is SequenceStatus.RUNNING})
                return
            prepared.logits = None
            self._patience = STEPS_AFTER_REDRAW
        if self._drafts is not None and prepared.is_next(self._rows.version) and self._drafts.are_wanted(prepared.plan):
            self._prepared = None
            return
        if not prepared.launches_at_once or self._scheduler.is_long(prepared.plan):
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

    def drop(self) -> None:
        """Forget the prepared step, which is not launched."""
        self._prepared = None

    @property
    def is_launched(self) -> bool:
        """Whether the device computes it already."""
        return self._prepared is not None and self._prepared.logits is not None

    def close(self) -> None:
        """Wait for a step that is launched already."""
        if self.is_launched:
            self._runner.wait()
