"""CaptureChoice: whether a decode step replays its captured step or runs eagerly, by measured times.

A captured step costs the host nothing, but it is the same each time. An eager step can copy as many experts to the
device as is best now (`operators/gpu/experts/streaming.py`). Which is faster depends on rows, memory and bus. Pure.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

FIRST_CAPTURED, FIRST_EAGER = 4, 16  # steps of each way before they are compared: the eager way learns meanwhile
RETRIED_AFTER = 256  # steps, for RETRIED_STEPS steps of the way that was slower
RETRIED_STEPS = 3
KEPT = 5  # last times of each way


@dataclass(slots=True)
class _Size:
    """The steps of one number of rows. `steps` counts since the last retrial."""

    captured: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    eager: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    steps: int = 0
    is_compared: bool = False


class CaptureChoice:
    """Chooses the way of each decode step by its bucket's rows, and learns from its seconds."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}

    def is_eager(self, rows: int) -> bool:
        """Whether the next step of a bucket of `rows` rows should run eagerly."""
        size = self._sizes.setdefault(rows, _Size())
        if not size.is_compared:
            return size.steps >= FIRST_CAPTURED
        slower = median(size.eager) > median(size.captured)
        return not slower if size.steps < RETRIED_AFTER else slower

    def learn(self, rows: int, *, eager: bool, seconds: float) -> None:
        """Learn from a step that took `seconds`."""
        size = self._sizes.setdefault(rows, _Size())
        (size.eager if eager else size.captured).append(seconds)
        size.steps += 1
        if size.steps >= (RETRIED_AFTER + RETRIED_STEPS if size.is_compared else FIRST_CAPTURED + FIRST_EAGER):
            if size.eager and size.captured:
                size.is_compared = True
            size.steps = 0
