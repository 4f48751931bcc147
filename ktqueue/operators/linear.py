"""CpuLinear: one dense matrix, computed by the compiled kernels on its quantised weights. Knows no file."""

from typing import Any, Self

import torch
from torch import nn

from ktqueue.operators import native
from ktqueue.operators.base import Operator, kernel_options
from ktqueue.operators.packed import Floats, ModuleWeights, PackedMatrix


class CpuLinear(Operator):
    """Called like the nn.Linear that it replaces. Computes in float32 or int8, whatever the model's dtype."""

    def __init__(self, rows: int, columns: int, *, activations: native.ActivationType, isa: str) -> None:
        super().__init__()
        self.out_features = rows
        self.in_features = columns
        self._activations = activations
        self._isa = isa
        self._linear: native.Linear | None = None

    @classmethod
    def from_module(cls, module: nn.Module, **options: Any) -> Self:
        """Take the shape from an nn.Linear. Options: `activations`, `isa`. Raises ValueError for any other module."""
        chosen = kernel_options("CpuLinear", options)
        if type(module) is not nn.Linear:
            raise ValueError(f"{type(module).__name__} cannot be replaced by CpuLinear: it is no nn.Linear")
        return cls(module.out_features, module.in_features, **chosen)

    def load(self, weights: ModuleWeights, module: str = "") -> None:
        """Pack `weight`, and `bias` if there is one, of the module with that name ("": the root of `weights`). Raises
        ValueError if they do not fit."""
        self._linear = load_linear(weights, module, activations=self._activations, isa=self._isa)
        if (got := self._linear.shape) != (self.out_features, self.in_features):
            raise ValueError(f"weight must be {[self.out_features, self.in_features]}, got {list(got)}")

    def device_bytes(self) -> dict[str, int]:
        """Bytes of packed weights."""
        return {"cpu": 0 if self._linear is None else self._linear.bytes}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., columns] -> [..., rows], same dtype. Raises RuntimeError before `load`."""
        if self._linear is None:
            raise RuntimeError("CpuLinear has no weights yet")
        source = x.reshape(-1, self.in_features).float().contiguous()
        out = torch.empty(len(source), self.out_features)
        self._linear.forward(native.as_array(source), out.numpy())
        return out.view(*x.shape[:-1], self.out_features).to(x.dtype)


def load_linear(weights: ModuleWeights, module: str, *, activations: native.ActivationType, isa: str) -> native.Linear:
    """Pack the linear module with that name ("": the root of `weights`). Raises ValueError."""
    prefix = f"{module}." if module else ""
    bias = weights.vector(f"{prefix}bias") if weights.has(f"{prefix}bias") else None
    return pack_linear(weights.matrix(f"{prefix}weight"), bias, activations=activations, isa=isa)


def pack_linear(
    matrix: PackedMatrix, bias: Floats | None = None, *, activations: native.ActivationType, isa: str
) -> native.Linear:
    """Pack a matrix with its bias [rows]. Raises ValueError."""
    return native.Linear(
        matrix.quant, matrix.rows, matrix.columns, matrix.data, bias=bias, activations=activations, isa=isa
    )
