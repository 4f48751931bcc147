"""Triton kernels of decode rows: each row's keys are split, the parts joined (door: triton). See attention_blocks."""

import math

import torch
import triton
import triton.language as tl

from ktqueue.operators.gpu.kernels.attention_blocks import Tables, block_keys, fold, looked_up, padded, precision

MAX_SPLITS = 128
"""Parts that a decode row's keys are cut into at most."""


@triton.jit
def _share(context, splits, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """(first key that a decode row sees, keys of each of its splits: whole blocks)."""
    first = context * 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0)
    return first, tl.cdiv(tl.cdiv(context - first, splits), BLOCK) * BLOCK


@triton.jit(do_not_specialize=["splits"])
def _decode_split(
    query,
    keys,
    values,
    query_starts,
    page_starts,
    pages,
    contexts,
    rows,
    parts,  # [items, heads, splits, WIDTH] float32
    levels,  # [items, heads, splits] float32: log2 of the sum of exponentials
    scale,
    splits,
    page_stride,
    slot_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One split of one decode row for the heads of one key/value head; empty splits end at once."""
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row = looked_up(rows, item)
    token = looked_up(query_starts, row)
    context = tl.load(contexts + row)
    seen_from, share = _share(context, splits, WINDOW, BLOCK)
    first = seen_from + split * share
    end = tl.minimum(context, first + share)
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
        own_pages = pages + tl.load(page_starts + row)
        own_keys = keys + kv_head * HEAD_DIM
        own_values = values + kv_head * HEAD_DIM
        for block in range(first, end, BLOCK):
            best, total, sums = fold(
                states,
                best,
                total,
                sums,
                block,
                end,
                place,
                own_keys,
                own_values,
                own_pages,
                page_stride,
                slot_stride,
                scale,
                HEAD_DIM,
                WIDTH,
                PAGE_SIZE,
                WINDOW,
                BLOCK,
                True,
                False,
                PRECISION,
            )
        part = (item.to(tl.int64) * HEADS + head) * splits + split
        tl.store(parts + part[:, None] * WIDTH + column[None, :], sums / total[:, None], mask=(place < GROUP)[:, None])
        tl.store(levels + part, best + tl.log2(total), mask=place < GROUP)


@triton.jit(do_not_specialize=["splits"])
def _decode_join(
    query_starts,
    contexts,
    rows,
    parts,
    levels,
    out,
    splits,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    STEP: tl.constexpr,
):
    """One head of one decode row: the sum of its splits, each weighted by its share of the exponentials."""
    item = tl.program_id(0)
    head = tl.program_id(1)
    row = looked_up(rows, item)
    token = looked_up(query_starts, row)
    context = tl.load(contexts + row)
    seen_from, share = _share(context, splits, WINDOW, BLOCK)
    used = tl.cdiv(context - seen_from, share)
    own = (item.to(tl.int64) * HEADS + head) * splits
    every = tl.arange(0, MOST)
    level = tl.load(levels + own + every, mask=every < used, other=float("-inf"))
    best = tl.max(level, 0)
    total = tl.sum(tl.exp2(level - best), 0)
    column = tl.arange(0, WIDTH)
    sums = tl.zeros([WIDTH], tl.float32)
    for block in range(0, used, STEP):
        some = block + tl.arange(0, STEP)
        weight = tl.exp2(tl.load(levels + own + some, mask=some < used, other=float("-inf")) - best)
        cells = (own + some)[:, None] * WIDTH + column[None, :]
        part = tl.load(parts + cells, mask=(some < used)[:, None], other=0.0)
        sums += tl.sum(weight[:, None] * part, 0)
    cells = (token.to(tl.int64) * HEADS + head) * HEAD_DIM + column
    tl.store(out + cells, (sums / total).to(out.dtype.element_ty), mask=column < HEAD_DIM)


def decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: Tables,
    out: torch.Tensor,
    workspace: torch.Tensor,
    *,
    items: int,
    rows: torch.Tensor | None,
    splits: int,
    scaling: float,
    window: int,
) -> None:
    """Attend for the one token of each of `items` rows: those of `rows` [items] int32, or the first if it is None.

    query, out: [tokens, heads, head_dim], dense; keys, values: [pages, page_size, kv_heads, head_dim], dense.
    workspace: at least workspace_bytes(items, ...) of uint8. splits: at most MAX_SPLITS. window: 0 is none.
    """
    heads, head_dim = query.shape[1:]
    page_size, kv_heads = keys.shape[1:3]
    width = padded(head_dim)
    exact = query.dtype == torch.float32
    parts = workspace.view(torch.float32)
    levels = parts[items * heads * splits * width :]
    block = block_keys(width, query.dtype)
    _decode_split[(items, kv_heads, splits)](
        query,
        keys,
        values,
        tables.query_starts,
        tables.page_starts,
        tables.pages,
        tables.contexts,
        rows,
        parts,
        levels,
        scaling * math.log2(math.e),
        splits,
        keys.stride(0),
        keys.stride(1),
        HEADS=heads,
        GROUP=heads // kv_heads,
        M=max(16, padded(heads // kv_heads)),
        HEAD_DIM=head_dim,
        WIDTH=width,
        PAGE_SIZE=page_size,
        WINDOW=window,
        BLOCK=block,
        PRECISION=precision(query.dtype),
        num_warps=8 if exact and width > 128 else 4,
        num_stages=2 if exact else 3,
    )
    _decode_join[(items, heads)](
        tables.query_starts,
        tables.contexts,
        rows,
        parts,
        levels,
        out,
        splits,
        HEADS=heads,
        HEAD_DIM=head_dim,
        WIDTH=width,
        WINDOW=window,
        BLOCK=block,
        MOST=MAX_SPLITS,
        STEP=16,
        num_warps=4,
    )


def split_count(items: int, kv_heads: int, max_keys: int, processors: int) -> int:
    """Splits that keep `processors` busy with `items` decode rows of at most `max_keys` keys.

    Few are enough for many rows, but some, for they may be of very different lengths.
    """
    wanted = -(-4 * processors // (items * kv_heads))
    return max(1, min(max(wanted, 8), MAX_SPLITS, -(-max_keys // 32)))


def workspace_bytes(items: int, heads: int, head_dim: int, splits: int) -> int:
    """Bytes of partial results of `decode`."""
    return items * heads * splits * (padded(head_dim) + 1) * 4
