"""PreparedStep: the next step, made while the device is still at the last one. See docs/adr/0025."""

from dataclasses import dataclass

import torch

from ktqueue.engine.batch import Batch
from ktqueue.engine.scheduler import Plan
from ktqueue.engine.sequence import Status


@dataclass(slots=True)
class PreparedStep:
    """A step in which all rows go on by the token that the last step gives them, which `batch` has to be told.

    It may be launched while `changes` is what the scheduler counts: then nobody came, ended, was aborted or preempted
    since, and `schedule` would plan the same. Otherwise it is dropped, which costs nothing: pages taken for it are the
    sequences'. `quick`: launching it takes no time and no memory. `logits`: of the step once it is launched.
    """

    plan: Plan
    batch: Batch
    changes: int
    quick: bool
    logits: torch.Tensor | None = None

    def holds(self, changes: int) -> bool:
        """Whether it is the next step. A launched one is, unless all its rows were aborted since."""
        if self.logits is None:
            return self.changes == changes
        return any(one.status is Status.RUNNING for one in self.plan.rows)
