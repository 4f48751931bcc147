"""Expert layers of random weights, enough of them that a cache cannot hold what the next call needs."""

import numpy as np

from ktqueue.bench.roofline import LayerShape
from ktqueue.loading.synthetic.random_blocks import random_blocks
from ktqueue.operators import native
from ktqueue.operators.packed import Bytes, ExpertWeights, PackedExperts

DEVIATION = 0.02  # of weights: activations stay of ordinary size
SEED = 3


def formats(quant: str) -> tuple[str, str]:
    """Of gate and up, and of down. They are the same, or joined by a stroke: Q4_K/Q6_K as in half of the layers of a
    Q4_K_M file."""
    up, _, down = quant.partition("/")
    return up, down or up


def expert_bytes(quant: str, shape: LayerShape) -> int:
    """File bytes of one expert. Raises ValueError where a row is no whole number of blocks."""
    of_up, of_down = formats(quant)
    up = shape.intermediate * native.row_bytes(of_up, shape.hidden)
    return 2 * up + shape.hidden * native.row_bytes(of_down, shape.intermediate)


def random_layer(quant: str, shape: LayerShape, isa: str) -> native.ExpertLayer:
    """One layer whose experts are alike in content and each have memory of their own. Raises ValueError."""
    random = np.random.default_rng(SEED)
    of_up, of_down = formats(quant)

    def matrix(quant: str, rows: int, columns: int) -> PackedExperts:
        size = rows * native.row_bytes(quant, columns)
        one = random_blocks(quant, 1, DEVIATION, random)
        blocks: Bytes = random_blocks(quant, -(-size // one.nbytes), DEVIATION, random).reshape(-1)[:size]
        return PackedExperts(quant, rows, columns, [blocks] * shape.experts)

    gate, up = (matrix(of_up, shape.intermediate, shape.hidden) for _ in range(2))
    return native.ExpertLayer(ExpertWeights(gate, up, matrix(of_down, shape.hidden, shape.intermediate)), isa=isa)
