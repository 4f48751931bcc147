"""Products of tokens with experts that are packed in GPU memory.

Each function launches a kernel for CUDA tensors and computes its plain torch twin for all others. Knows no layer, no
router and no placement.
"""

import torch

from ktqueue.operators import reference
from ktqueue.operators.gpu.kernels import (
    expert_few_pairs,
    expert_int8,
    expert_matrices,
    expert_tensor_cores,
    panel_layout,
)
from ktqueue.operators.gpu.kernels.expert_int8 import Int8Rows
from ktqueue.operators.gpu.kernels.expert_pairs import ExpertPairs, SortedPairs
from ktqueue.operators.gpu.kernels.expert_tiles import TILES, ExpertTiles, MatrixTiles
from ktqueue.operators.gpu.kernels.operation import runs_kernel
from ktqueue.operators.gpu.kernels.panel_layout import ExpertRecord
from ktqueue.operators.native import GateFacts

MAX_FEW_PAIRS = 2048
MAX_MATRIX_PAIRS = 8192
"""Largest number of pairs that the launch which rounds activations sorts by expert, for integer dot products and for
int8 matrices. A program for each expert reads all of them twice."""


def experts(
    pairs: ExpertPairs,
    down_offsets: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    gate: GateFacts,
    *,
    exact: bool = False,
    rows: Int8Rows | None = None,
    lists: SortedPairs | None = None,
    added_to: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
    tiles: ExpertTiles = TILES,
) -> torch.Tensor:
    """Return weight * expert(x) of every pair: [tokens, k, hidden] float32, zero where the pair is skipped.

    If the gate says so, it is expert(weight * x). Arguments as in `gate_up` and `down`. `down` uses `down_offsets` in
    place of the offsets in `pairs`; both are negative for the same experts. x and the rows between the two products are
    quantised (see expert_int8.py) where that is faster: with few tokens per expert, unless x is float32, a matrix has
    one of FLOAT_PRODUCTS, or `exact`. `rows`: x, quantised already; only if `rounds_pairs` says so. `lists`: of the
    pairs, with `rows`, unless `rounds_each_pair` says so. `added_to`, `counters`: see expert_int8.down; only with
    `rows` and without `lists`. `tiles`: which kernels compute the step, and how. Raises ValueError as `gate_up` does.
    """
    record, down_pairs = pairs.record, pairs._replace(offsets=down_offsets)
    weights = weights.contiguous()
    of_input, of_output = (weights, None) if gate.weighted_input else (None, weights)
    number, experts = pairs.ids.numel(), pairs.offsets.numel()
    matrices = _fitting_matrices(record, number, experts, x.device, tiles)
    if number > _most_rounded(experts, matrices, tiles) or not _may_round(record, x.dtype, exact):
        return down(down_pairs, gate_up(pairs, x, gate, of_input, tiles=tiles), of_output, tiles=tiles)
    _check_input(pairs, x)
    x = x.contiguous()
    if runs_kernel(x) and number:
        if rows is None:
            rows, lists = expert_int8.prepare(pairs, x, own_pairs=tiles.own_limit(experts))
        if matrices and lists:
            rows = expert_matrices.gate_up(pairs, lists, rows, gate, of_input, matrices.gate_up)
            return expert_matrices.down(down_pairs, lists, rows, of_output, matrices.down)
        chosen = tiles.dot_tiles(number, are_sorted=lists is not None)
        early = tiles.early_pairs if lists is None else None
        if early and len(x) == 1 and number <= early.of_one and expert_few_pairs.fits(record):
            rows = expert_few_pairs.gate_up(pairs, rows, gate, of_input)
        else:
            rows = expert_int8.gate_up(pairs, lists, rows, gate, of_input, tiles=chosen)
        if early and number <= early.of_several:
            return expert_few_pairs.down(down_pairs, rows, of_output, added_to=added_to, counters=counters)
        return expert_int8.down(down_pairs, lists, rows, of_output, tiles=chosen, added_to=added_to, counters=counters)
    mid = torch.zeros(*pairs.ids.shape, record.intermediate)
    gate_up_twin(pairs, (rows or Int8Rows.quantise(x)).floats(), gate, mid, of_input)
    partials = torch.empty(*pairs.ids.shape, record.hidden)
    down_twin(down_pairs, Int8Rows.quantise(mid.view(-1, record.intermediate)).floats(), of_output, partials)
    if added_to is not None:
        added_to.copy_(added_to.float() + partials.sum(1))
    return partials


def rounds_each_pair(
    record: ExpertRecord, pairs: int, experts: int, dtype: torch.dtype, *, exact: bool, tiles: ExpertTiles = TILES
) -> bool:
    """Whether `experts` quantises x of type `dtype` in a step of `pairs` pairs, and sorts none of them."""
    few = min(tiles.own_limit(experts), tiles.few_pairs * experts)
    return 0 < pairs <= few and _may_round(record, dtype, exact)


def rounds_pairs(
    record: ExpertRecord, pairs: int, experts: int, x: torch.Tensor, *, exact: bool, tiles: ExpertTiles = TILES
) -> bool:
    """Whether `experts` quantises x in a step of `pairs` pairs."""
    matrices = _fitting_matrices(record, pairs, experts, x.device, tiles)
    return 0 < pairs <= _most_rounded(experts, matrices, tiles) and _may_round(record, x.dtype, exact)


def reads_once(
    record: ExpertRecord, pairs: int, experts: int, x: torch.Tensor, *, exact: bool, tiles: ExpertTiles = TILES
) -> bool:
    """Whether `experts` sorts the pairs of a step, and what it reads leaves the L2 cache before all else. Then early
    requests of experts pay (ADR 0083)."""
    matrices = _fitting_matrices(record, pairs, experts, x.device, tiles)
    few = rounds_each_pair(record, pairs, experts, x.dtype, exact=exact, tiles=tiles)
    return matrices is not None and matrices.gate_up.reads_once and not few and _may_round(record, x.dtype, exact)


def _fitting_matrices(
    record: ExpertRecord, pairs: int, experts: int, device: torch.device, tiles: ExpertTiles
) -> MatrixTiles | None:
    """The tiles of int8 matrices for a step. None: another kernel computes it."""
    matrices = tiles.matrix_tiles(pairs, experts)
    return expert_matrices.fitting_tiles(record, experts, matrices, device) if matrices else None


def _most_rounded(experts: int, matrices: MatrixTiles | None, tiles: ExpertTiles) -> float:
    """The most pairs of a step that are quantised."""
    return MAX_MATRIX_PAIRS if matrices else min(MAX_FEW_PAIRS, tiles.few_pairs * experts)


def _may_round(record: ExpertRecord, dtype: torch.dtype, exact: bool) -> bool:
    """Whether activations of type `dtype` may be rounded to int8 for products with such experts."""
    floats = any(quant in panel_layout.FLOAT_PRODUCTS for quant in (record.gate, record.up, record.down))
    return not (exact or floats or dtype == torch.float32)


def gate_up(
    pairs: ExpertPairs,
    x: torch.Tensor,
    gate: GateFacts,
    weights: torch.Tensor | None = None,
    *,
    tiles: ExpertTiles = TILES,
) -> torch.Tensor:
    """Return gate x and up x, joined as `gate` says, of every pair: [tokens, k, intermediate] in the dtype of `x`.

    x: [tokens, hidden] bfloat16, float16 or float32. weights: [tokens, k] float32, of the pairs if they multiply x;
    None: they do not. Computed in float32. Rows of skipped pairs are undefined. Raises ValueError for shapes that
    disagree.
    """
    _check_input(pairs, x)
    record, x = pairs.record, x.contiguous()
    mid = x.new_empty(*pairs.ids.shape, record.intermediate)
    if runs_kernel(x):
        rows = mid.view(-1, record.intermediate)
        biases = (None, None) if pairs.biases is None else (pairs.biases.gate, pairs.biases.up)
        quants = record.gate, record.up
        expert_tensor_cores.launch(pairs, x, rows, quants, gate=gate, biases=biases, weights=weights, tiles=tiles)
    else:
        gate_up_twin(pairs, x, gate, mid, weights)
    return mid


def down(
    pairs: ExpertPairs, mid: torch.Tensor, weights: torch.Tensor | None, *, tiles: ExpertTiles = TILES
) -> torch.Tensor:
    """Return weight * (down mid) of every pair: [tokens, k, hidden] float32, zero where the pair is skipped.

    mid: [tokens, k, intermediate]; weights: [tokens, k] float32; None: all 1. Raises ValueError for shapes that do
    not fit.
    """
    record = pairs.record
    _check_shapes(pairs.ids, mid, record.intermediate)
    rows = mid.reshape(-1, record.intermediate)
    partials = torch.empty(*pairs.ids.shape, record.hidden, dtype=torch.float32, device=mid.device)
    if runs_kernel(mid):
        expert_tensor_cores.launch(
            pairs, rows, partials.view(-1, record.hidden), (record.down,),
            start=record.down_start, weights=weights, zero_skipped=True,
            biases=(None if pairs.biases is None else pairs.biases.down, None), tiles=tiles,
        )  # fmt: skip
    else:
        down_twin(pairs, rows, weights, partials)
    return partials


def gate_up_twin(
    pairs: ExpertPairs, x: torch.Tensor, gate: GateFacts, mid: torch.Tensor, weights: torch.Tensor | None = None
) -> None:
    """Write what `gate_up` computes to `mid`, in plain torch and float32. Rows of skipped pairs stay as they are."""
    record = pairs.record
    for expert, offset, tokens, slots in _used_experts(pairs):
        panels = pairs.pool[offset : offset + record.down_start].view(panel_layout.panel_count(record.intermediate), -1)
        gate_rows, up_rows = (
            x[tokens].float() @ panel_layout.dequantize(part, quant, record.hidden)[: record.intermediate].T
            for quant, part in (
                (record.gate, panels[:, : record.gate_panel_bytes]),
                (record.up, panels[:, record.gate_panel_bytes :]),
            )
        )
        if weights is not None:
            gate_rows, up_rows = (rows * weights[tokens, slots, None] for rows in (gate_rows, up_rows))
        if pairs.biases is not None:
            gate_rows, up_rows = gate_rows + pairs.biases.gate[expert], up_rows + pairs.biases.up[expert]
        both = reference.activate(gate.activation, gate_rows, up_rows, gate.alpha, gate.limit)
        mid[tokens, slots] = both.to(mid.dtype)


def down_twin(pairs: ExpertPairs, mid: torch.Tensor, weights: torch.Tensor | None, partials: torch.Tensor) -> None:
    """Write what `down` computes to `partials`, in plain torch and float32. mid: [tokens * k, intermediate]."""
    record = pairs.record
    partials.zero_()
    for expert, offset, tokens, slots in _used_experts(pairs):
        packed = pairs.pool[offset + record.down_start : offset + record.bytes]
        panels = packed.view(panel_layout.panel_count(record.hidden), -1)
        matrix = panel_layout.dequantize(panels, record.down, record.intermediate)[: record.hidden]
        rows = mid[tokens * pairs.ids.shape[1] + slots].float() @ matrix.T
        if pairs.biases is not None:
            rows = rows + pairs.biases.down[expert]
        partials[tokens, slots] = rows if weights is None else rows * weights[tokens, slots, None]


def _used_experts(pairs: ExpertPairs) -> list[tuple[int, int, torch.Tensor, torch.Tensor]]:
    """For every expert that is not skipped: its id, where its record begins, the tokens and slots of its pairs."""
    starts = pairs.offsets.tolist()
    used = [expert for expert in pairs.ids.unique().tolist() if expert >= 0 and starts[expert] >= 0]
    return [(expert, starts[expert], *torch.where(pairs.ids == expert)) for expert in used]


def _check_input(pairs: ExpertPairs, x: torch.Tensor) -> None:
    _check_shapes(pairs.ids, x, pairs.record.hidden)


def _check_shapes(ids: torch.Tensor, rows: torch.Tensor, columns: int) -> None:
    if ids.dim() != 2 or len(ids) != len(rows) or rows.shape[-1] != columns or not ids.is_contiguous():
        raise ValueError(f"ids {list(ids.shape)} do not fit rows {list(rows.shape)}, which must have {columns} columns")
