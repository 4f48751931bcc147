"""Rows of the query and key matrices in the order that the decoders' rotation expects.

Some models rotate pairs of adjacent columns of a head. The decoders rotate columns that are half the rotated columns
apart. With the rows of both matrices reordered alike, the products of queries and keys are the same. Knows no kernel.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ktqueue.operators.packed import ExpertWeights, Floats, ModuleWeights, PackedMatrix

_REORDERED = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")


class HalvedRotaryRows:
    """ModuleWeights whose first `rotated` rows of each head of q and k, `head_dim` each, are reordered."""

    def __init__(self, weights: ModuleWeights, head_dim: int, rotated: int) -> None:
        self._weights = weights
        self._of_head = np.concatenate(
            [np.arange(0, rotated, 2), np.arange(1, rotated, 2), np.arange(rotated, head_dim)]
        )

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def matrix(self, name: str) -> PackedMatrix:
        """See ModuleWeights. Each row is packed by itself, so whole rows are moved. Returns a copy of q and k."""
        matrix = self._weights.matrix(name)
        if not name.endswith(_REORDERED):
            return matrix
        rows = matrix.data.reshape(matrix.rows, -1)[self._order(matrix.rows)]
        return replace(matrix, data=rows.reshape(-1))

    def vector(self, name: str) -> Floats:
        vector = self._weights.vector(name)
        return vector[self._order(len(vector))] if name.endswith(_REORDERED) else vector

    def experts(self, name: str) -> ExpertWeights:
        return self._weights.experts(name)

    def _order(self, rows: int) -> npt.NDArray[np.int64]:
        """Return the old index of each row."""
        firsts = np.arange(0, rows, len(self._of_head))
        order: npt.NDArray[np.int64] = (firsts[:, None] + self._of_head).reshape(-1)
        return order


def in_rotary_order(weights: ModuleWeights, head_dim: int, interleaved: int) -> ModuleWeights:
    """Return the weights of a model with the rows of q and k in the decoders' order.

    interleaved: number of columns of a head whose pairs are adjacent; 0: the order is the decoders' already.
    """
    return HalvedRotaryRows(weights, head_dim, interleaved) if interleaved else weights
