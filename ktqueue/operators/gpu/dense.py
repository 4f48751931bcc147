"""Dense weights as torch tensors: dequantised into the compute type, matrices that share their input merged.

Knows ModuleWeights, no file and no layer.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from ktqueue.operators import native
from ktqueue.operators.gpu.fused import few_rows_linear
from ktqueue.operators.packed import ModuleWeights, PackedMatrix

AT_ONCE = 1 << 22  # weights that a thread has as float32 at one time: 16 MB


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer. weight: [rows, columns]; bias: [rows] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, columns] -> [tokens, rows], same dtype."""
        return few_rows_linear(x, self.weight, self.bias)


class DenseWeights:
    """The dense weights of a model, put on `device` in `dtype` as they are asked for. `bytes`: of all so far."""

    def __init__(self, weights: ModuleWeights, dtype: torch.dtype, device: str) -> None:
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self.bytes = 0

    def vector(self, name: str) -> torch.Tensor:
        """A one-dimensional tensor, [size]."""
        return self._count(torch.from_numpy(self._weights.vector(name)).to(self._device, self._dtype, copy=True))

    def matrix(self, name: str) -> torch.Tensor:
        """A two-dimensional tensor, [rows, columns]."""
        return self._stacked([self._weights.matrix(name)])

    def linear(self, *modules: str) -> Dense:
        """The linear modules of these names as one, their rows one below the other; where one has a bias, all do."""
        weight = self._stacked([self._weights.matrix(f"{name}.weight") for name in modules])
        biases = [f"{name}.bias" for name in modules if self._weights.has(f"{name}.bias")]
        if not biases:
            return Dense(weight, None)
        if len(biases) < len(modules):
            raise ValueError(f"of {', '.join(modules)} only some have a bias")
        return Dense(weight, torch.cat([self.vector(name) for name in biases]))

    def _stacked(self, parts: Sequence[PackedMatrix]) -> torch.Tensor:
        if len({part.columns for part in parts}) != 1:
            raise ValueError(f"matrices with {[part.columns for part in parts]} columns do not share their input")
        columns = parts[0].columns
        out = torch.empty(sum(part.rows for part in parts), columns, dtype=self._dtype, device=self._device)
        pieces, row, step = [], 0, max(1, AT_ONCE // columns)  # (matrix, its first row, where the rows go)
        for part in parts:
            target = out[row : row + part.rows]
            pieces += [(part, first, target[first : first + step]) for first in range(0, part.rows, step)]
            row += part.rows
        with ThreadPoolExecutor(native.threads()) as threads:
            for _ in threads.map(_decode, *zip(*pieces, strict=True)):
                pass
        return self._count(out)

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        self.bytes += tensor.nbytes
        return tensor


def _decode(matrix: PackedMatrix, first: int, target: torch.Tensor) -> None:
    """Dequantise the matrix's rows from `first` on into `target`."""
    row_bytes = native.row_bytes(matrix.quant, matrix.columns)
    data = matrix.data[first * row_bytes : (first + len(target)) * row_bytes]
    decoded = native.dequantize(matrix.quant, data, target.numel())
    target.copy_(torch.from_numpy(decoded).view(target.shape).to(target.device))
