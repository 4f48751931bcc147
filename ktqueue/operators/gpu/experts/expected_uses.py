"""ExpectedUses: how often each expert will probably be used, by its long-run frequency and its recent uses. Pure."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Uses = npt.NDArray[np.float64]
"""[layers, experts]. Layers with fewer experts than others have 0 in the rest of their row."""

HALF_LIFE_STEPS = 128  # after this number of steps a recent use counts half
PRIOR_TOKENS = 64  # the long-run frequency counts as much as so many recent tokens
MOST_TOKENS = 64  # of a step that count, so that a long prompt does not outweigh the sequences that decode
MIN_RATIO, MIN_MARGIN = 1.25, 1.0  # an expert replaces another if it exceeds RATIO times the other plus MARGIN


class ExpectedUses:
    """Expected uses of each expert over the tokens of about the last HALF_LIFE_STEPS steps.

    The long-run frequency is a prior of PRIOR_TOKENS tokens, and recent uses are added to it. So with one sequence the
    recent uses decide, since its tokens use the same experts again. At the start, and where experts are equally recent,
    the frequency decides.

    values: [layers, experts]. experts_per_token: of each layer.
    """

    def __init__(self, experts_per_token: Sequence[int], experts: int) -> None:
        self._per_token = np.asarray(experts_per_token, np.float64)[:, None]
        self._recent = np.zeros((len(experts_per_token), experts))
        self._total = np.zeros_like(self._recent)
        self.values = np.zeros_like(self._recent)

    def start(self, uses: Uses) -> None:
        """Forget all uses and begin with those of earlier runs."""
        self._recent = np.zeros_like(self._recent)
        self._total = uses.astype(np.float64)
        self._estimate()

    def learn(self, uses: npt.NDArray[np.int32], steps: int) -> None:
        """Add the uses [layers, experts] of the last `steps` steps."""
        tokens = self._tokens(uses).max(initial=1.0)
        counted = min(1.0, MOST_TOKENS * steps / tokens)
        self._recent = self._recent * 0.5 ** (steps / HALF_LIFE_STEPS) + counted * uses
        self._total = self._total + uses
        self._estimate()

    def deserves(self, hot: float, cold: float) -> bool:
        """Whether an expert of value `hot` is worth replacing one of value `cold`."""
        return hot > MIN_RATIO * cold + MIN_MARGIN

    def _estimate(self) -> None:
        self.values = self._recent + PRIOR_TOKENS * self._total / np.maximum(1.0, self._tokens(self._total))

    def _tokens(self, uses: npt.NDArray[np.float64] | npt.NDArray[np.int32]) -> Uses:
        """How many tokens each layer has seen: [layers, 1]."""
        found: Uses = uses.sum(1, keepdims=True) / self._per_token
        return found
