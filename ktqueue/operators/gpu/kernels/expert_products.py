"""Experts packed in GPU memory, in the layout of the CPU kernels (csrc/formats/panel_layout.h), and their products.

One expert is a *record* of bytes in a pool: panel 0 of gate, panel 0 of up, panel 1 of gate and so on, then the panels
of down. A *pair* is a token and one of the experts it chose. Each function launches a kernel for CUDA tensors and
computes its plain torch twin for all others. Knows no layer, no router and no placement.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from ktqueue.operators import reference
from ktqueue.operators.gpu.kernels import expert_int8, expert_tensor_cores, panel_layout
from ktqueue.operators.gpu.kernels.expert_int8 import Int8Rows
from ktqueue.operators.gpu.kernels.operation import runs_kernel
from ktqueue.operators.native import ActivationName

ACTIVATIONS: tuple[ActivationName, ...] = ("silu", "gelu", "gelu_tanh")
"""Activations of the gate that these kernels have."""

ActivationType = Literal["auto", "float", "int8"]
"""The type in which rows of activations are multiplied: see `experts`."""

MAX_FEW_PAIRS = 2048
"""Largest number of pairs that the integer kernel can sort by expert."""
FEW_PAIRS_PER_EXPERT = 12
"""Average pairs of an expert above which tensor cores are faster than integer dot products."""


@dataclass(frozen=True, slots=True)
class ExpertRecord:
    """The layout of one expert in the pool: the formats of gate and up [intermediate, hidden] and of down [hidden,
    intermediate]. A record begins at a multiple of 64 bytes. Raises ValueError for an unknown format."""

    gate: str
    up: str
    down: str
    hidden: int
    intermediate: int

    def __post_init__(self) -> None:
        for quant in (self.gate, self.up, self.down):
            panel_layout.superblock_bytes(quant)
            if quant not in panel_layout.FLOATS and (self.hidden % 32 or self.intermediate % 32):
                raise ValueError(f"{quant} needs multiples of 32, got {self.hidden} and {self.intermediate}")

    @property
    def gate_panel_bytes(self) -> int:
        """Bytes of a panel of gate."""
        return panel_layout.panel_bytes(self.gate, self.hidden)

    @property
    def up_panel_bytes(self) -> int:
        """Bytes of a panel of up."""
        return panel_layout.panel_bytes(self.up, self.hidden)

    @property
    def down_panel_bytes(self) -> int:
        """Bytes of a panel of down."""
        return panel_layout.panel_bytes(self.down, self.intermediate)

    @property
    def gate_up_bytes(self) -> int:
        """Bytes of gate and up together."""
        return panel_layout.panel_count(self.intermediate) * (self.gate_panel_bytes + self.up_panel_bytes)

    @property
    def down_start(self) -> int:
        """Byte of the record where down begins."""
        return self.gate_up_bytes

    @property
    def bytes(self) -> int:
        """Bytes of the record."""
        return self.gate_up_bytes + panel_layout.panel_count(self.hidden) * self.down_panel_bytes


def experts(
    pool: torch.Tensor,
    gate_up_offsets: torch.Tensor,
    down_offsets: torch.Tensor,
    ids: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    record: ExpertRecord,
    activation: ActivationName,
    *,
    activations: ActivationType = "auto",
) -> torch.Tensor:
    """Return weight * expert(x) of every pair: [tokens, k, hidden] float32, zero where the pair is skipped.

    Arguments as in `gate_up` and `down`, whose offsets may differ (both are negative for the same experts).
    activations: "float" multiplies x as it is. "int8" quantises x (see expert_int8.py) and the rows between the two
    products, which is faster with few tokens per expert. "auto" takes "int8" where it is faster, unless x is float32 or
    a matrix is stored as floats. Raises ValueError, also for "int8" where that is not possible.
    """
    _check_experts(ids, x, record, activation)
    floats = any(quant in panel_layout.FLOATS for quant in (record.gate, record.up, record.down))
    possible = not floats and ids.numel() <= MAX_FEW_PAIRS
    if activations == "int8" and not possible:
        raise ValueError(f"int8 activations need block formats and at most {MAX_FEW_PAIRS} pairs")
    few = possible and x.dtype != torch.float32 and ids.numel() <= FEW_PAIRS_PER_EXPERT * gate_up_offsets.numel()
    if activations == "float" or not (activations == "int8" or few):
        mid = gate_up(pool, gate_up_offsets, ids, x, record, activation)
        return down(pool, down_offsets, ids, mid, weights, record)
    ids, x = ids.contiguous(), x.contiguous()
    tokens, slots = ids.shape
    if runs_kernel(x) and ids.numel():
        rows, pairs = expert_int8.prepare(x, ids, gate_up_offsets)
        quants = (record.gate, record.up)
        middle = expert_int8.gate_up(pool, gate_up_offsets, ids, rows, pairs, quants, record.intermediate, activation)
        partials = expert_int8.down(
            pool, down_offsets, ids, middle, pairs, weights.contiguous(), record.down, record.hidden, record.down_start
        )
        return partials.view(tokens, slots, record.hidden)
    exact = torch.zeros(tokens, slots, record.intermediate)
    gate_up_twin(pool, gate_up_offsets, ids, Int8Rows.quantise(x).floats(), record, activation, exact)
    partials = torch.empty(tokens, slots, record.hidden)
    exact = Int8Rows.quantise(exact.view(-1, record.intermediate)).floats()
    down_twin(pool, down_offsets, ids, exact, weights, record, partials)
    return partials


def gate_up(
    pool: torch.Tensor,
    offsets: torch.Tensor,
    ids: torch.Tensor,
    x: torch.Tensor,
    record: ExpertRecord,
    activation: ActivationName,
) -> torch.Tensor:
    """Return activation(gate x) * (up x) of every pair: [tokens, k, intermediate] in the dtype of `x`.

    pool: [bytes] uint8; offsets: [experts] int64, where the record of each expert begins in the pool, negative: skip;
    ids: [tokens, k] int64, negative: skip; x: [tokens, hidden] bfloat16, float16 or float32. Computed in float32. Rows
    of skipped pairs are undefined. Raises ValueError for another activation or shapes that disagree.
    """
    _check_experts(ids, x, record, activation)
    tokens, slots = ids.shape
    ids, x = ids.contiguous(), x.contiguous()
    mid = x.new_empty(tokens, slots, record.intermediate)
    if runs_kernel(x):
        expert_tensor_cores.launch(
            pool, x, mid.view(-1, record.intermediate), (record.gate, record.up),
            ids=ids, offsets=offsets, activation=activation,
        )  # fmt: skip
    else:
        gate_up_twin(pool, offsets, ids, x, record, activation, mid)
    return mid


def down(
    pool: torch.Tensor,
    offsets: torch.Tensor,
    ids: torch.Tensor,
    mid: torch.Tensor,
    weights: torch.Tensor,
    record: ExpertRecord,
) -> torch.Tensor:
    """Return weight * (down mid) of every pair: [tokens, k, hidden] float32, zero where the pair is skipped.

    mid: [tokens, k, intermediate]; weights: [tokens, k] float32; the rest as in `gate_up`. Raises ValueError.
    """
    _check(ids, mid, record.intermediate, len(ids))
    tokens, slots = ids.shape
    ids, rows = ids.contiguous(), mid.reshape(-1, record.intermediate)
    partials = torch.empty(tokens, slots, record.hidden, dtype=torch.float32, device=mid.device)
    if runs_kernel(mid):
        expert_tensor_cores.launch(
            pool, rows, partials.view(-1, record.hidden), (record.down,), ids=ids, offsets=offsets,
            start=record.down_start, weights=weights.contiguous(), zero_skipped=True,
        )  # fmt: skip
    else:
        down_twin(pool, offsets, ids, rows, weights, record, partials)
    return partials


def gate_up_twin(
    pool: torch.Tensor,
    offsets: torch.Tensor,
    ids: torch.Tensor,
    x: torch.Tensor,
    record: ExpertRecord,
    activation: ActivationName,
    mid: torch.Tensor,
) -> None:
    """Write what `gate_up` computes to `mid`, in plain torch and float32. Rows of skipped pairs stay as they are."""
    for offset, tokens, slots in _used_experts(offsets, ids):
        both = pool[offset : offset + record.gate_up_bytes].view(-1, record.gate_panel_bytes + record.up_panel_bytes)
        gate, up = (
            x[tokens].float() @ panel_layout.dequantize(panels, quant, record.hidden)[: record.intermediate].T
            for quant, panels in (
                (record.gate, both[:, : record.gate_panel_bytes]),
                (record.up, both[:, record.gate_panel_bytes :]),
            )
        )
        mid[tokens, slots] = reference.activate(activation, gate, up, 0.0, 0.0).to(mid.dtype)


def down_twin(
    pool: torch.Tensor,
    offsets: torch.Tensor,
    ids: torch.Tensor,
    mid: torch.Tensor,
    weights: torch.Tensor,
    record: ExpertRecord,
    partials: torch.Tensor,
) -> None:
    """Write what `down` computes to `partials`, in plain torch and float32. mid: [tokens * k, intermediate]."""
    partials.zero_()
    for offset, tokens, slots in _used_experts(offsets, ids):
        panels = pool[offset + record.down_start : offset + record.bytes].view(-1, record.down_panel_bytes)
        matrix = panel_layout.dequantize(panels, record.down, record.intermediate)[: record.hidden]
        rows = mid[tokens * ids.shape[1] + slots].float() @ matrix.T
        partials[tokens, slots] = rows * weights[tokens, slots, None]


def _used_experts(offsets: torch.Tensor, ids: torch.Tensor) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """For every expert that is not skipped: where its record begins, and the tokens and slots of its pairs."""
    starts = offsets.tolist()
    experts = [expert for expert in sorted(set(ids.flatten().tolist())) if expert >= 0 and starts[expert] >= 0]
    return [(starts[expert], *torch.where(ids == expert)) for expert in experts]


def _check_experts(ids: torch.Tensor, x: torch.Tensor, record: ExpertRecord, activation: ActivationName) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"the activation of GPU experts must be one of {', '.join(ACTIVATIONS)}, got {activation}")
    _check(ids, x, record.hidden, len(x))


def _check(ids: torch.Tensor, rows: torch.Tensor, columns: int, tokens: int) -> None:
    if ids.dim() != 2 or len(ids) != tokens or rows.shape[-1] != columns:
        raise ValueError(f"ids {list(ids.shape)} do not fit rows {list(rows.shape)}, which must have {columns} columns")
