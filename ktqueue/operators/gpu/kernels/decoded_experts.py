"""Experts of a long step: a layer's experts are decoded once, and grouped matrix products multiply sorted rows by them.

The kernels of expert_products.py decode a weight again for each block of tokens. With many tokens an expert that is
most of their work. Here every used expert is decoded to the type of the activations, and torch multiplies: gate and up
in one product, then down. One memory has the decoded gate and up, and after their product down.

Products are rounded to the type of the activations: gate and up before they are joined, down before it is weighted. The
weighted sum is float32 and in the order of a token's slots. Knows no layer, no router and no placement.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ktqueue.operators import reference
from ktqueue.operators.gpu.device import is_gpu, multiplies_groups
from ktqueue.operators.gpu.kernels import formats, panel_layout
from ktqueue.operators.gpu.kernels.activation import joined
from ktqueue.operators.gpu.kernels.expert_pairs import ExpertPairs
from ktqueue.operators.gpu.kernels.operation import check_fits, runs_kernel, tl, triton
from ktqueue.operators.gpu.kernels.panel_layout import FLOATS, SLAB, SLABS, ExpertRecord
from ktqueue.operators.native import GateFacts

_MOST_COLUMNS = 1024
"""Columns that one program joins or adds."""
_ALIGNED_WEIGHTS = 8
"""The grouped product needs rows of a multiple of 16 bytes."""
_GROUPED: Callable[..., torch.Tensor] | None = getattr(
    torch.nn.functional, "grouped_mm", getattr(torch, "_grouped_mm", None)
)


class SortedRows(NamedTuple):
    """The pairs of a step in the order of their experts, and behind them those that are skipped.

    pairs: [pairs] int64; experts: [pairs] int32, the expert of each, or the number of experts if it is skipped;
    places: [pairs] int64, where each pair is in this order; ends: [experts] int32, where the rows of each expert end.
    """

    pairs: torch.Tensor
    experts: torch.Tensor
    places: torch.Tensor
    ends: torch.Tensor


def decoded_weights(record: ExpertRecord, experts: int) -> int:
    """Weights that the memory must hold for a layer of so many experts."""
    return experts * 2 * record.intermediate * record.hidden


def can_be_grouped(record: ExpertRecord, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `device` has a grouped product that takes such experts, without a wait of the host. CPU tensors have."""
    if record.hidden % _ALIGNED_WEIGHTS or record.intermediate % _ALIGNED_WEIGHTS:
        return False
    if not is_gpu(device):
        return True
    return _GROUPED is not None and dtype == torch.bfloat16 and multiplies_groups(device)


def sort_rows(pairs: ExpertPairs) -> SortedRows:
    """Sort the pairs by expert, on the device. Pairs of one expert stay in order."""
    ids, experts = pairs.ids.flatten(), pairs.offsets.numel()
    skipped = (ids < 0) | (pairs.offsets[ids.clamp(min=0)] < 0)
    numbers, order = torch.sort(ids.masked_fill(skipped, experts).to(torch.int32), stable=True)
    every = torch.arange(experts, dtype=torch.int32, device=ids.device)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=ids.device))
    return SortedRows(order, numbers, places, torch.searchsorted(numbers, every, right=True, out_int32=True))


@triton.jit
def _store_rows(
    base,  # pointer of a matrix's first panel
    first,  # of its rows
    out,  # pointer where its rows are decoded to
    block,  # which superblock
    STRIDE: tl.constexpr,  # bytes from panel to panel
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    SUPERBLOCK_BYTES: tl.constexpr,
    N: tl.constexpr,
):
    """Decode one superblock of N rows."""
    slab_count: tl.constexpr = (COLUMNS + 31) // 32
    r = first + tl.arange(0, N)
    inside = tl.minimum(r, ROWS - 1)
    panel = (inside // 16 * STRIDE + block * SUPERBLOCK_BYTES)[None, :]
    row = (inside % 16)[None, :]
    word = tl.arange(0, 32)[:, None]
    slabs = tl.minimum(slab_count - block * 8, 8)
    slab = tl.minimum(word // 4, slabs - 1)
    values = formats.decoded(base, panel, slab, word, row, slabs, FORMAT, IS_FLOAT).to(out.dtype.element_ty)
    values = tl.reshape(tl.permute(values, (1, 0, 2)), (N, 256))  # so that a warp writes whole lines of memory
    column = block * 256 + tl.arange(0, 256)[None, :]
    target = out + r.to(tl.int64)[:, None] * COLUMNS + column
    tl.store(target, values, mask=(r < ROWS)[:, None] & (column < COLUMNS))


@triton.jit
def _decode_experts(
    pool, offsets, ends, out,
    start,  # byte of a record where the matrix begins
    TWO: tl.constexpr,  # gate and up, one below the other
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr, IS_FLOAT: tl.constexpr, SUPERBLOCK_BYTES: tl.constexpr, PANEL_BYTES: tl.constexpr,
    UP_FORMAT: tl.constexpr, UP_IS_FLOAT: tl.constexpr, UP_SUPERBLOCK_BYTES: tl.constexpr,
    UP_PANEL_BYTES: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """One program for a superblock of N rows of an expert. Experts without rows are not decoded."""
    expert = tl.program_id(2)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    if tl.load(ends + expert) > begin:
        base = pool + tl.multiple_of(tl.load(offsets + expert), 64) + start
        turn = tl.program_id(0)
        turns: tl.constexpr = (ROWS + N - 1) // N
        stride: tl.constexpr = PANEL_BYTES + UP_PANEL_BYTES if TWO else PANEL_BYTES
        target = out + expert.to(tl.int64) * ((2 if TWO else 1) * ROWS * COLUMNS)
        if turn < turns:
            _store_rows(
                base, turn * N, target, tl.program_id(1), stride, ROWS, COLUMNS, FORMAT, IS_FLOAT, SUPERBLOCK_BYTES, N
            )
        elif TWO:
            _store_rows(
                base + PANEL_BYTES, (turn - turns) * N, target + ROWS * COLUMNS, tl.program_id(1), stride, ROWS,
                COLUMNS, UP_FORMAT, UP_IS_FLOAT, UP_SUPERBLOCK_BYTES, N,
            )  # fmt: skip


@triton.jit
def _join_rows(
    both,  # [pairs, 2 * ROWS]
    experts,  # [pairs] int32
    order,  # [pairs] int64, the pair of each row
    pair_weights,  # [pairs] float32
    bias,  # [experts, ROWS] float32 or None
    up_bias,
    out,  # [pairs, ROWS]
    expert_count,
    WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for BLOCK columns of a pair. Rows that are skipped stay as they are."""
    place = tl.program_id(0).to(tl.int64)
    expert = tl.load(experts + place)
    if expert < expert_count:
        n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = n < ROWS
        gate = tl.load(both + place * (2 * ROWS) + n, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(both + place * (2 * ROWS) + ROWS + n, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            weight = tl.load(pair_weights + tl.load(order + place))
            gate *= weight
            up *= weight
        if bias is not None:
            gate += tl.load(bias + expert * ROWS + n, mask=inside, other=0.0)
            up += tl.load(up_bias + expert * ROWS + n, mask=inside, other=0.0)
        value = joined(gate, up, ACTIVATION, ALPHA, LIMIT)
        tl.store(out + place * ROWS + n, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_slots(
    rows,  # [pairs, HIDDEN], in the order of experts
    experts,
    places,
    pair_weights,
    bias,  # [experts, HIDDEN] float32 or None
    out,  # [tokens, HIDDEN] float32
    expert_count,
    SLOTS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for BLOCK columns of a token."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(SLOTS):
        place = tl.load(places + token * SLOTS + slot)
        expert = tl.load(experts + place)
        inside = (n < HIDDEN) & (expert < expert_count)
        value = tl.load(rows + place * HIDDEN + n, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            value += tl.load(bias + expert * HIDDEN + n, mask=inside, other=0.0)
        if WEIGHTED:
            weight = tl.load(pair_weights + token * SLOTS + slot)
            value = tl.where(inside, value * weight, 0.0)  # the weight of a skipped pair may be NaN
        total += value
    tl.store(out + token * HIDDEN + n, total, mask=n < HIDDEN)


def experts(
    pairs: ExpertPairs,
    down_offsets: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    gate: GateFacts,
    memory: torch.Tensor,
) -> torch.Tensor:
    """Return the sum over slots of weight * expert(x), or of expert(weight * x) if the gate says so: [tokens, 1,
    hidden] float32. Skipped pairs add nothing.

    Arguments as in expert_products.experts. memory: [decoded_weights or more] in the dtype of x; it is overwritten.
    Raises ValueError for a memory that is too small or has another dtype, and for shapes that do not fit.
    """
    record, (tokens, slots), number = pairs.record, pairs.ids.shape, pairs.offsets.numel()
    fits = len(x) == tokens and x.shape[1] == record.hidden and pairs.ids.is_contiguous()
    fits &= memory.dtype == x.dtype and memory.numel() >= decoded_weights(record, number)
    check_fits(fits, "decoded experts", ids=pairs.ids, x=x, memory=memory)
    weights = weights.contiguous()
    of_input, of_output = (weights, None) if gate.weighted_input else (None, weights)
    rows = sort_rows(pairs)
    chosen = x[rows.pairs // slots]
    both = grouped_product(chosen, decode(pairs, rows, memory, (record.gate, record.up)), rows.ends)
    del chosen  # its memory is used again
    mid = join(pairs, rows, both, gate, of_input)
    del both
    matrices = decode(pairs._replace(offsets=down_offsets), rows, memory, (record.down,))
    return add_slots(pairs, rows, grouped_product(mid, matrices, rows.ends), of_output)


def decode(
    pairs: ExpertPairs, rows: SortedRows, memory: torch.Tensor, quants: tuple[str, ...], *, rows_at_once: int = 16
) -> torch.Tensor:
    """Decode one matrix, or gate and up, of each expert that has rows: [experts, rows, columns], a part of `memory`.

    quants: the formats of gate and up, or that of down. Matrices of other experts are undefined.
    """
    record, two = pairs.record, len(quants) == 2
    height, columns = (record.intermediate, record.hidden) if two else (record.hidden, record.intermediate)
    number = pairs.offsets.numel()
    out = memory[: number * len(quants) * height * columns].view(number, len(quants) * height, columns)
    if not runs_kernel(memory):
        _decode_twin(pairs, rows, out, two)
        return out
    first, up = quants[0], quants[-1]
    grid = (len(quants) * triton.cdiv(height, rows_at_once), triton.cdiv(columns, SLAB * SLABS), number)
    _decode_experts[grid](
        pairs.pool, pairs.offsets, rows.ends, out, 0 if two else record.down_start,
        TWO=two,
        ROWS=height,
        COLUMNS=columns,
        IS_FLOAT=first in FLOATS,
        **panel_layout.constants(first, columns),
        UP_IS_FLOAT=up in FLOATS,
        **panel_layout.constants(up, columns, "UP_"),
        N=rows_at_once,
    )  # fmt: skip
    return out


def _decode_twin(pairs: ExpertPairs, rows: SortedRows, out: torch.Tensor, two: bool) -> None:
    record, begin = pairs.record, 0
    for expert, end in enumerate(rows.ends.tolist()):
        if end > begin:
            packed = pairs.pool[int(pairs.offsets[expert]) :][: record.bytes]
            if two:
                panels = packed[: record.down_start].view(panel_layout.panel_count(record.intermediate), -1)
                gate = panel_layout.dequantize(panels[:, : record.gate_panel_bytes], record.gate, record.hidden)
                up = panel_layout.dequantize(panels[:, record.gate_panel_bytes :], record.up, record.hidden)
                out[expert] = torch.cat([gate[: record.intermediate], up[: record.intermediate]])
            else:
                panels = packed[record.down_start :].view(panel_layout.panel_count(record.hidden), -1)
                out[expert] = panel_layout.dequantize(panels, record.down, record.intermediate)[: record.hidden]
        begin = end


def grouped_product(x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x [rows, columns] -> [rows, outputs] in its dtype: the rows from ends[e - 1] to ends[e] times matrix e,
    transposed.

    matrices: [experts, outputs, columns]; ends: [experts] int32, rising. Rows behind the last end are undefined.
    Nothing waits for a GPU that `can_be_grouped` accepts.
    """
    if is_gpu(x.device):
        assert _GROUPED is not None
        return _GROUPED(x, matrices.transpose(1, 2), offs=ends)
    out, begin = x.new_full((len(x), matrices.shape[1]), torch.nan), 0
    for matrix, end in zip(matrices, ends.tolist(), strict=True):
        out[begin:end] = x[begin:end] @ matrix.T
        begin = end
    return out


def join(
    pairs: ExpertPairs, rows: SortedRows, both: torch.Tensor, gate: GateFacts, weights: torch.Tensor | None
) -> torch.Tensor:
    """Join gate and up as `gate` says: both [pairs, 2 * intermediate] -> [pairs, intermediate], its dtype.

    weights: [tokens, k] float32, factors of gate and up before their biases; None: all 1. Rows of skipped pairs are
    undefined.
    """
    columns = pairs.record.intermediate
    mid = both.new_empty(len(both), columns)
    biases = (None, None) if pairs.biases is None else (pairs.biases.gate, pairs.biases.up)
    if not runs_kernel(both):
        used = rows.experts < pairs.offsets.numel()
        experts = rows.experts[used].long()
        two = both[used].float()
        if weights is not None:
            two = two * weights.flatten()[rows.pairs[used], None]
        gate_rows, up_rows = two.split(columns, dim=1)
        if pairs.biases is not None:
            gate_rows, up_rows = gate_rows + pairs.biases.gate[experts], up_rows + pairs.biases.up[experts]
        mid[used] = reference.activate(gate.activation, gate_rows, up_rows, gate.alpha, gate.limit).to(mid.dtype)
    elif len(both):
        block = min(triton.next_power_of_2(columns), _MOST_COLUMNS)
        _join_rows[(len(both), triton.cdiv(columns, block))](
            both, rows.experts, rows.pairs, both if weights is None else weights, *biases, mid, pairs.offsets.numel(),
            WEIGHTED=weights is not None,
            ACTIVATION=gate.activation,
            ALPHA=gate.alpha,
            LIMIT=gate.limit,
            ROWS=columns,
            BLOCK=block,
            num_warps=max(block // 256, 1),
        )  # fmt: skip
    return mid


def add_slots(
    pairs: ExpertPairs, rows: SortedRows, products: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    """Add weight * (product + bias) over the slots of each token: [tokens, 1, hidden] float32.

    products: [pairs, hidden] in the order of `rows`; weights: [tokens, k] float32; None: all 1.
    """
    tokens, slots = pairs.ids.shape
    hidden, bias = products.shape[1], None if pairs.biases is None else pairs.biases.down
    out = torch.zeros(tokens, hidden, dtype=torch.float32, device=products.device)
    if not runs_kernel(products):
        experts = rows.experts[rows.places].long()
        used = experts < pairs.offsets.numel()
        terms = torch.zeros(len(experts), hidden)
        terms[used] = products[rows.places[used]].float() + (0.0 if bias is None else bias[experts[used]])
        if weights is not None:
            terms[used] *= weights.flatten()[used, None]
        for slot in range(slots):
            out += terms.view(tokens, slots, hidden)[:, slot]
    elif tokens:
        block = min(triton.next_power_of_2(hidden), _MOST_COLUMNS)
        _add_slots[(tokens, triton.cdiv(hidden, block))](
            products, rows.experts, rows.places, out if weights is None else weights, bias, out, pairs.offsets.numel(),
            SLOTS=slots,
            WEIGHTED=weights is not None,
            HIDDEN=hidden,
            BLOCK=block,
            num_warps=max(block // 256, 1),
        )  # fmt: skip
    return out[:, None]
