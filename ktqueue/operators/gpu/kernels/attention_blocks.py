"""What the Triton kernels of paged attention share: a block of keys taken into a running softmax, and tables that a
launch may leave out (door: triton).

All query heads that share a key/value head are rows of one matrix, so keys and values are read once for them and tensor
cores are used at one token too. Scores and sums are float32 with a running maximum, in base 2 (the scale of the scores
has log2(e) in it). Grids depend on host numbers only; lengths are read on the device, so launches can be captured.
The twin is reference.paged_attention.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class Tables:
    """Index arrays on the device, all int32. page_starts: [rows + 1], first of each row in `pages`; contexts: [rows].

    query_starts: [rows + 1]; None: every row has one token.
    """

    page_starts: torch.Tensor
    pages: torch.Tensor
    contexts: torch.Tensor
    query_starts: torch.Tensor | None = None


@triton.jit
def looked_up(table, place):
    """table[place], int32; `place` itself where `table` is None."""
    if table is not None:
        place = tl.load(table + place)
    return place


@triton.jit
def fold(
    query,  # [M, WIDTH]
    best,  # [M]
    total,  # [M]
    sums,  # [M, WIDTH]
    first,  # key that the block begins with
    end,  # keys from here on are not there
    position,  # [M] the last key that each row sees, used if CAUSAL
    keys,
    values,
    pages,
    page_stride,
    slot_stride,
    scale,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    BOUNDED: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take BLOCK keys more into the running softmax; gives (best, total, sums)."""
    at = first + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    there = at < end
    page = tl.load(pages + at // PAGE_SIZE, mask=there, other=0) if BOUNDED else tl.load(pages + at // PAGE_SIZE)
    slots = page.to(tl.int64) * page_stride + (at % PAGE_SIZE) * slot_stride
    cells = slots[:, None] + column[None, :]
    if HEAD_DIM < WIDTH:
        inside = there[:, None] & (column < HEAD_DIM)[None, :]
        key = tl.load(keys + cells, mask=inside, other=0.0).to(query.dtype)
        value = tl.load(values + cells, mask=inside, other=0.0).to(query.dtype)
    elif BOUNDED:
        key = tl.load(keys + cells, mask=there[:, None], other=0.0).to(query.dtype)
        value = tl.load(values + cells, mask=there[:, None], other=0.0).to(query.dtype)
    else:
        key = tl.load(keys + cells).to(query.dtype)
        value = tl.load(values + cells).to(query.dtype)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    if CAUSAL:
        seen = at[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (at[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    elif BOUNDED:
        scores = tl.where(there[None, :], scores, float("-inf"))
    top = tl.maximum(best, tl.max(scores, 1))
    level = top
    if CAUSAL:  # a row may see nothing of a block
        level = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(scores - level[:, None])
    shrink = tl.exp2(best - level)
    total = total * shrink + tl.sum(weights, 1)
    sums = tl.dot(weights.to(query.dtype), value, sums * shrink[:, None], input_precision=PRECISION)
    return top, total, sums


def padded(size: int) -> int:
    """The next power of two, 16 at least: what tl.dot takes."""
    return max(16, 1 << (size - 1).bit_length())


def block_keys(width: int, dtype: torch.dtype) -> int:
    """Keys that are taken at a time: as many as registers and shared memory hold."""
    return (32 if width <= 128 else 16) if dtype == torch.float32 else (64 if width <= 128 else 32)


def precision(dtype: torch.dtype) -> str:
    """How tl.dot multiplies: float32 exactly, without TF32."""
    return "ieee" if dtype == torch.float32 else "tf32"
