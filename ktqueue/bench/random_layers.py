"""Expert layers of random weights."""

import numpy as np

from ktqueue.bench.roofline import LayerShape
from ktqueue.loading.synthetic.random_blocks import random_blocks
from ktqueue.operators import native
from ktqueue.operators.packed import Bytes, ExpertWeights, PackedExperts

DEVIATION = 0.02  # standard deviation of weights, which keeps activations of ordinary size
SEED = 3


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
