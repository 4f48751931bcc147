"""The next step, built while the device still computes the current one. See docs/adr/0025."""

from dataclasses import dataclass

import torch

from ktqueue.engine.batch import Batch
from ktqueue.engine.scheduler import StepPlan
from ktqueue.engine.sequence import SequenceStatus


@dataclass(slots=True)
class PreparedStep:
    """A decode step whose token ids are not known yet: `BatchBuilder.write_token_ids` adds them to `batch`.

    While the scheduler's version is still `schedule_version`, it would plan exactly this step. Otherwise the step is
    dropped, which wastes nothing: pages allocated for it belong to the sequences. `launches_at_once`: launching it
    takes no time and no memory. `logits`: the result, once the step is launched.
    """

    plan: StepPlan
    batch: Batch
    schedule_version: int
    launches_at_once: bool
    logits: torch.Tensor | None = None

    def is_next(self, schedule_version: int) -> bool:
        """Whether this is the next step. A launched step is, unless all its sequences were aborted since."""
        if self.logits is None:
            return self.schedule_version == schedule_version
        return any(sequence.status is SequenceStatus.RUNNING for sequence in self.plan.rows)
