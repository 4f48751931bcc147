"""A clock that the engine sees instead of the machine's, and that a simulation moves.

The modules of the engine ask the module `time`. While `virtual_time` lasts, a VirtualClock takes its place in them, in
this process only. The product gets no parameter for that, because nobody else wants another clock than the machine's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from ktqueue.engine.batch_loss import BatchLoss
from ktqueue.engine.shared_steps import SharedSteps
from ktqueue.engine.step_costs import StepCosts

EPSILON = 1e-9  # seconds: what rounding leaves


class VirtualClock:
    """The part of the module `time` that the engine uses. Seconds pass when somebody says so.

    left: seconds that the overlapped step still takes if nothing is computed beside it; 0: there is none.
    """

    def __init__(self) -> None:
        self.left = 0.0
        self._now = 0.0

    def monotonic(self) -> float:
        """Seconds since the beginning."""
        return self._now

    time = perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        """Let time pass, in which only the overlapped step is computed."""
        self._pass(seconds, seconds)

    def compute(self, seconds: float, cpu_rate: float, bus_rate: float) -> None:
        """Compute a step that takes `seconds` alone. While the overlapped step is computed too, this one has `cpu_rate`
        of its speed, and that one `bus_rate`."""
        both = min(seconds / cpu_rate, self.left / bus_rate)
        self._pass(both, bus_rate * both)
        self.sleep(seconds - cpu_rate * both)

    def _pass(self, seconds: float, computed: float) -> None:
        self._now += seconds
        self.left -= computed
        if self.left < EPSILON:
            self.left = 0.0


@contextmanager
def virtual_time(clock: VirtualClock, loss: Callable[..., BatchLoss]) -> Iterator[None]:
    """Inside of it, the modules of the engine see `clock` as the time. `loss`: makes the BatchLoss of an engine."""
    timed: dict[str, Any] = {made.__name__: partial(made, clock=clock.monotonic) for made in (SharedSteps, StepCosts)}
    with (
        patch.multiple("ktqueue.engine.engine", time=clock, BatchLoss=partial(loss, clock=clock.monotonic), **timed),
        patch("ktqueue.engine.draft_model.time", clock),
        patch("ktqueue.engine.overlap.time", clock),
        patch("ktqueue.engine.prepared_step.time", clock),
        patch("ktqueue.workers.startup.step_probes.time", clock),
    ):
        yield
