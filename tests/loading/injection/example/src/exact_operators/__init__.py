"""Two operators for ktqueue: a norm that computes in float64, and experts that torch computes on decoded weights."""

from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from ktqueue.operators.base import Operator
from ktqueue.operators.experts import activation_name
from ktqueue.operators.native import dequantize
from ktqueue.operators.packed import ModuleWeights, PackedExperts


class DoubleNorm(Operator):
    """RMSNorm in float64. `fails_while`: a path; while there is a file, each step fails."""

    capturable = True

    def __init__(self, width: int, epsilon: float, fails_while: str) -> None:
        super().__init__()
        self.width = width
        self.epsilon = epsilon
        self.fails_while = fails_while
        self.scale = torch.empty(0)

    @classmethod
    def from_module(cls, module: nn.Module, *, fails_while: str = "", **options: Any) -> Self:
        if options:
            raise ValueError(f"DoubleNorm has no option {next(iter(options))!r}")
        weight = getattr(module, "weight", None)
        epsilon = getattr(module, "variance_epsilon", None)
        if weight is None or epsilon is None:
            raise ValueError(f"{type(module).__name__} is not an RMSNorm")
        return cls(weight.numel(), epsilon, fails_while)

    def load(self, weights: ModuleWeights) -> None:
        values = weights.vector("weight")
        if len(values) != self.width:
            raise ValueError(f"expected {self.width} weights, got {len(values)}")
        self.scale = torch.from_numpy(values.astype(np.float64)).to(self.device)

    def device_bytes(self) -> dict[str, int]:
        return {self.device: self.scale.numel() * 8}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails_while and Path(self.fails_while).exists():
            raise RuntimeError("the norm is broken")
        wide = x.double()
        return (wide * (wide.square().mean(-1, keepdim=True) + self.epsilon).rsqrt() * self.scale).to(x.dtype)


class TorchExperts(Operator):
    """Routed experts with SiLU. Weights are decoded to float32 at load, and torch multiplies them."""

    any_device = True

    def __init__(self) -> None:
        super().__init__()
        self.matrices: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    @classmethod
    def from_module(cls, module: nn.Module) -> Self:  # type: ignore[override]  # other options are refused
        if activation_name(getattr(module, "act_fn", None)) != "silu":
            raise ValueError("TorchExperts computes SiLU only")
        return cls()

    def load(self, weights: ModuleWeights) -> None:
        experts = weights.experts("")
        parts = (experts.gate, experts.up, experts.down)
        if any(part.bias is not None for part in parts):
            raise ValueError("TorchExperts computes no biases")
        gate, up, down = (self._decode(part) for part in parts)
        self.matrices = list(zip(gate, up, down, strict=True))

    def _decode(self, part: PackedExperts) -> list[torch.Tensor]:
        count = part.rows * part.columns
        return [
            torch.from_numpy(dequantize(part.quant, data, count).reshape(part.rows, part.columns)).to(self.device)
            for data in part.data
        ]

    def device_bytes(self) -> dict[str, int]:
        return {self.device: sum(matrix.nbytes for expert in self.matrices for matrix in expert)}

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        x, chosen, shares = hidden.float().to(self.device), chosen.to(self.device), shares.float().to(self.device)
        out = torch.zeros_like(x)
        for expert, (gate, up, down) in enumerate(self.matrices):
            token, slot = torch.where(chosen == expert)
            if len(token):
                rows = x[token]
                y = (nn.functional.silu(rows @ gate.T) * (rows @ up.T)) @ down.T
                out.index_add_(0, token, y * shares[token, slot, None])
        return out.to(hidden)
