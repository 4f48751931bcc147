"""What the Triton kernels of paged attention share: index arrays, and one block of keys of a running softmax.

All query heads that share a key/value head are rows of one matrix. So keys and values are read once for all of them,
and tensor cores work even on one token. Scores and sums are float32 with a running maximum, in base 2: the scale of the
scores includes log2(e). Grids depend only on host numbers and lengths are read on the device, so launches can be
captured. The twin is reference.paged_attention.
"""

import math
from dataclasses import dataclass

import torch

from ktqueue.operators.gpu.kernels.operation import tl, triton

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Tables:
    """Index arrays of a step on the device, all int32.

    page_starts: [rows + 1], the first page of each row in `pages`. contexts: [rows], the number of keys of each row; of
    latent plans [tokens], the number of keys that each token sees. query_starts: [rows + 1], the first token of each
    row; None: every row has one token.
    """

    page_starts: torch.Tensor
    pages: torch.Tensor
    contexts: torch.Tensor
    query_starts: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """What a decode launch computes: `items` tokens, the row of each, and the number of splits of their keys.

    rows: [items] int32; None: item n is row n. workspace: [bytes] uint8, for partial results.
    """

    items: int
    rows: torch.Tensor | None
    splits: int
    workspace: torch.Tensor


@triton.jit
def looked_up(table, index):
    """Return table[index], int32, or `index` itself if `table` is None."""
    if table is not None:
        index = tl.load(table + index)
    return index


@triton.jit
def pages_of(pages, first, end, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, BOUNDED: tl.constexpr):
    """Return the page [BLOCK] of each key from `first` on. BOUNDED: keys from `end` on have none."""
    index = first + tl.arange(0, BLOCK)
    if BOUNDED:
        return tl.load(pages + index // PAGE_SIZE, mask=index < end, other=0)
    return tl.load(pages + index // PAGE_SIZE)


@triton.jit
def fold(
    query,  # [M, WIDTH]
    best,  # [M]
    total,  # [M]
    sums,  # [M, WIDTH]
    first,  # first key of the block
    end,  # the number of keys
    position,  # [M] last key that each row sees, used if CAUSAL
    keys,
    values,
    page,  # [BLOCK], of each key of the block
    page_stride,
    slot_stride,
    scale,
    CAP: tl.constexpr,  # in base 2, as the scores; 0: they have none
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BOUNDED: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add a block of BLOCK keys to the running softmax; returns (best, total, sums)."""
    index = first + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    exists = index < end
    slots = page.to(tl.int64) * page_stride + (index % PAGE_SIZE) * slot_stride
    cells = slots[:, None] + column[None, :]
    if HEAD_DIM < WIDTH:
        inside = exists[:, None] & (column < HEAD_DIM)[None, :]
        key = tl.load(keys + cells, mask=inside, other=0.0).to(query.dtype)
        value = tl.load(values + cells, mask=inside, other=0.0).to(query.dtype)
    elif BOUNDED:
        key = tl.load(keys + cells, mask=exists[:, None], other=0.0).to(query.dtype)
        value = tl.load(values + cells, mask=exists[:, None], other=0.0).to(query.dtype)
    else:
        key = tl.load(keys + cells).to(query.dtype)
        value = tl.load(values + cells).to(query.dtype)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    if CAP > 0:  # tanh(x) = 2 sigmoid(2 x) - 1
        scores = CAP * (2.0 * tl.sigmoid(scores * (2.0 / CAP)) - 1.0)
    if CAUSAL:
        seen = index[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (index[None, :] > position[:, None] - WINDOW)
        if CHUNK > 0:
            seen = seen & (index[None, :] >= position[:, None] // CHUNK * CHUNK)
        scores = tl.where(seen, scores, float("-inf"))
    elif BOUNDED:
        scores = tl.where(exists[None, :], scores, float("-inf"))
    top = tl.maximum(best, tl.max(scores, 1))
    level = top
    if CAUSAL:  # a row may see none of the block
        level = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(scores - level[:, None])
    shrink = tl.exp2(best - level)
    total = total * shrink + tl.sum(weights, 1)
    sums = tl.dot(weights.to(query.dtype), value, sums * shrink[:, None], input_precision=PRECISION)
    return top, total, sums


def padded(size: int) -> int:
    """Round up to a power of two, at least 16, as tl.dot needs it."""
    return max(16, 1 << (size - 1).bit_length())


def block_keys(width: int, dtype: torch.dtype) -> int:
    """Return the keys of a block: as many as registers and shared memory hold."""
    return (32 if width <= 128 else 16) if dtype == torch.float32 else (64 if width <= 128 else 32)


def precision(dtype: torch.dtype) -> str:
    """Return the `input_precision` of tl.dot: float32 exactly, without TF32."""
    return "ieee" if dtype == torch.float32 else "tf32"
