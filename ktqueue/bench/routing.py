"""Which experts the tokens of a layer call go to, so that no call finds weights that an earlier one left in a cache.

All calls of a point do the same work: one pattern of choices is drawn, and each call moves it on by as many experts
as it touches. An expert comes up again only after all others.
"""

from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt

DRAWS = 9  # of random routing, of which the one with the middle number of experts is used

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pattern:
    """choices: [tokens, experts_per_token] int64 of 0..touched-1, each row without repetition, each number used."""

    choices: Integers
    touched: int

    @property
    def pairs(self) -> int:
        """(token, expert) pairs."""
        return self.choices.size

    def calls(self, experts: int) -> list[Integers]:
        """top_k_index of calls that go once around `experts` experts, or as often as it takes to come out even."""
        count = experts // gcd(experts, self.touched)
        return [(self.choices + i * self.touched) % experts for i in range(count)]


def same_experts(tokens: int, experts_per_token: int) -> Pattern:
    """All tokens choose the same experts: `tokens` rows for each expert touched."""
    return Pattern(np.tile(np.arange(experts_per_token, dtype=np.int64), (tokens, 1)), experts_per_token)


def uniform(tokens: int, experts: int, experts_per_token: int, random: np.random.Generator) -> Pattern:
    """Each token chooses its experts at random, all alike probable: a typical one of several draws."""
    draws = [_draw(tokens, experts, experts_per_token, random) for _ in range(DRAWS)]
    return sorted(draws, key=lambda draw: draw.touched)[DRAWS // 2]


def _draw(tokens: int, experts: int, experts_per_token: int, random: np.random.Generator) -> Pattern:
    order = np.argsort(random.random((tokens, experts)), axis=1)[:, :experts_per_token]
    distinct, numbers = np.unique(order, return_inverse=True)
    return Pattern(numbers.reshape(order.shape).astype(np.int64), len(distinct))
