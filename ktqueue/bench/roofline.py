"""The least time for work on a machine with a given bandwidth and arithmetic.

The roofline model (Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", 2009): work
that reads and computes at once takes at least the longer of the two times.
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
class LayerWork:
    """What a layer call reads and computes. bytes: of weights as stored in a file; a multiply-add is two operations."""

    bytes: int
    operations: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the machine. bandwidth: bytes per second; peak: operations per second."""

    bandwidth: float
    peak: float

    def seconds(self, work: LayerWork) -> float:
        """The least time that `work` can take."""
        return max(work.bytes / self.bandwidth, work.operations / self.peak)

    def bound(self, work: LayerWork) -> Bound:
        """The limit that determines this time."""
        return Bound.MEMORY if work.bytes / self.bandwidth >= work.operations / self.peak else Bound.ARITHMETIC


def layer_work(shape: LayerShape, expert_bytes: int, *, touched: int, pairs: int) -> LayerWork:
    """Work of a layer call that uses `touched` experts of `expert_bytes` each, with `pairs` (token, expert) pairs."""
    return LayerWork(touched * expert_bytes, 2 * shape.expert_weights * pairs)
