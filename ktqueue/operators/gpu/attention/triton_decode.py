"""Triton kernels of decode rows: the keys of each row are split, then the results of the splits are joined.

See triton_blocks.py for the method.
"""

import torch

from ktqueue.operators.gpu.attention.triton_blocks import (
    LOG2_E,
    DecodeRows,
    Tables,
    block_keys,
    fold,
    looked_up,
    padded,
    pages_of,
    precision,
)
from ktqueue.operators.gpu.kernels.operation import launch_options, tl, triton, wait_for_previous
from ktqueue.operators.kv_cache import UNSCALED, CacheScale
from ktqueue.operators.step import ScoreOptions

MAX_SPLITS = 128
"""Most splits of the keys of a decode row."""
_FEW_SPLITS = 16
"""Fewer have the same kernel, so that not many are compiled."""
_JOINED_NUMBERS = 8192
"""Splits times columns that a program joins."""


@triton.jit
def key_share(context, splits, WINDOW: tl.constexpr, CHUNK: tl.constexpr, block):
    """Return (first key that a decode row sees, keys of each split: whole blocks of `block` keys)."""
    first = context * 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0)
    if CHUNK > 0:
        first = tl.maximum(first, (context - 1) // CHUNK * CHUNK)
    return first, tl.cdiv(tl.cdiv(context - first, splits), block) * block


@triton.jit(do_not_specialize=["splits"])
def _decode_split(
    query, keys, values, query_starts, page_starts, pages, contexts, rows,
    parts,  # [items, heads, splits, WIDTH] float32
    levels,  # [items, heads, splits] float32: log2 of the sum of exponentials
    scale, splits, page_stride, slot_stride, CAP: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    """Compute one split of one decode row for the heads of one key/value head. Empty splits return immediately."""
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row = looked_up(rows, item)
    token = looked_up(query_starts, row)
    context = tl.load(contexts + row)
    row_pages = pages + tl.load(page_starts + row)
    seen_from, share = key_share(context, splits, WINDOW, CHUNK, BLOCK)
    first = seen_from + split * share
    end = tl.minimum(context, first + share)
    wait_for_previous(WAITS)  # while tables are read, which the host writes
    if first < end:
        place = tl.arange(0, M)
        column = tl.arange(0, WIDTH)
        head = kv_head * GROUP + place
        cells = (token.to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + column[None, :]
        real = (place < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
        states = tl.load(query + cells, mask=real, other=0.0)
        best = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        sums = tl.zeros([M, WIDTH], tl.float32)
        row_keys = keys + kv_head * HEAD_DIM
        row_values = values + kv_head * HEAD_DIM
        for block in range(first, end, BLOCK):
            found = pages_of(row_pages, block, end, PAGE_SIZE, BLOCK, True)
            best, total, sums = fold(
                states, best, total, sums, block, end, place, row_keys, row_values, found, page_stride, slot_stride,
                scale, CAP, HEAD_DIM, WIDTH, PAGE_SIZE, WINDOW, CHUNK, BLOCK, True, False, PRECISION,
            )  # fmt: skip
        part = (item.to(tl.int64) * HEADS + head) * splits + split
        tl.store(parts + part[:, None] * WIDTH + column[None, :], sums / total[:, None], mask=(place < GROUP)[:, None])
        tl.store(levels + part, best + tl.log2(total), mask=place < GROUP)


@triton.jit
def joined(
    parts, levels, first, used, sinks, head, column, WIDTH: tl.constexpr, MOST: tl.constexpr, STEP: tl.constexpr,
    LOG2: tl.constexpr,
):  # fmt: skip
    """Return the sum of `used` splits from `first` on, weighted by their shares of the exponentials.

    column: those of WIDTH columns to return. sinks: the further scores of all heads, or None. MOST: of splits. STEP: of
    those that are read at once.
    """
    every = tl.arange(0, MOST)
    level = tl.load(levels + first + every, mask=every < used, other=float("-inf"))
    if STEP == MOST:  # all are on their way before the levels are needed
        cells = (first + every)[:, None] * WIDTH + column[None, :]
        part = tl.load(parts + cells, mask=(every < used)[:, None], other=0.0)
    best = tl.max(level, 0)
    if sinks is not None:
        sink = tl.load(sinks + head) * LOG2
        best = tl.maximum(best, sink)
    share = tl.exp2(level - best)
    total = tl.sum(share, 0)
    if sinks is not None:
        total += tl.exp2(sink - best)
    if STEP == MOST:
        return tl.sum(share[:, None] * part, 0) / total
    sums = tl.zeros([column.shape[0]], tl.float32)
    for block in range(0, used, STEP):
        some = block + tl.arange(0, STEP)
        weight = tl.exp2(tl.load(levels + first + some, mask=some < used, other=float("-inf")) - best)
        cells = (first + some)[:, None] * WIDTH + column[None, :]
        part = tl.load(parts + cells, mask=(some < used)[:, None], other=0.0)
        sums += tl.sum(weight[:, None] * part, 0)
    return sums / total


@triton.jit(do_not_specialize=["splits", "block"])
def _decode_join(
    query_starts, contexts, rows, parts, levels, sinks, out, value_scale, splits, block,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    MOST: tl.constexpr, COLUMNS: tl.constexpr, LOG2: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Join the splits of COLUMNS columns of one head of one decode row."""
    item = tl.program_id(0)
    head = tl.program_id(1)
    row = looked_up(rows, item)
    token = looked_up(query_starts, row)
    context = tl.load(contexts + row)
    wait_for_previous(WAITS)
    seen_from, share = key_share(context, splits, WINDOW, CHUNK, block)
    first = (item.to(tl.int64) * HEADS + head) * splits
    used = tl.cdiv(context - seen_from, share)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    sums = joined(parts, levels, first, used, sinks, head, column, WIDTH, MOST, MOST, LOG2)
    cells = (token.to(tl.int64) * HEADS + head) * HEAD_DIM + column
    tl.store(out + cells, (sums * value_scale).to(out.dtype.element_ty), mask=column < HEAD_DIM)


def decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: Tables,
    decode_rows: DecodeRows,
    out: torch.Tensor,
    options: ScoreOptions,
    scale: CacheScale = UNSCALED,
) -> None:
    """Attend for the one token of each of `decode_rows`.

    query, out: [tokens, heads, head_dim], dense; keys, values: [pages, page_size, kv_heads, head_dim], dense. Splits:
    at most MAX_SPLITS; workspace: at least partial_bytes(...). scale: of the stored keys and values.
    """
    heads, head_dim = query.shape[1:]
    page_size, kv_heads = keys.shape[1:3]
    width = padded(head_dim)
    exact = query.dtype == torch.float32
    block, stages = block_keys(width, query.dtype), 2 if exact else 3
    parts, levels = partial_results(decode_rows, heads, head_dim)
    _decode_split[(decode_rows.items, kv_heads, decode_rows.splits)](
        query, keys, values, tables.query_starts, tables.page_starts, tables.pages, tables.contexts, decode_rows.rows,
        parts, levels, options.scaling * scale.key * LOG2_E, decode_rows.splits, keys.stride(0), keys.stride(1),
        CAP=options.cap * LOG2_E,
        HEADS=heads,
        GROUP=heads // kv_heads,
        M=padded(heads // kv_heads),
        HEAD_DIM=head_dim,
        WIDTH=width,
        PAGE_SIZE=page_size,
        WINDOW=options.sliding_window,
        CHUNK=options.chunk,
        BLOCK=block,
        PRECISION=precision(query.dtype),
        **launch_options(),
        num_warps=8 if exact and width > 128 else 4,
        num_stages=stages,
    )  # fmt: skip
    join(parts, levels, tables, decode_rows, out, options, scale.value, block=block)


def join(
    parts: torch.Tensor,
    levels: torch.Tensor,
    tables: Tables,
    decode_rows: DecodeRows,
    out: torch.Tensor,
    options: ScoreOptions,
    value_scale: float,
    *,
    block: int,
) -> None:
    """Join the splits of `decode_rows` into out [tokens, heads, head_dim], multiplied by `value_scale`. `block`: keys
    of a block of the splits."""
    heads, head_dim = out.shape[1:]
    width = padded(head_dim)
    most = max(_FEW_SPLITS, triton.next_power_of_2(decode_rows.splits))
    columns = min(width, _JOINED_NUMBERS // most)
    _decode_join[(decode_rows.items, heads, width // columns)](
        tables.query_starts, tables.contexts, decode_rows.rows, parts, levels, options.sinks, out, value_scale,
        decode_rows.splits, block,
        HEADS=heads, HEAD_DIM=head_dim, WIDTH=width, WINDOW=options.sliding_window, CHUNK=options.chunk,
        MOST=most, COLUMNS=columns,
        LOG2=LOG2_E,
        **launch_options(),
        num_warps=4,
    )  # fmt: skip


def split_count(items: int, kv_heads: int, max_keys: int, processors: int) -> int:
    """Return how many splits keep `processors` busy with `items` decode rows of at most `max_keys` keys.

    Many rows need few splits, but still some, because their lengths may differ a lot.
    """
    wanted = -(-4 * processors // (items * kv_heads))
    return max(1, min(max(wanted, 8), MAX_SPLITS, -(-max_keys // 32)))


def partial_bytes(items: int, heads: int, head_dim: int, splits: int) -> int:
    """Bytes of the partial results of a decode launch."""
    return items * heads * splits * (padded(head_dim) + 1) * 4


def partial_results(decode_rows: DecodeRows, heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the workspace, float32: the sums [items, heads, splits, padded head_dim], flat, then their levels."""
    parts = decode_rows.workspace.view(torch.float32)
    return parts, parts[decode_rows.items * heads * decode_rows.splits * padded(head_dim) :]
