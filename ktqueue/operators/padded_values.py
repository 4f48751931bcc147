"""Weights of a model whose values have fewer columns than its keys, with rows that make both equal.

Caches and kernels of attention have one size for both. Knows no kernel.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ktqueue.operators.packed import ExpertWeights, Floats, ModuleWeights, PackedMatrix


@dataclass(frozen=True, slots=True)
class PaddedValues:
    """ModuleWeights over `weights`, with zeros behind the `value_dim` rows of each value head up to `head_dim` rows."""

    weights: ModuleWeights
    head_dim: int
    value_dim: int

    def has(self, name: str) -> bool:
        return self.weights.has(name)

    def matrix(self, name: str) -> PackedMatrix:
        """See ModuleWeights. Each row is packed by itself, and bytes of zero are zeros in every format."""
        matrix = self.weights.matrix(name)
        if not name.endswith("v_proj.weight"):
            return matrix
        rows = self._padded(matrix.data.reshape(matrix.rows, -1))
        return replace(matrix, rows=len(rows), data=rows.reshape(-1))

    def vector(self, name: str) -> Floats:
        vector = self.weights.vector(name)
        return self._padded(vector[:, None])[:, 0] if name.endswith("v_proj.bias") else vector

    def experts(self, name: str) -> ExpertWeights:
        return self.weights.experts(name)

    def _padded(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """rows: [value heads * value_dim, any] -> [value heads * head_dim, any]."""
        heads = rows.reshape(-1, self.value_dim, rows.shape[1])
        padded = np.pad(heads, ((0, 0), (0, self.head_dim - self.value_dim), (0, 0)))
        return padded.reshape(-1, rows.shape[1])
