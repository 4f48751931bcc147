"""Products of tokens with packed experts on tensor cores: the kernel behind expert_products.py, and its launcher.

A *pair* is a token and an expert that it chose. One program multiplies up to BLOCK_M pairs of one expert by BLOCK_N
rows of that expert's weights. It decodes the weights on the way from memory to the tensor cores, so a weight is read
once for up to BLOCK_M pairs. There are three ways to find the pairs of a program:
  LEADER    few pairs: program p computes the expert of pair p, unless a pair before p chose the same expert
  EXPERT    program e computes expert e, and finds its pairs among all pairs
  SORTED    many pairs: a list of pairs sorted by expert is made first
"""

import torch

from ktqueue.operators.gpu.kernels import formats, panel_layout
from ktqueue.operators.gpu.kernels.activation import joined
from ktqueue.operators.gpu.kernels.expert_pairs import ExpertPairs, sort_pairs
from ktqueue.operators.gpu.kernels.expert_tiles import TILES, ExpertTiles
from ktqueue.operators.gpu.kernels.operation import tl, triton
from ktqueue.operators.gpu.kernels.panel_layout import FLOATS, SLAB, SLABS
from ktqueue.operators.native import GateFacts

LEADER = tl.constexpr(0)
EXPERT = tl.constexpr(1)
SORTED = tl.constexpr(2)
_FEWEST_PAIRS = 16
"""Up to this number every warp of a program needs some rows: there are few programs."""


@triton.jit
def _eighths(x, M: tl.constexpr):
    """x [M, 256] -> eight tensors [M, 32]. Number i has columns 8w + i."""
    bits = tl.reshape(x, (M, 32, 2, 2, 2))
    even, odd = tl.split(bits)  # by the lowest bit of i
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x2, x6 = tl.split(x26)
    x1, x5 = tl.split(x15)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def product(
    x_rows,  # [M] pointers
    live,  # [M]
    base,  # scalar pointer of the first panel
    panel_offsets,  # [N] bytes
    panel_rows,  # [N] 0..15
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    SUPERBLOCK_BYTES: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PERMUTED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return x times the transposed weights, float32 [M, N].

    PERMUTED: rows of x hold the eight parts of each 256 columns one after the other, and zeros after the last column.
    """
    word = tl.arange(0, 32)[:, None]
    row = panel_rows[None, :]
    slab_count: tl.constexpr = (COLUMNS + 31) // 32
    acc = tl.zeros((M, N), tl.float32)
    for block in tl.range(0, (slab_count + 7) // 8, num_stages=STAGES):
        panel = (panel_offsets + block * SUPERBLOCK_BYTES)[None, :]
        if slab_count % 8 == 0:
            slabs: tl.constexpr = 8
            slab = word // 4
        else:
            slabs = tl.minimum(slab_count - block * 8, 8)
            slab = tl.minimum(word // 4, slabs - 1)
        if not IS_FLOAT:
            first, second = formats.planes(base, panel, slab, word, row, slabs, FORMAT)
            scale, minimum = formats.scales(base, panel, slab, word, row, slabs, FORMAT)
        if PERMUTED:
            x_parts = x_rows[:, None] + block * 256 + tl.arange(0, 32)[None, :]
        else:
            column = block * 256 + tl.arange(0, 256)
            mask = live[:, None] & (column < COLUMNS)[None, :]
            parts = _eighths(tl.load(x_rows[:, None] + column[None, :], mask=mask, other=0.0), M)
        for i in tl.static_range(8):
            if IS_FLOAT:
                weights = formats.float_part(base, panel, slab, word, row, i, FORMAT)
            else:
                weights = formats.part(first, second, scale, minimum, i, FORMAT)
            x = tl.load(x_parts + i * 32, mask=live[:, None], other=0.0) if PERMUTED else parts[i]
            acc = tl.dot(x, weights.to(x.dtype), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["pairs", "experts", "slots", "zero_pairs"])
def _panels_kernel(
    pool,
    offsets,  # [experts] int64
    ids,  # [pairs] int64
    x,
    pair_weights,  # [pairs] float32
    bias,  # [experts, ROWS] float32 of the matrix or of gate; or None
    up_bias,
    out,  # [pairs, ROWS]
    sorted_pairs,  # [pairs] int32, only for SORTED
    starts,  # [experts] int32
    counts,  # [experts] int32
    pairs,
    experts,
    slots,  # pairs that share a row of x
    x_stride,
    start,  # byte of a record where the matrix begins
    zero_pairs,  # pairs whose rows a program sets to zero if they are skipped
    ACTIVATION: tl.constexpr,  # "": one matrix, otherwise gate and up
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    SUPERBLOCK_BYTES: tl.constexpr,
    PANEL_BYTES: tl.constexpr,
    UP_FORMAT: tl.constexpr,
    UP_IS_FLOAT: tl.constexpr,
    UP_SUPERBLOCK_BYTES: tl.constexpr,
    UP_PANEL_BYTES: tl.constexpr,
    WEIGHTED: tl.constexpr,  # rows are multiplied by pair_weights, before biases of gate and up, after that of down
    FIND: tl.constexpr,
    SCAN: tl.constexpr,  # pairs, or experts for SORTED, rounded up to a power of two
    ZERO: tl.constexpr,
    PERMUTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    block_n = tl.program_id(0)
    program = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)

    if ZERO > 0:  # rows of pairs that no program computes
        done = program * 0
        while done < zero_pairs:
            turn = done + tl.arange(0, ZERO)
            candidate = program * zero_pairs + turn
            mine = (turn < zero_pairs) & (candidate < pairs)
            wanted = tl.load(ids + candidate, mask=mine, other=0)
            skipped = mine & (tl.load(offsets + tl.maximum(wanted, 0), mask=mine & (wanted >= 0), other=-1) < 0)
            target = out + candidate[:, None].to(tl.int64) * ROWS + n[None, :]
            zeros = tl.zeros((ZERO, BLOCK_N), tl.float32)
            tl.store(target, zeros.to(out.dtype.element_ty), mask=skipped[:, None] & (n < ROWS)[None, :])
            done += ZERO

    # The offset of the record, and which of the expert's pairs this program computes: lo .. hi.
    if FIND == SORTED:
        all_experts = tl.arange(0, SCAN)
        found = tl.load(counts + all_experts, mask=all_experts < experts, other=0)
        blocks = (found + BLOCK_M - 1) // BLOCK_M
        expert = tl.sum((tl.cumsum(blocks, 0) <= program).to(tl.int32), 0)
        lo = (program - tl.sum(tl.where(all_experts < expert, blocks, 0), 0)) * BLOCK_M
        used = expert < experts
        first = tl.load(starts + expert, mask=used, other=0)
        hi = tl.minimum(lo + BLOCK_M, tl.load(counts + expert, mask=used, other=0))
        offset = tl.load(offsets + expert, mask=used, other=0)
    else:
        lo = tl.program_id(1) * 0
        scan = tl.arange(0, SCAN)
        chosen = tl.load(ids + scan, mask=scan < pairs, other=-1)
        expert = tl.load(ids + program) if FIND == LEADER else program.to(tl.int64)
        offset = tl.load(offsets + tl.maximum(expert, 0))
        match = (chosen == expert) & (expert >= 0) & (offset >= 0)
        hi = tl.sum(match.to(tl.int32), 0)
        if FIND == LEADER:
            hi = tl.where(tl.min(tl.where(match, scan, SCAN), 0) == program, hi, 0)
        position = tl.cumsum(match.to(tl.int32), 0) - 1

    base = pool + tl.multiple_of(offset, 64) + start
    begin = lo
    while begin < hi:  # the interpreter has no range over run-time values
        live = begin + m < hi
        if FIND == SORTED:
            pair = tl.load(sorted_pairs + first + begin + m, mask=live, other=0)
        else:
            pick = match[None, :] & (position[None, :] == (begin + m)[:, None])
            pair = tl.sum(tl.where(pick, scan[None, :], 0), 1)
        x_rows = x + (pair // slots).to(tl.int64) * x_stride
        last_panel: tl.constexpr = (ROWS + 15) // 16 - 1
        if ACTIVATION == "":
            panels = BLOCK_N // 16
            local = tl.arange(0, BLOCK_N)
            panel = tl.minimum(local // 16, last_panel - block_n * panels)
            acc = product(
                x_rows, live, base + (block_n * panels).to(tl.int64) * PANEL_BYTES, panel * PANEL_BYTES, local % 16,
                COLUMNS, FORMAT, IS_FLOAT, SUPERBLOCK_BYTES, BLOCK_M, BLOCK_N, PERMUTED, STAGES,
            )  # fmt: skip
        else:
            both_bytes: tl.constexpr = PANEL_BYTES + UP_PANEL_BYTES
            here = base + (block_n * (BLOCK_N // 16)).to(tl.int64) * both_bytes
            if FORMAT == UP_FORMAT:  # panels of gate and up alternate in one product
                local = tl.arange(0, 2 * BLOCK_N)
                panel = tl.minimum(local // 32, last_panel - block_n * (BLOCK_N // 16)) * 2 + local // 16 % 2
                acc = product(
                    x_rows, live, here, panel * PANEL_BYTES, local % 16,
                    COLUMNS, FORMAT, IS_FLOAT, SUPERBLOCK_BYTES, BLOCK_M, 2 * BLOCK_N, PERMUTED, STAGES,
                )  # fmt: skip
                both = tl.permute(tl.reshape(acc, (BLOCK_M, BLOCK_N // 16, 2, 16)), (0, 1, 3, 2))
                gate, up = tl.split(both)
                gate, up = tl.reshape(gate, (BLOCK_M, BLOCK_N)), tl.reshape(up, (BLOCK_M, BLOCK_N))
            else:
                local = tl.arange(0, BLOCK_N)
                panel = tl.minimum(local // 16, last_panel - block_n * (BLOCK_N // 16))
                gate = product(
                    x_rows, live, here, panel * both_bytes, local % 16,
                    COLUMNS, FORMAT, IS_FLOAT, SUPERBLOCK_BYTES, BLOCK_M, BLOCK_N, PERMUTED, STAGES,
                )  # fmt: skip
                up = product(
                    x_rows, live, here + PANEL_BYTES, panel * both_bytes, local % 16,
                    COLUMNS, UP_FORMAT, UP_IS_FLOAT, UP_SUPERBLOCK_BYTES, BLOCK_M, BLOCK_N, PERMUTED, STAGES,
                )  # fmt: skip
            if WEIGHTED:
                weight = tl.load(pair_weights + pair, mask=live, other=0.0)[:, None]
                gate *= weight
                up *= weight
            if bias is not None:
                gate += tl.load(bias + expert * ROWS + n, mask=n < ROWS, other=0.0)[None, :]
                up += tl.load(up_bias + expert * ROWS + n, mask=n < ROWS, other=0.0)[None, :]
            acc = joined(gate, up, ACTIVATION, ALPHA, LIMIT)
        if ACTIVATION == "" and bias is not None:
            acc += tl.load(bias + expert * ROWS + n, mask=n < ROWS, other=0.0)[None, :]
        if WEIGHTED and ACTIVATION == "":
            acc *= tl.load(pair_weights + pair, mask=live, other=0.0)[:, None]
        target = out + pair[:, None].to(tl.int64) * ROWS + n[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=live[:, None] & (n < ROWS)[None, :])
        begin += BLOCK_M


def _permuted(x: torch.Tensor) -> torch.Tensor:
    """x [rows, columns] -> [rows, columns rounded up to 256]: of each 256 columns first part 0, then part 1 ..."""
    missing = -x.shape[1] % (SLAB * SLABS)
    padded = torch.nn.functional.pad(x, (0, missing)) if missing else x
    return padded.view(len(x), -1, SLAB, 8).transpose(2, 3).reshape(padded.shape)


def launch(
    pairs: ExpertPairs,
    x: torch.Tensor,
    out: torch.Tensor,
    quants: tuple[str, ...],
    *,
    start: int = 0,
    gate: GateFacts | None = None,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    weights: torch.Tensor | None = None,
    zero_skipped: bool = False,
    tiles: ExpertTiles = TILES,
) -> None:
    """Write x times the transposed weights of each pair's expert to out [pairs, rows].

    quants, biases: of one matrix, or of gate and up, which are joined as `gate` says. start: byte of a record where the
    matrix begins. x [pairs / slots, columns]: `slots` pairs share a row. weights [pairs]: factors of the rows, of gate
    and up before they are joined. zero_skipped: rows of skipped pairs become zero; otherwise they are undefined.
    """
    number, rows = out.shape
    if number == 0:
        return
    columns = x.shape[1]
    experts = pairs.offsets.numel()
    tile = tiles.core_tile(number, experts, is_float32=x.dtype == torch.float32, has_float32="F32" in quants)
    block_m, block_n = tile.pairs, tile.rows
    lists: tuple[torch.Tensor, ...] = (out, out, out)  # not used
    if number <= tiles.scanned_pairs:
        find, scan = (LEADER if number <= experts else EXPERT), (64 if number <= 64 else 512)
        programs = min(number, experts)
    else:
        find, scan = SORTED, triton.next_power_of_2(experts)
        programs = number // block_m + min(number, experts)
        lists = sort_pairs(pairs)
    if tile.permuted:
        x = _permuted(x)
    elif x.stride(1) != 1:  # rows may be strided, columns not
        x = x.contiguous()
    if number <= _FEWEST_PAIRS:
        block_n = 32
    if gate:
        block_n //= 2
    first, up = quants[0], quants[-1]
    zero = 0 if not zero_skipped else 1 if find == LEADER else block_m
    _panels_kernel[(triton.cdiv(rows, block_n), programs)](
        pairs.pool, pairs.offsets, pairs.ids, x, out if weights is None else weights, *biases, out, *lists,
        number, experts, number // len(x), x.stride(0), start, triton.cdiv(number, programs),
        ACTIVATION=gate.activation if gate else "",
        ALPHA=gate.alpha if gate else 0.0,
        LIMIT=gate.limit if gate else 0.0,
        COLUMNS=columns,
        ROWS=rows,
        IS_FLOAT=first in FLOATS,
        **panel_layout.constants(first, columns),
        UP_IS_FLOAT=up in FLOATS,
        **panel_layout.constants(up, columns, "UP_"),
        WEIGHTED=weights is not None,
        FIND=find,
        SCAN=scan,
        ZERO=zero,
        PERMUTED=tile.permuted,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )  # fmt: skip
