"""StepCounts: what steps compute of experts in GPU memory and fetch, from the uses of each step. Pure."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ktqueue.operators.gpu.experts.pool import ABSENT, ExpertPool
from ktqueue.operators.gpu.experts.step import RoutedLayer

Fetched = Callable[[int, int, int], int]
"""(layer, tokens, absent experts that are used) -> experts that a step fetches."""


class StepCounts:
    """Counts steps whose uses `observe` is given one by one. `fetched`: of a short step. Long ones fetch nothing.

    gpu_experts: different experts of each step and layer that had a slot, summed. fetched_bytes: weights that kernels
    fetched. Each reading of uses is compared with the slots of that moment, and counts as one step.
    """

    def __init__(self, layers: list[RoutedLayer], pool: ExpertPool, fetched: Fetched) -> None:
        self._layers = layers
        self._pool = pool
        self._fetched = fetched
        self.gpu_experts = self.fetched_bytes = 0

    def observe(self, uses: npt.NDArray[np.int32], steps: int, is_long: bool) -> None:
        """Count the uses [layers, experts] of a reading. is_long: one of the steps was."""
        used, present = uses > 0, self._pool.host != ABSENT
        self.gpu_experts += int((used & present).sum())
        if is_long:
            return
        absent = (used & ~present).sum(1)
        tokens = uses.sum(1) // np.array([layer.experts_per_token for layer in self._layers])
        for index, layer in enumerate(self._layers):
            if absent[index]:
                count = self._fetched(index, max(1, int(tokens[index]) // steps), int(absent[index]))
                self.fetched_bytes += count * layer.record.bytes
