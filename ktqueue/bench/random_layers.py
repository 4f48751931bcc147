"""Expert layers of random weights, and patterns of routing for their calls.

No call finds weights of an earlier call in a cache, and all calls of a figure do the same work. A pattern of choices
is drawn once, and each call shifts it by the number of experts that it uses. An expert is used again only after all
others.
"""

from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt

from ktqueue.bench.roofline import LayerShape
from ktqueue.loading.synthetic.random_blocks import random_blocks
from ktqueue.operators import native
from ktqueue.operators.packed import Bytes, ExpertWeights, PackedExperts

DEVIATION = 0.02  # standard deviation of weights, which keeps activations of ordinary size
SEED = 3
DRAWS = 9  # of random routing; the draw with the median number of used experts is taken

Integers = npt.NDArray[np.int64]


def formats(quant: str) -> tuple[str, str]:
    """Return the formats of gate and up, and of down.

    Both are `quant`, or it has two joined by a slash: Q4_K/Q6_K as in half of the layers of a Q4_K_M file.
    """
    up, _, down = quant.partition("/")
    return up, down or up


def expert_bytes(quant: str, shape: LayerShape) -> int:
    """Bytes of one expert in a file. Raises ValueError if a row is not a whole number of blocks."""
    up_format, down_format = formats(quant)
    up = shape.intermediate * native.row_bytes(up_format, shape.hidden)
    return 2 * up + shape.hidden * native.row_bytes(down_format, shape.intermediate)


def random_layer(quant: str, shape: LayerShape, isa: str) -> native.ExpertLayer:
    """Make a layer. Its experts have equal weights, each in its own memory. Raises ValueError."""
    random = np.random.default_rng(SEED)
    up_format, down_format = formats(quant)

    def matrix(quant: str, rows: int, columns: int) -> PackedExperts:
        size = rows * native.row_bytes(quant, columns)
        sample = random_blocks(quant, 1, DEVIATION, random)
        blocks: Bytes = random_blocks(quant, -(-size // sample.nbytes), DEVIATION, random).reshape(-1)[:size]
        return PackedExperts(quant, rows, columns, [blocks] * shape.experts)

    gate, up = (matrix(up_format, shape.intermediate, shape.hidden) for _ in range(2))
    return native.ExpertLayer(ExpertWeights(gate, up, matrix(down_format, shape.hidden, shape.intermediate)), isa=isa)


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
