"""Triton kernel of chunks: tiles of tokens over all keys that they see. See triton_blocks.py for the method."""

import torch

from ktqueue.operators.gpu.attention.triton_blocks import LOG2_E, Tables, block_keys, fold, padded, pages_of, precision
from ktqueue.operators.gpu.device import has_large_shared_memory
from ktqueue.operators.gpu.kernels.operation import tl, triton
from ktqueue.operators.kv_cache import UNSCALED, CacheScale
from ktqueue.operators.step import ScoreOptions

LONG_BLOCK = 128
"""Keys of a block where shared memory has room for three: 1,364 us instead of 1,663 at 8,192 tokens on an H200."""


@triton.jit
def _prefill_tile(
    query, keys, values, query_starts, page_starts, pages, contexts,
    tiles,  # [tiles, 2]: row, and the first token of the tile, counted within the row
    sinks, out, scale, value_scale, page_stride, slot_stride, CAP: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, M: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, LOG2: tl.constexpr,
):  # fmt: skip
    """Compute TOKENS tokens of one row for the heads of one key/value head: first the keys that all of them see."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.load(tiles + 2 * tile)
    offset = tl.load(tiles + 2 * tile + 1)
    begin = tl.load(query_starts + row)
    chunk = tl.load(query_starts + row + 1) - begin
    context = tl.load(contexts + row)
    place = tl.arange(0, M)
    column = tl.arange(0, WIDTH)
    token = offset + place // GROUP
    head = kv_head * GROUP + place % GROUP
    real = (token < chunk) & (place < TOKENS * GROUP)
    cells = ((begin + token).to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    inside = real[:, None] & (column < HEAD_DIM)[None, :]
    states = tl.load(query + cells, mask=inside, other=0.0)
    position = context - chunk + token
    lowest = context - chunk + offset
    end = tl.minimum(lowest + TOKENS, context)
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    if sinks is not None:  # a key with that score and no value comes first
        best = tl.load(sinks + head) * LOG2
        total += 1.0
    sums = tl.zeros([M, WIDTH], tl.float32)
    row_pages = pages + tl.load(page_starts + row)
    row_keys = keys + kv_head * HEAD_DIM
    row_values = values + kv_head * HEAD_DIM
    first = lowest * 0
    if WINDOW > 0:
        first = tl.maximum(lowest + 1 - WINDOW, 0) // BLOCK * BLOCK
    if CHUNK > 0:
        first = tl.maximum(first, lowest // CHUNK * CHUNK // BLOCK * BLOCK)
    masked_from = first
    if WINDOW == 0 and CHUNK % BLOCK == 0:
        masked_from = (lowest + 1) // BLOCK * BLOCK
        if CHUNK > 0:  # a tile that reaches into the next chunk is masked whole
            masked_from = tl.where((end - 1) // CHUNK * CHUNK == first, masked_from, first)
        for block in range(first, masked_from, BLOCK):
            page = pages_of(row_pages, block, end, PAGE_SIZE, BLOCK, False)
            best, total, sums = fold(
                states, best, total, sums, block, end, position, row_keys, row_values, page, page_stride, slot_stride,
                scale, CAP, HEAD_DIM, WIDTH, PAGE_SIZE, WINDOW, CHUNK, BLOCK, False, False, PRECISION,
            )  # fmt: skip
    for block in range(masked_from, end, BLOCK):
        page = pages_of(row_pages, block, end, PAGE_SIZE, BLOCK, True)
        best, total, sums = fold(
            states, best, total, sums, block, end, position, row_keys, row_values, page, page_stride, slot_stride,
            scale, CAP, HEAD_DIM, WIDTH, PAGE_SIZE, WINDOW, CHUNK, BLOCK, True, True, PRECISION,
        )  # fmt: skip
    tl.store(out + cells, (sums / total[:, None] * value_scale).to(out.dtype.element_ty), mask=inside)


def prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: Tables,
    tiles: torch.Tensor,
    out: torch.Tensor,
    options: ScoreOptions,
    scale: CacheScale = UNSCALED,
) -> None:
    """Attend for the tokens of `tiles` [tiles, 2] int32: a row, and the first token of the tile within the row.

    A tile has tile_tokens(...) tokens, or the rest of its row. The other arguments are those of triton_decode.decode;
    `tables` must have query_starts.
    """
    heads, head_dim = query.shape[1:]
    page_size, kv_heads = keys.shape[1:3]
    group = heads // kv_heads
    width = padded(head_dim)
    exact = query.dtype == torch.float32
    _prefill_tile[(len(tiles), kv_heads)](
        query, keys, values, tables.query_starts, tables.page_starts, tables.pages, tables.contexts, tiles,
        options.sinks, out, options.scaling * scale.key * LOG2_E, scale.value, keys.stride(0), keys.stride(1),
        CAP=options.cap * LOG2_E,
        HEADS=heads,
        GROUP=group,
        TOKENS=tile_tokens(group, head_dim, query.dtype),
        M=_tile_rows(group, head_dim, query.dtype),
        HEAD_DIM=head_dim,
        WIDTH=width,
        PAGE_SIZE=page_size,
        WINDOW=options.sliding_window,
        CHUNK=options.chunk,
        BLOCK=LONG_BLOCK if _has_long_blocks(query, keys, width) else block_keys(width, query.dtype),
        PRECISION=precision(query.dtype),
        LOG2=LOG2_E,
        num_warps=4 if exact and width <= 128 else 8,
        num_stages=2 if exact or width > 128 else 3,
    )  # fmt: skip


def _has_long_blocks(query: torch.Tensor, keys: torch.Tensor, width: int) -> bool:
    return width <= 128 and query.dtype.itemsize == keys.dtype.itemsize == 2 and has_large_shared_memory(query.device)


def tile_tokens(group: int, head_dim: int, dtype: torch.dtype) -> int:
    """Tokens of one tile of `prefill` if `group` query heads share a key/value head."""
    return _tile_rows(group, head_dim, dtype) // group


def _tile_rows(group: int, head_dim: int, dtype: torch.dtype) -> int:
    """Rows of a tile's matrix, a power of two: tokens times the heads that share a key/value head."""
    return max(32 if dtype == torch.float32 else 64 if head_dim > 128 else 128, padded(group))
