"""Pools of packed experts: random GGUF weights, packed by the CPU's own code."""

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from ktqueue.loading.weight_formats import BLOCKS
from ktqueue.operators import native
from ktqueue.operators.gpu.kernels.activation import ACTIVATIONS
from ktqueue.operators.gpu.kernels.expert_pairs import ExpertBiases, ExpertPairs
from ktqueue.operators.gpu.kernels.panel_layout import ExpertRecord
from ktqueue.operators.packed import Bytes, ExpertWeights, PackedExperts

WEIGHTED = native.GateFacts("silu", weighted_input=True)
CLAMPED, LIMITED = native.GateFacts("swiglu_clamped", 1.702, 1.5), native.GateFacts("silu_limited", limit=0.8)
GATES = [*(native.GateFacts(name) for name in ACTIVATIONS), CLAMPED, LIMITED, WEIGHTED]
"""All ways to join gate and up that experts have."""
FLOATS = ("F32", "F16", "BF16")


class Pool(NamedTuple):
    """Records of all experts one after the other, and the CPU's layer of the same weights."""

    record: ExpertRecord
    bytes: torch.Tensor
    offsets: torch.Tensor
    layer: native.ExpertLayer
    biases: ExpertBiases | None

    def pairs(self, ids: torch.Tensor, offsets: torch.Tensor | None = None) -> ExpertPairs:
        """Pairs of these experts. `offsets`: in place of the pool's own."""
        return ExpertPairs(self.bytes, self.offsets if offsets is None else offsets, ids, self.record, self.biases)


def make_pool(
    random_weights: Callable[..., Bytes],
    quants: str | tuple[str, str, str],
    experts: int,
    hidden: int,
    intermediate: int,
    *,
    biased: bool = False,
    gate: native.GateFacts = native.SILU,
) -> Pool:
    """Pack random experts. `quants`: the format of all three matrices, or those of gate, up and down."""
    three = (quants,) * 3 if isinstance(quants, str) else quants
    sizes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    noise = np.random.default_rng(experts)
    parts = [
        PackedExperts(
            quant,
            rows,
            columns,
            [random_weights(quant, rows * columns, 10 * i + e) for e in range(experts)],
            noise.normal(size=(experts, rows)).astype(np.float32) if biased else None,
        )
        for i, (quant, (rows, columns)) in enumerate(zip(three, sizes, strict=True))
    ]
    layer = native.ExpertLayer(ExpertWeights(*parts), gate, activations="float32")
    records = [b"".join(ctypes.string_at(*part) for part in layer.ranges(expert)) for expert in range(experts)]
    record = ExpertRecord(*three, hidden, intermediate)
    assert all(len(packed) == record.bytes for packed in records)
    pool = torch.frombuffer(bytearray(b"".join(records)), dtype=torch.uint8)
    biases = [torch.from_numpy(part.bias) for part in parts if part.bias is not None]
    return Pool(record, pool, torch.arange(experts) * record.bytes, layer, ExpertBiases(*biases) if biased else None)


def route(tokens: int, experts: int, slots: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids [tokens, slots] without repeats in a row, and weights [tokens, slots]."""
    noise = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=noise).topk(slots).indices, torch.rand(tokens, slots, generator=noise)


def small(quant: str) -> tuple[tuple[str, str, str], int, int]:
    """Formats, hidden and intermediate of small experts. Gate and up are `quant`; sizes are as odd as it allows."""
    if quant in FLOATS:
        return (quant,) * 3, 45, 33
    return (quant, quant, "Q4_0"), 256 + max(32, BLOCKS[quant][0]), 32
