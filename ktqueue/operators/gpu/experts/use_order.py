"""UseOrder: which absent experts a long step should copy to the GPU, and how much is left for the CPU. Pure.

A trained router uses few experts often: in a trace of 128 experts, the least used quarter of a layer has 4 % of all
uses (benchmarks/figures/placement.md). They take as long to copy as others, and are hardly any work for the CPU.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

LEVELS = 16
HALF_LIFE_TOKENS = 1 << 16  # after so many tokens a use counts half for the order
RECENT_TOKENS = 1 << 12  # the same for `left`: an order that is good for most texts may be bad for the present one
LEAST_TOKENS = 1024  # before that, uses are a matter of chance
MOST_RATIO, MOST_MARGIN = 1.25, 0.01  # uses that the order may leave for the CPU, beyond those that the best one leaves
Flags = npt.NDArray[np.bool_]


class UseOrder:
    """The experts of each layer, the most used first. It stays while it is almost the best one, since lists of copies
    depend on it.

    experts, experts_per_token: of each layer. is_absent: [layers, experts], which are not in GPU memory. version: grows
    with each change of the order. left: of recent uses, the part that the CPU has while a step copies 0, 1, ... LEVELS
    sixteenths of the absent experts, those that are first in the order; as of the last `improve`.
    """

    def __init__(self, experts: Sequence[int], experts_per_token: Sequence[int], is_absent: Flags) -> None:
        self._per_token = np.asarray(experts_per_token, np.float64)
        self._uses = self._recent = np.zeros(is_absent.shape)
        self._exists = np.arange(is_absent.shape[1]) < np.asarray(experts)[:, None]
        self._order = np.tile(np.arange(is_absent.shape[1]), (len(is_absent), 1))
        self.version = 0
        self.left = self._left(self._recent, self._order, is_absent, range(LEVELS + 1))

    def start(self, uses: npt.NDArray[np.float64]) -> None:
        """Forget all uses and begin with those of earlier runs, [layers, experts]."""
        tokens = (uses.sum(1) / self._per_token)[:, None]
        self._uses, self._recent = (
            uses * (most / np.maximum(tokens, most)) for most in (HALF_LIFE_TOKENS, RECENT_TOKENS)
        )

    def learn(self, uses: npt.NDArray[np.int32]) -> None:
        """Add uses [layers, experts]."""
        tokens = float((uses.sum(1) / self._per_token).max(initial=0.0))
        self._uses = self._uses * 0.5 ** (tokens / HALF_LIFE_TOKENS) + uses
        self._recent = self._recent * 0.5 ** (tokens / RECENT_TOKENS) + uses

    def first(self, layer: int, count: int, is_absent: Flags) -> npt.NDArray[np.int64]:
        """The numbers of the `count` absent experts of a layer that are used most, in rising order."""
        order = self._order[layer]
        return np.sort(order[is_absent[layer, order] & self._exists[layer, order]][:count])

    def improve(self, is_absent: Flags) -> None:
        """Change the order if the known uses ask for it, and `left`. It takes a millisecond."""
        best = (-self._uses).argsort(axis=1, kind="stable")
        (left,), (least,) = (self._left(self._uses, order, is_absent, [LEVELS // 2]) for order in (self._order, best))
        known = self._uses.sum(1).max(initial=0.0) >= LEAST_TOKENS * self._per_token.max(initial=0.0)
        if known and left > MOST_RATIO * least + MOST_MARGIN:
            self._order = best
            self.version += 1
        self.left = self._left(self._recent, self._order, is_absent, range(LEVELS + 1))

    def _left(
        self, uses: npt.NDArray[np.float64], order: npt.NDArray[np.int64], is_absent: Flags, levels: Sequence[int]
    ) -> tuple[float, ...]:
        """`left` at `levels` by these uses, if experts were copied in this order. Without uses, all experts are used
        alike."""
        uses = np.where(uses.sum(1, keepdims=True) > 0, uses, self._exists)
        absent = np.take_along_axis(is_absent & self._exists, order, 1)
        parts = np.take_along_axis(uses, order, 1) * absent / np.maximum(uses.sum(1, keepdims=True), 1e-30)
        rank = absent.cumsum(1)  # among the absent ones, from 1
        copied = (np.rint(rank[:, -1:] * level / LEVELS) for level in levels)
        return tuple(float((parts * (rank > count)).sum() / len(parts)) for count in copied)
