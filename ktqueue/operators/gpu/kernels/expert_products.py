"""Products of tokens with experts that are packed in GPU memory.

One expert is a *record* of bytes in a pool. A *pair* is a token and one of the experts it chose. Each function launches
a kernel for CUDA tensors and computes its plain torch twin for all others. Knows no layer, no router and no placement.
"""

import torch

from ktqueue.operators import reference
from ktqueue.operators.gpu.kernels import expert_int8, expert_tensor_cores, panel_layout
from ktqueue.operators.gpu.kernels.activation import ACTIVATIONS
from ktqueue.operators.gpu.kernels.expert_int8 import Int8Rows
from ktqueue.operators.gpu.kernels.operation import runs_kernel
from ktqueue.operators.gpu.kernels.panel_layout import ExpertRecord
from ktqueue.operators.native import ActivationName

MAX_FEW_PAIRS = 2048
"""Largest number of pairs that the integer kernel can sort by expert."""
FEW_PAIRS_PER_EXPERT = 12
"""Average pairs of an expert above which tensor cores are faster than integer dot products."""


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
    exact: bool = False,
) -> torch.Tensor:
    """Return weight * expert(x) of every pair: [tokens, k, hidden] float32, zero where the pair is skipped.

    Arguments as in `gate_up` and `down`, whose offsets may differ (both are negative for the same experts). x and the
    rows between the two products are quantised (see expert_int8.py) where that is faster: with few tokens per expert,
    unless x is float32, a matrix is stored as floats, or `exact`. Raises ValueError as `gate_up` does.
    """
    floats = any(quant in panel_layout.FLOATS for quant in (record.gate, record.up, record.down))
    few = ids.numel() <= min(MAX_FEW_PAIRS, FEW_PAIRS_PER_EXPERT * gate_up_offsets.numel())
    if exact or floats or x.dtype == torch.float32 or not few:
        mid = gate_up(pool, gate_up_offsets, ids, x, record, activation)
        return down(pool, down_offsets, ids, mid, weights, record)
    _check_experts(ids, x, record, activation)
    ids, x = ids.contiguous(), x.contiguous()
    if runs_kernel(x) and ids.numel():
        rows, pairs = expert_int8.prepare(x, ids, gate_up_offsets)
        rows = expert_int8.gate_up(pool, gate_up_offsets, ids, rows, pairs, record, activation)
        return expert_int8.down(pool, down_offsets, ids, rows, pairs, weights.contiguous(), record)
    mid = torch.zeros(*ids.shape, record.intermediate)
    gate_up_twin(pool, gate_up_offsets, ids, Int8Rows.quantise(x).floats(), record, activation, mid)
    partials = torch.empty(*ids.shape, record.hidden)
    mid = Int8Rows.quantise(mid.view(-1, record.intermediate)).floats()
    down_twin(pool, down_offsets, ids, mid, weights, record, partials)
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
        both = pool[offset : offset + record.down_start].view(-1, record.gate_panel_bytes + record.up_panel_bytes)
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
