"""Routing of the tokens of a layer call, such that no call finds weights of an earlier call in a cache.

All calls of a figure do the same work. A pattern of choices is drawn once, and each call shifts it by the number of
experts that it uses. An expert is used again only after all others.
"""

from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt

DRAWS = 9  # of random routing; the draw with the median number of used experts is taken

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pattern:
    """choices: [tokens, experts_per_token] int64 of 0..touched-1, without repetition in a row; each number occurs."""

    choices: Integers
    touched: int

    @property
    def pairs(self) -> int:
        """Number of (token, expert) pairs."""
        return self.choices.size

    def calls(self, experts: int) -> list[Integers]:
        """top_k_index of each call of a cycle through `experts` experts, which ends where it began."""
        count = experts // gcd(experts, self.touched)
        return [(self.choices + i * self.touched) % experts for i in range(count)]


def same_experts(tokens: int, experts_per_token: int) -> Pattern:
    """All tokens choose the same experts: `tokens` rows for each used expert."""
    return Pattern(np.tile(np.arange(experts_per_token, dtype=np.int64), (tokens, 1)), experts_per_token)


def uniform(tokens: int, experts: int, experts_per_token: int, random: np.random.Generator) -> Pattern:
    """Each token chooses its experts at random, with equal probability: a typical draw of several."""
    draws = [_draw(tokens, experts, experts_per_token, random) for _ in range(DRAWS)]
    return sorted(draws, key=lambda draw: draw.touched)[DRAWS // 2]


def _draw(tokens: int, experts: int, experts_per_token: int, random: np.random.Generator) -> Pattern:
    order = np.argsort(random.random((tokens, experts)), axis=1)[:, :experts_per_token]
    distinct, numbers = np.unique(order, return_inverse=True)
    return Pattern(numbers.reshape(order.shape).astype(np.int64), len(distinct))
