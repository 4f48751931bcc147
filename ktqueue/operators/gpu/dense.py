"""Dense weights as torch tensors: dequantised into the compute type, matrices that share their input merged.

Knows ModuleWeights, no file and no layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ktqueue.operators import native
from ktqueue.operators.packed import ModuleWeights, PackedMatrix

AT_ONCE = 1 << 24  # weights that are float32 on the host at one time: 64 MB


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer. weight: [rows, columns]; bias: [rows] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, columns] -> [tokens, rows], same dtype."""
        return functional.linear(x, self.weight, self.bias)


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
        return self._stacked([self._weights.matrix(name)], self._dtype)

    def linear(self, *modules: str) -> Dense:
        """The linear modules of these names as one, their rows one below the other; where one has a bias, all do."""
        weight = self._stacked([self._weights.matrix(f"{name}.weight") for name in modules], self._dtype)
        biases = [f"{name}.bias" for name in modules if self._weights.has(f"{name}.bias")]
        if not biases:
            return Dense(weight, None)
        if len(biases) < len(modules):
            raise ValueError(f"of {', '.join(modules)} only some have a bias")
        return Dense(weight, torch.cat([self.vector(name) for name in biases]))

    def router(self, name: str) -> torch.Tensor:
        """A router's matrix, [experts, hidden]: float32 unless the compute type holds each of its weights unrounded."""
        exact = self._stacked([self._weights.matrix(name)], torch.float32)
        narrow = exact.to(self._dtype)
        if not torch.equal(narrow.float(), exact):
            return exact
        self.bytes -= exact.nbytes - narrow.nbytes
        return narrow

    def _stacked(self, parts: Sequence[PackedMatrix], dtype: torch.dtype) -> torch.Tensor:
        if len({part.columns for part in parts}) != 1:
            raise ValueError(f"matrices with {[part.columns for part in parts]} columns do not share their input")
        columns = parts[0].columns
        out = torch.empty(sum(part.rows for part in parts), columns, dtype=dtype, device=self._device)
        step = max(1, AT_ONCE // columns)
        row = 0
        for part in parts:
            row_bytes = native.row_bytes(part.quant, columns)
            for first in range(0, part.rows, step):
                rows = min(step, part.rows - first)
                data = part.data[first * row_bytes : (first + rows) * row_bytes]
                decoded = torch.from_numpy(native.dequantize(part.quant, data, rows * columns))
                out[row : row + rows].copy_(decoded.view(rows, columns))
                row += rows
        return self._count(out)

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        self.bytes += tensor.nbytes
        return tensor


def matmul_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [tokens, columns] times weight [rows, columns] -> [tokens, rows] float32, the sums not rounded to x's type."""
    if x.is_cuda and x.dtype == weight.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return functional.linear(x.float(), weight.float())
