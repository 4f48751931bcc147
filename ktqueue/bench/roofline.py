"""How long work must take on a machine that reads so fast and multiplies so fast: pure arithmetic.

The roofline model (Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", 2009): work
that reads and computes at once takes no less than the longer of the two alone.
"""

from dataclasses import dataclass
from enum import StrEnum


class Bound(StrEnum):
    """Which of the two limits binds."""

    MEMORY = "memory"
    ARITHMETIC = "arithmetic"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The routed experts of one layer: gate and up [intermediate, hidden], down [hidden, intermediate] of each."""

    hidden: int
    intermediate: int
    experts: int
    experts_per_token: int

    @property
    def expert_weights(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden * self.intermediate


@dataclass(frozen=True, slots=True)
class Work:
    """What one call reads and computes. bytes: of weights as a file stores them; a multiply-add is two operations."""

    bytes: int
    operations: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do. bandwidth: bytes a second; peak: operations a second."""

    bandwidth: float
    peak: float

    def seconds(self, work: Work) -> float:
        """The least time that `work` can take."""
        return max(work.bytes / self.bandwidth, work.operations / self.peak)

    def bound(self, work: Work) -> Bound:
        """Which limit that time comes from."""
        return Bound.MEMORY if work.bytes / self.bandwidth >= work.operations / self.peak else Bound.ARITHMETIC


def layer_work(shape: LayerShape, expert_bytes: int, *, touched: int, pairs: int) -> Work:
    """One layer call that touches `touched` experts of `expert_bytes` each, with `pairs` (token, expert) pairs."""
    return Work(touched * expert_bytes, 2 * shape.expert_weights * pairs)
