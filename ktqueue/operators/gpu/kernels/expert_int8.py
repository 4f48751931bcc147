"""Products of few tokens with packed experts, by the integer dot product: the kernels, and how they are launched.

There are three launches. `prepare` quantises x to int8 and sorts the pairs (of a token and an expert) by expert,
`gate_up` makes the quantised rows that `down` multiplies. A program multiplies some rows of one expert's weights, up to
M pairs at once, by all pairs of that expert: weights come from memory once, and from the cache for further pairs. The
result of a pair depends on other pairs only by the tile that is chosen for their number.

An int8 row has one scale for each slab of 32 columns: x[column] = scale * code up to rounding, scale = max |x| / 127 of
the slab, as csrc/formats/activations.h does it for the CPU. A slab with an infinity or a NaN has the scale NaN, which
poisons the results of that row and no other. Sums are of codes, not of x, also for minimums: one row of rounded
activations is multiplied, so rounding errors meet whole weights (whose mean is near zero) and not their codes.
"""

from dataclasses import dataclass

import torch

from ktqueue.operators.gpu.kernels import dots, panel_layout
from ktqueue.operators.gpu.kernels.activation import joined
from ktqueue.operators.gpu.kernels.expert_pairs import SORTED_AT_ONCE, ExpertPairs, SortedPairs, list_pairs, offset_of
from ktqueue.operators.gpu.kernels.expert_tiles import TILES, DotTile, DotTiles
from ktqueue.operators.gpu.kernels.operation import is_last, launch_options, tl, triton, wait_for_previous
from ktqueue.operators.gpu.kernels.panel_layout import SLAB
from ktqueue.operators.native import GateFacts


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Activations quantised to int8.

    codes [rows, columns] int8; scales [rows, slabs] float32; sums [rows, slabs] int32: the sum of the codes in columns
    0 .. 15 of the slab, plus 65536 times that of columns 16 .. 31.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device) -> "Int8Rows":
        """Uninitialised rows. `columns` is a multiple of 32."""
        slabs = columns // SLAB
        return cls(
            torch.empty(rows, columns, dtype=torch.int8, device=device),
            torch.empty(rows, slabs, dtype=torch.float32, device=device),
            torch.empty(rows, slabs, dtype=torch.int32, device=device),
        )

    @classmethod
    def quantise(cls, x: torch.Tensor) -> "Int8Rows":
        """Quantise x [rows, columns] of any float type. The torch twin of the kernels."""
        slabs = x.float().view(len(x), -1, SLAB)
        largest = slabs.abs().amax(2)
        finite = slabs.isfinite().all(2)
        inverse = torch.where(finite & (largest > 0), torch.full_like(largest, 127.0) / largest, 0.0)
        codes = torch.where(finite[:, :, None], slabs * inverse[:, :, None], 0.0).round().to(torch.int8)
        halves = codes.int().view(len(x), -1, 2, SLAB // 2).sum(3, dtype=torch.int32)
        scales = torch.where(finite, largest / 127.0, torch.nan)
        return cls(codes.view(x.shape), scales, halves[:, :, 0] + 65536 * halves[:, :, 1])

    def floats(self) -> torch.Tensor:
        """Dequantise: [rows, columns] float32."""
        slabs = self.codes.view(*self.scales.shape, SLAB).float() * self.scales[:, :, None]
        return slabs.view(self.codes.shape)


@triton.jit
def _quantise(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Quantise x [ROWS, COLUMNS], each row a slab -> codes int32, scale [ROWS], packed sums [ROWS]: see Int8Rows."""
    largest = tl.max(tl.abs(x), 1)
    broken = tl.sum(x * 0.0, 1)  # NaN or 0
    scale = tl.div_rn(largest, 127.0) + broken
    inverse = tl.where(largest > 0, tl.div_rn(127.0, largest), 0.0)
    rounded = x * inverse[:, None] + 12582912.0  # 1.5 * 2^23: the sum's lowest bits are the nearest integer
    codes = tl.where(broken[:, None] == 0.0, rounded.to(tl.int32, bitcast=True) - 0x4B400000, 0)
    column = tl.arange(0, COLUMNS)[None, :]
    sums = tl.sum(tl.where(column < 16, codes, codes << 16), 1)
    return codes, scale, sums


@triton.jit
def quantise_row(line, x, codes, scales, sums, x_stride, SLAB_COUNT: tl.constexpr, SLABS: tl.constexpr):
    """Quantise row `line` of x, SLABS slabs at a time: see Int8Rows."""
    for begin in tl.static_range(0, SLAB_COUNT, SLABS):
        slab = begin + tl.arange(0, SLABS)
        inside = slab < SLAB_COUNT
        column = slab[:, None] * 32 + tl.arange(0, 32)[None, :]
        values = tl.load(x + line.to(tl.int64) * x_stride + column, mask=inside[:, None], other=0.0)
        code, scale, total = _quantise(values.to(tl.float32), SLABS, 32)
        tl.store(codes + line * SLAB_COUNT * 32 + column, code.to(tl.int8), mask=inside[:, None])
        tl.store(scales + line * SLAB_COUNT + slab, scale, mask=inside)
        tl.store(sums + line * SLAB_COUNT + slab, total, mask=inside)


@triton.jit
def store_quantised(value, pair, live, out, scales, sums, ROWS: tl.constexpr, N: tl.constexpr):
    """Quantise a program's N columns of row `pair` (int64) and write them, if it is `live`: see Int8Rows."""
    code, scale, total = _quantise(tl.reshape(value, (N // 32, 32)), N // 32, 32)
    slab = tl.program_id(0) * (N // 32) + tl.arange(0, N // 32)
    column = slab[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(out + pair * ROWS + column, code.to(tl.int8), mask=(column < ROWS) & live)
    target = pair * (ROWS // 32) + slab
    tl.store(scales + target, scale, mask=(slab < ROWS // 32) & live)
    tl.store(sums + target, total, mask=(slab < ROWS // 32) & live)


@triton.jit
def add_pairs(pair, n, out, residual, counters, ADDED: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr):
    """The last program of a token's ADDED pairs adds columns n [N] of all of them to the residual, by their slots."""
    token = pair // ADDED
    if is_last(counters + token * tl.num_programs(0) + tl.program_id(0), ADDED):
        total = tl.zeros([N], tl.float32)
        for slot in tl.static_range(ADDED):
            place = (token * ADDED + slot).to(tl.int64) * ROWS + n
            total += tl.load(out + place, mask=n < ROWS, other=0.0)
        target = residual + token.to(tl.int64) * ROWS + n
        total += tl.load(target, mask=n < ROWS, other=0.0).to(tl.float32)
        tl.store(target, total.to(residual.dtype.element_ty), mask=n < ROWS)


@triton.jit(do_not_specialize=["pairs", "experts"])
def _prepare_kernel(
    x, ids, offsets, codes, scales, sums, sorted_pairs, starts, counts,
    pairs, experts, x_stride,
    SLAB_COUNT: tl.constexpr, SLABS: tl.constexpr, CHUNK: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Programs 0 .. experts - 1 list the pairs of an expert (none if CHUNK is 0); the others quantise a row."""
    wait_for_previous(WAITS)
    program = tl.program_id(0)
    if CHUNK > 0:
        if program < experts:
            list_pairs(program, ids, offsets, pairs, sorted_pairs, starts, counts, CHUNK)
    line = program - experts if CHUNK > 0 else program
    if line >= 0:
        quantise_row(line, x, codes, scales, sums, x_stride, SLAB_COUNT, SLABS)


@triton.jit(do_not_specialize=["slots", "pairs", "zero_pairs"])
def _experts_kernel(
    pool,
    offsets,  # [experts] int64
    ids,  # [pairs] int64
    codes,  # of x; next, its scales and sums
    scales,
    sums,
    pair_weights,  # [pairs] float32
    bias,  # [experts, ROWS] float32 of the matrix or of gate; or None
    up_bias,
    out,  # [pairs, ROWS] float32 without activation, otherwise int8
    out_scales,
    out_sums,
    sorted_pairs,
    starts,
    counts,
    residual,  # [tokens, ROWS], to which the sum of each token's rows of `out` is added; or None
    counters,  # [tokens, programs of a pair] int32, all 0, with a residual
    pairs,
    slots,  # pairs that share a row of x
    start,  # byte of a record where the matrix begins
    zero_pairs,  # pairs whose rows a program sets to zero if they are skipped
    WEIGHTED: tl.constexpr,  # rows are multiplied by pair_weights, before biases of gate and up, after that of down
    ACTIVATION: tl.constexpr,  # "": one matrix, otherwise gate and up
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SLAB_COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    SUPERBLOCK_BYTES: tl.constexpr,
    PANEL_BYTES: tl.constexpr,
    UP_FORMAT: tl.constexpr,
    UP_SUPERBLOCK_BYTES: tl.constexpr,
    UP_PANEL_BYTES: tl.constexpr,
    OWN: tl.constexpr,  # whether each pair has its own program; otherwise each expert has one
    M: tl.constexpr,
    SKIPS: tl.constexpr,
    S: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
    ADDED: tl.constexpr,  # pairs of a token whose rows are added to the residual, or 0; only with programs of each pair
    RECORD_BYTES: tl.constexpr,  # see offset_of
    WAITS: tl.constexpr,
):
    wait_for_previous(WAITS)
    n = tl.program_id(0) * N + tl.arange(0, N)
    program = tl.program_id(1)
    if OWN:
        expert = tl.load(ids + program)
        offset = offset_of(expert, offsets, RECORD_BYTES)
        count = ((expert >= 0) & (offset >= 0)).to(tl.int32)
        first = program
    else:
        expert = program.to(tl.int64)
        offset = offset_of(expert, offsets, RECORD_BYTES)
        count = tl.load(counts + program)
        first = tl.load(starts + program)
    if ACTIVATION == "":  # rows of pairs that no program computes
        done = program * 0
        while done < zero_pairs:
            pair = tl.minimum(program * zero_pairs + done, pairs - 1)
            wanted = tl.load(ids + pair)
            skipped = (wanted < 0) | (offset_of(wanted, offsets, RECORD_BYTES) < 0)
            tl.store(out + pair.to(tl.int64) * ROWS + n, tl.zeros((N,), tl.float32), mask=(n < ROWS) & skipped)
            done += 1

    last_panel: tl.constexpr = (ROWS + 15) // 16 - 1
    both_bytes: tl.constexpr = PANEL_BYTES + (UP_PANEL_BYTES if ACTIVATION != "" else 0)
    row = (tl.arange(0, N) % 16)[None, :]
    panels_here: tl.constexpr = N // 16
    first_panel = tl.program_id(0) * panels_here
    panel = tl.minimum(tl.arange(0, N) // 16, last_panel - first_panel)[None, :] * both_bytes
    base = pool + offset + start + first_panel.to(tl.int64) * both_bytes
    done = program * 0
    while done < count:
        pair_of = ()
        x_rows = ()
        gates = ()
        ups = ()
        for m in tl.static_range(M):
            place = first + tl.minimum(done + m, count - 1)
            pair = place if OWN else tl.load(sorted_pairs + place)
            pair_of = pair_of + (pair,)
            x_rows = x_rows + (pair // slots,)
            gates = gates + (tl.zeros((S, N), tl.float32),)
            ups = ups + (tl.zeros((S, N), tl.float32),)
        for step in tl.range(0, (SLAB_COUNT + S - 1) // S, num_stages=STAGES):
            slab = step * S + tl.arange(0, S)[:, None]
            inside = slab < SLAB_COUNT
            slab = tl.minimum(slab, SLAB_COUNT - 1)
            gates = dots.add_products(
                gates, x_rows, count - done, codes, scales, sums, base, panel, slab, inside, row, M, SKIPS, SLAB_COUNT,
                FORMAT, SUPERBLOCK_BYTES,
            )  # fmt: skip
            if ACTIVATION != "":
                ups = dots.add_products(
                    ups, x_rows, count - done, codes, scales, sums, base + PANEL_BYTES, panel, slab, inside, row, M,
                    SKIPS, SLAB_COUNT, UP_FORMAT, UP_SUPERBLOCK_BYTES,
                )  # fmt: skip
        for m in tl.static_range(M):
            live = done + m < count
            pair = pair_of[m].to(tl.int64)
            value = tl.sum(gates[m], 0)
            weight = 1.0
            if WEIGHTED:
                weight = tl.load(pair_weights + pair)
            if ACTIVATION != "":
                value *= weight
            if bias is not None:
                value += tl.load(bias + tl.maximum(expert, 0) * ROWS + n, mask=n < ROWS, other=0.0)
            if ACTIVATION == "":
                tl.store(out + pair * ROWS + n, value * weight, mask=(n < ROWS) & live)
            else:
                up = tl.sum(ups[m], 0) * weight
                if up_bias is not None:
                    up += tl.load(up_bias + tl.maximum(expert, 0) * ROWS + n, mask=n < ROWS, other=0.0)
                value = joined(value, up, ACTIVATION, ALPHA, LIMIT)
                store_quantised(value, pair, live, out, out_scales, out_sums, ROWS, N)
        done += M
    if ADDED > 0:
        add_pairs(program, n, out, residual, counters, ADDED, ROWS, N)


def slabs_at_once(slabs: int) -> int:
    """Slabs of a row that a program quantises at a time."""
    return min(int(triton.next_power_of_2(slabs)), 128)


def prepare(
    pairs: ExpertPairs, x: torch.Tensor, *, own_pairs: int = TILES.own_pairs
) -> tuple[Int8Rows, SortedPairs | None]:
    """Quantise x [tokens, columns] and sort the pairs by expert, in one launch.

    Returns no sorted pairs if there are at most `own_pairs`, each with its own programs.
    """
    tokens, columns = x.shape
    rows, lists = Int8Rows.empty(tokens, columns, x.device), SortedPairs.empty(pairs)
    number, experts = pairs.ids.numel(), pairs.offsets.numel()
    is_unsorted, slabs = number <= own_pairs, columns // SLAB
    _prepare_kernel[(tokens + (0 if is_unsorted else experts),)](
        x, pairs.ids, pairs.offsets, rows.codes, rows.scales, rows.sums, *lists,
        number, experts, x.stride(0),
        SLAB_COUNT=slabs,
        SLABS=slabs_at_once(slabs),
        CHUNK=0 if is_unsorted else min(triton.next_power_of_2(number), SORTED_AT_ONCE),
        **launch_options(),
    )  # fmt: skip
    return rows, None if is_unsorted else lists


def _launch(
    pairs: ExpertPairs,
    lists: SortedPairs | None,
    x: Int8Rows,
    quants: tuple[str, str],
    outs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    start: int,
    gate: GateFacts | None,
    weights: torch.Tensor | None,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    tile: DotTile,
    pairs_at_once: int,
    skips: bool,
    added_to: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
) -> None:
    """quants, biases: of gate and up, or of one matrix, whose format is given twice. gate None: there is one matrix.
    outs: `out`, `out_scales`, `out_sums`."""
    number, rows = outs[0].shape
    tokens, columns = x.codes.shape
    experts = pairs.offsets.numel()
    programs = number if lists is None else experts
    pool, record_bytes = pairs.even_pool
    _experts_kernel[(triton.cdiv(rows, tile.rows), programs)](
        pool, pairs.offsets, pairs.ids, x.codes, x.scales, x.sums,
        x.scales if weights is None else weights, *biases, *outs,
        *(lists or 3 * (pairs.ids,)), added_to, counters,
        number, number // tokens, start, triton.cdiv(number, programs),
        WEIGHTED=weights is not None,
        ACTIVATION=gate.activation if gate else "",
        ALPHA=gate.alpha if gate else 0.0,
        LIMIT=gate.limit if gate else 0.0,
        SLAB_COUNT=columns // SLAB,
        ROWS=rows,
        **panel_layout.constants(quants[0], columns),
        **panel_layout.constants(quants[1], columns, "UP_"),
        OWN=lists is None,
        M=pairs_at_once,
        SKIPS=skips,
        S=tile.slabs,
        N=tile.rows,
        STAGES=tile.stages or None,
        ADDED=0 if added_to is None else pairs.ids.shape[1],
        RECORD_BYTES=record_bytes,
        **launch_options(),
        num_warps=tile.warps,
        maxnreg=tile.registers,
    )  # fmt: skip


def down_counters(tokens: int, hidden: int) -> int:
    """How many counters `down` needs at most: one for each token and program of a pair, which has 32 rows or more."""
    return tokens * -(-hidden // SLAB)


def _tiles_of(pairs: ExpertPairs, lists: SortedPairs | None) -> DotTiles:
    return TILES.dot_tiles(pairs.ids.numel(), are_sorted=lists is not None)


def gate_up(
    pairs: ExpertPairs,
    lists: SortedPairs | None,
    x: Int8Rows,
    gate: GateFacts,
    weights: torch.Tensor | None = None,
    *,
    tiles: DotTiles | None = None,
) -> Int8Rows:
    """Return gate x and up x, joined as `gate` says and quantised: rows of pairs [tokens * k, intermediate].

    weights: [tokens, k] float32, of the pairs if they multiply x; None: they do not. tiles: others than those that
    TILES has for such a step. Rows of skipped pairs are undefined.
    """
    record, tiles = pairs.record, tiles or _tiles_of(pairs, lists)
    mid = Int8Rows.empty(pairs.ids.numel(), record.intermediate, pairs.ids.device)
    outs, quants = (mid.codes, mid.scales, mid.sums), (record.gate, record.up)
    biases = (None, None) if pairs.biases is None else (pairs.biases.gate, pairs.biases.up)
    _launch(
        pairs, lists, x, quants, outs,
        start=0, gate=gate, weights=weights, biases=biases,
        tile=tiles.gate_up, pairs_at_once=tiles.pairs, skips=tiles.skips,
    )  # fmt: skip
    return mid


def down(
    pairs: ExpertPairs,
    lists: SortedPairs | None,
    mid: Int8Rows,
    weights: torch.Tensor | None,
    *,
    tiles: DotTiles | None = None,
    added_to: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return weight * (down mid): [tokens, k, hidden] float32, zero where the pair is skipped. weights None: all 1.

    tiles: see `gate_up`. added_to: [tokens, hidden], contiguous; only without lists. The sum of a token's pairs is
    added to it IN PLACE, as add_rms_norm adds partials. counters: [down_counters] int32, all 0, as the launch leaves
    them; only with added_to.
    """
    record, tiles = pairs.record, tiles or _tiles_of(pairs, lists)
    out = torch.empty(pairs.ids.numel(), record.hidden, dtype=torch.float32, device=pairs.ids.device)
    outs, quants = (out, mid.scales, mid.sums), (record.down, record.down)
    biases = (None if pairs.biases is None else pairs.biases.down, None)
    _launch(
        pairs, lists, mid, quants, outs,
        start=record.down_start, gate=None, weights=weights, biases=biases,
        tile=tiles.down, pairs_at_once=tiles.pairs, skips=tiles.skips, added_to=added_to, counters=counters,
    )  # fmt: skip
    return out.view(*pairs.ids.shape, record.hidden)
