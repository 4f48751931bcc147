"""Products of few pairs (of a token and an expert) with packed experts, which request their weights early.

The method, the arguments and the bits are those of expert_int8.py, where each pair has programs of its own. A program
requests several steps of weights before it multiplies the first. `down` does so while gate and up are still computed,
since its weights follow from what the router chose.
"""

import torch

from ktqueue.operators.gpu.kernels import dots, panel_layout
from ktqueue.operators.gpu.kernels.activation import joined
from ktqueue.operators.gpu.kernels.expert_int8 import Int8Rows, add_pairs, store_quantised
from ktqueue.operators.gpu.kernels.expert_pairs import ExpertPairs, offset_of
from ktqueue.operators.gpu.kernels.expert_tiles import DotTile
from ktqueue.operators.gpu.kernels.operation import launch_options, let_next_begin, tl, triton, wait_for_previous
from ktqueue.operators.gpu.kernels.panel_layout import SLAB, ExpertRecord
from ktqueue.operators.native import GateFacts

_GATE_UP, _DOWN = DotTile(16, 32, warp_rows=8), DotTile(8, 32, warp_rows=8)
_DOWN_OF_SEVERAL = _DOWN._replace(registers=64)
"""For more tokens than one. More programs of theirs run at once."""
_GATE_UP_STEPS, _DOWN_STEPS = 4, 3
"""Tiles that are requested at once. Further ones come one by one."""
_LARGE_DOWN = "Q8_0", "Q3_K", "Q5_K", "Q5_1", "IQ2_S", "IQ1_M"
_LARGE = *_LARGE_DOWN, "Q2_K", "Q6_K", "NVFP4"
"""Formats of which a thread has too few registers for so many tiles, by the compiler: it would store them to memory.
_LARGE_DOWN: of _DOWN_OF_SEVERAL; _LARGE: of gate and up."""


def fits(record: ExpertRecord) -> bool:
    """Whether `gate_up` can hold what it requests of such experts. `down` always can."""
    return not {*map(panel_layout.panel_format, (record.gate, record.up))} & {*_LARGE}


@triton.jit
def _tile_of(
    base, panel, step, row, S: tl.constexpr, SLAB_COUNT: tl.constexpr, FORMAT: tl.constexpr,
    SUPERBLOCK_BYTES: tl.constexpr,
):  # fmt: skip
    slab = tl.minimum(step * S + tl.arange(0, S)[:, None], SLAB_COUNT - 1)
    return dots.stored_tile(base, panel, slab, row, SLAB_COUNT, FORMAT, SUPERBLOCK_BYTES)


@triton.jit
def _product_of(
    tile, step, row, x_row, codes, scales, sums, S: tl.constexpr, SLAB_COUNT: tl.constexpr, FORMAT: tl.constexpr
):
    slab = step * S + tl.arange(0, S)[:, None]
    inside = slab < SLAB_COUNT
    x_slab = x_row * SLAB_COUNT + tl.minimum(slab, SLAB_COUNT - 1)
    return dots.times_tile(tile, row, x_slab, inside, codes, scales, sums, FORMAT)


@triton.jit(do_not_specialize=["slots"])
def _gate_up_of_pair(
    pool, offsets, ids, codes, scales, sums, pair_weights, bias, up_bias, out, out_scales, out_sums, slots,
    WEIGHTED: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    SLAB_COUNT: tl.constexpr, ROWS: tl.constexpr,
    FORMAT: tl.constexpr, SUPERBLOCK_BYTES: tl.constexpr, PANEL_BYTES: tl.constexpr,
    UP_FORMAT: tl.constexpr, UP_SUPERBLOCK_BYTES: tl.constexpr, UP_PANEL_BYTES: tl.constexpr,
    S: tl.constexpr, N: tl.constexpr, STEPS: tl.constexpr, RECORD_BYTES: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """A program has N rows of a pair's expert: see expert_int8._experts_kernel."""
    pair = tl.program_id(1)
    n = tl.program_id(0) * N + tl.arange(0, N)
    last_panel: tl.constexpr = (ROWS + 15) // 16 - 1
    both_bytes: tl.constexpr = PANEL_BYTES + UP_PANEL_BYTES
    row = (tl.arange(0, N) % 16)[None, :]
    first_panel = tl.program_id(0) * (N // 16)
    panel = tl.minimum(tl.arange(0, N) // 16, last_panel - first_panel)[None, :] * both_bytes
    wait_for_previous(WAITS, False)
    expert = tl.load(ids + pair)
    offset = offset_of(expert, offsets, RECORD_BYTES)
    if (expert >= 0) & (offset >= 0):
        base = pool + offset + first_panel.to(tl.int64) * both_bytes
        gates = ()
        ups = ()
        for step in tl.static_range(STEPS):
            gates = gates + (_tile_of(base, panel, step, row, S, SLAB_COUNT, FORMAT, SUPERBLOCK_BYTES),)
            up_base = base + PANEL_BYTES
            ups = ups + (_tile_of(up_base, panel, step, row, S, SLAB_COUNT, UP_FORMAT, UP_SUPERBLOCK_BYTES),)
        let_next_begin(WAITS)
        x_row = pair // slots
        gate = tl.zeros((S, N), tl.float32)
        up = tl.zeros((S, N), tl.float32)
        for step in tl.static_range(STEPS):
            gate += _product_of(gates[step], step, row, x_row, codes, scales, sums, S, SLAB_COUNT, FORMAT)
            up += _product_of(ups[step], step, row, x_row, codes, scales, sums, S, SLAB_COUNT, UP_FORMAT)
        for step in tl.range(STEPS, (SLAB_COUNT + S - 1) // S):
            tile = _tile_of(base, panel, step, row, S, SLAB_COUNT, FORMAT, SUPERBLOCK_BYTES)
            up_base = base + PANEL_BYTES
            up_tile = _tile_of(up_base, panel, step, row, S, SLAB_COUNT, UP_FORMAT, UP_SUPERBLOCK_BYTES)
            gate += _product_of(tile, step, row, x_row, codes, scales, sums, S, SLAB_COUNT, FORMAT)
            up += _product_of(up_tile, step, row, x_row, codes, scales, sums, S, SLAB_COUNT, UP_FORMAT)
        weight = 1.0
        if WEIGHTED:
            weight = tl.load(pair_weights + pair)
        value = tl.sum(gate, 0) * weight
        if bias is not None:
            value += tl.load(bias + expert * ROWS + n, mask=n < ROWS, other=0.0)
        upper = tl.sum(up, 0) * weight
        if up_bias is not None:
            upper += tl.load(up_bias + expert * ROWS + n, mask=n < ROWS, other=0.0)
        value = joined(value, upper, ACTIVATION, ALPHA, LIMIT)
        store_quantised(value, pair.to(tl.int64), True, out, out_scales, out_sums, ROWS, N)


@triton.jit
def _down_of_pair(
    pool, offsets, ids, codes, scales, sums, pair_weights, bias, out, residual, counters,
    start,  # byte of a record where the matrix begins
    WEIGHTED: tl.constexpr, SLAB_COUNT: tl.constexpr, ROWS: tl.constexpr,
    FORMAT: tl.constexpr, SUPERBLOCK_BYTES: tl.constexpr, PANEL_BYTES: tl.constexpr,
    S: tl.constexpr, N: tl.constexpr, STEPS: tl.constexpr, RECORD_BYTES: tl.constexpr,
    ADDED: tl.constexpr,  # pairs of a token whose rows are added to the residual, or 0
    WAITS: tl.constexpr,
):  # fmt: skip
    """A program has N rows of a pair's expert: see expert_int8._experts_kernel.

    It reads ids, offsets and weights before it waits. It begins after all programs of gate and up have waited, so what
    earlier kernels wrote can be read. Ids are read past the first-level cache, which may hold those of another layer.
    """
    pair = tl.program_id(1)
    n = tl.program_id(0) * N + tl.arange(0, N)
    last_panel: tl.constexpr = (ROWS + 15) // 16 - 1
    row = (tl.arange(0, N) % 16)[None, :]
    first_panel = tl.program_id(0) * (N // 16)
    panel = tl.minimum(tl.arange(0, N) // 16, last_panel - first_panel)[None, :] * PANEL_BYTES
    expert = tl.load(ids + pair, cache_modifier=".cg")
    offset = offset_of(expert, offsets, RECORD_BYTES)
    place = pair.to(tl.int64) * ROWS + n
    if (expert >= 0) & (offset >= 0):
        base = pool + offset + start + first_panel.to(tl.int64) * PANEL_BYTES
        tiles = ()
        for step in tl.static_range(STEPS):
            tiles = tiles + (_tile_of(base, panel, step, row, S, SLAB_COUNT, FORMAT, SUPERBLOCK_BYTES),)
        wait_for_previous(WAITS)
        total = tl.zeros((S, N), tl.float32)
        for step in tl.static_range(STEPS):
            total += _product_of(tiles[step], step, row, pair, codes, scales, sums, S, SLAB_COUNT, FORMAT)
        for step in tl.range(STEPS, (SLAB_COUNT + S - 1) // S):
            tile = _tile_of(base, panel, step, row, S, SLAB_COUNT, FORMAT, SUPERBLOCK_BYTES)
            total += _product_of(tile, step, row, pair, codes, scales, sums, S, SLAB_COUNT, FORMAT)
        value = tl.sum(total, 0)
        if bias is not None:
            value += tl.load(bias + expert * ROWS + n, mask=n < ROWS, other=0.0)
        if WEIGHTED:
            value *= tl.load(pair_weights + pair)
        tl.store(out + place, value, mask=n < ROWS)
    else:
        wait_for_previous(WAITS)
        tl.store(out + place, tl.zeros((N,), tl.float32), mask=n < ROWS)
    if ADDED > 0:
        add_pairs(pair, n, out, residual, counters, ADDED, ROWS, N)


def gate_up(pairs: ExpertPairs, x: Int8Rows, gate: GateFacts, weights: torch.Tensor | None) -> Int8Rows:
    """See expert_int8.gate_up."""
    record, tile = pairs.record, _GATE_UP
    pool, record_bytes = pairs.even_pool
    number, rows, columns = pairs.ids.numel(), record.intermediate, record.hidden
    mid = Int8Rows.empty(number, rows, pairs.ids.device)
    biases = (None, None) if pairs.biases is None else (pairs.biases.gate, pairs.biases.up)
    _gate_up_of_pair[(triton.cdiv(rows, tile.rows), number)](
        pool, pairs.offsets, pairs.ids, x.codes, x.scales, x.sums, x.scales if weights is None else weights,
        *biases, mid.codes, mid.scales, mid.sums, pairs.ids.shape[1],
        WEIGHTED=weights is not None,
        ACTIVATION=gate.activation,
        ALPHA=gate.alpha,
        LIMIT=gate.limit,
        SLAB_COUNT=columns // SLAB,
        ROWS=rows,
        **panel_layout.constants(record.gate, columns),
        **panel_layout.constants(record.up, columns, "UP_"),
        S=tile.slabs,
        N=tile.rows,
        STEPS=min(_GATE_UP_STEPS, triton.cdiv(columns // SLAB, tile.slabs)),
        RECORD_BYTES=record_bytes,
        **launch_options(),
        num_warps=tile.warps,
        maxnreg=tile.registers,
    )  # fmt: skip
    return mid


def down(
    pairs: ExpertPairs,
    mid: Int8Rows,
    weights: torch.Tensor | None,
    *,
    added_to: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """See expert_int8.down. Must directly follow `gate_up` on the stream."""
    record = pairs.record
    has_room = len(pairs.ids) > 1 and panel_layout.panel_format(record.down) not in _LARGE_DOWN
    tile = _DOWN_OF_SEVERAL if has_room else _DOWN
    pool, record_bytes = pairs.even_pool
    number, rows, columns = pairs.ids.numel(), record.hidden, record.intermediate
    out = torch.empty(number, rows, dtype=torch.float32, device=pairs.ids.device)
    _down_of_pair[(triton.cdiv(rows, tile.rows), number)](
        pool, pairs.offsets, pairs.ids, mid.codes, mid.scales, mid.sums,
        mid.scales if weights is None else weights, None if pairs.biases is None else pairs.biases.down,
        out, added_to, counters, record.down_start,
        WEIGHTED=weights is not None,
        SLAB_COUNT=columns // SLAB,
        ROWS=rows,
        **panel_layout.constants(record.down, columns),
        S=tile.slabs,
        N=tile.rows,
        STEPS=min(_DOWN_STEPS, triton.cdiv(columns // SLAB, tile.slabs)),
        RECORD_BYTES=record_bytes,
        ADDED=0 if added_to is None else pairs.ids.shape[1],
        **launch_options(),
        num_warps=tile.warps,
        maxnreg=tile.registers,
    )  # fmt: skip
    return out.view(*pairs.ids.shape, record.hidden)
