"""The weights of a module, in the form in which operators load them."""

from typing import Any

import gguf
import numpy as np
import torch

from ktqueue.operators.packed import Bytes, ExpertWeights, Floats, PackedExperts, PackedMatrix


class OwnWeights:
    """ModuleWeights of a module that already has its weights. Matrices are packed as `quant`, routers and norms as F32.

    left: names that have not been read.
    """

    def __init__(self, module: torch.nn.Module, quant: str) -> None:
        self._state: dict[str, torch.Tensor] = module.state_dict()
        self._quant = quant
        self.left = set(self._state)

    def has(self, name: str) -> bool:
        return name in self._state

    def matrix(self, name: str) -> PackedMatrix:
        weight = self._take(name)
        quant = "F32" if name.endswith(("gate.weight", "router.weight", "router.proj.weight")) else self._quant
        return PackedMatrix(quant, weight.shape[0], weight.shape[1], quantise(weight, quant))

    def vector(self, name: str) -> Floats:
        return self._take(name).reshape(-1).numpy()

    def experts(self, name: str) -> ExpertWeights:
        prefix = f"{name}." if name else ""
        down = f"{prefix}down_proj"
        if not self.has(f"{down}_bias"):
            both, last = self._take(f"{prefix}gate_up_proj"), self._take(down)
            if both.shape[2] == 2 * last.shape[1]:  # Llama 4: transposed
                both, last = both.mT, last.mT
            gate, up = both.chunk(2, dim=1)
            return ExpertWeights(self._stack(gate), self._stack(up), self._stack(last))
        # gpt-oss: transposed, and columns of gate and up alternate
        both, bias = self._take(f"{prefix}gate_up_proj").mT, self._take(f"{prefix}gate_up_proj_bias")
        return ExpertWeights(
            self._stack(both[:, ::2], bias[:, ::2]),
            self._stack(both[:, 1::2], bias[:, 1::2]),
            self._stack(self._take(down).mT, self._take(f"{down}_bias")),
        )

    def _stack(self, weights: torch.Tensor, bias: torch.Tensor | None = None) -> PackedExperts:
        packed = [*quantise(weights.flatten(0, 1), self._quant).reshape(len(weights), -1)]
        biases = None if bias is None else bias.contiguous().numpy()
        return PackedExperts(self._quant, weights.shape[1], weights.shape[2], packed, biases)

    def _take(self, name: str) -> torch.Tensor:
        self.left.discard(name)
        return self._state[name].detach().float()


PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The formats that torch has too, and packs in a fraction of the time."""


def quantise(weight: torch.Tensor, quant: str) -> Bytes:
    """Pack a matrix as `quant`."""
    if quant in PLAIN:
        same: Bytes = weight.to(PLAIN[quant]).contiguous().view(torch.uint8).numpy().reshape(-1)
        return same
    packer: Any = getattr(gguf.quants, quant)  # gguf.quantize would take 16 rows at a time
    packed: Bytes = packer.quantize_rows(np.ascontiguousarray(weight.numpy())).view(np.uint8).reshape(-1)
    return packed
