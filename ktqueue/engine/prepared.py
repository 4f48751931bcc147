"""PreparedStep: the next step, made while the device is still at the last one. See docs/adr/0025."""

from dataclasses import dataclass

from ktqueue.engine.batch import Batch
from ktqueue.engine.scheduler import Plan


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step in which all rows go on by the token that the last step gives them, which `batch` has to be told.

    It holds while `changes` is what the scheduler counts: then nobody came, ended, was aborted or preempted since, and
    `schedule` would plan the same. Otherwise it is dropped, which costs nothing: pages taken for it are the sequences'.
    """

    plan: Plan
    batch: Batch
    changes: int
