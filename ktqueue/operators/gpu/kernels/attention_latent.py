"""Triton kernel of multi-head latent attention over absorbed queries (door: triton). See attention_blocks.

Each program takes one token, some of its heads and a share of its keys. A latent is read once, for scores and sums
alike; the rotary part of a key is for scores only. The twin is reference.paged_attention over a latent cache.
"""

import math

import torch
import triton
import triton.language as tl

from ktqueue.operators.gpu.kernels.attention_blocks import looked_up, padded, precision
from ktqueue.operators.gpu.kernels.attention_decode import MAX_SPLITS, _decode_join, _share

HEADS_AT_ONCE = 16
"""Of one program: the fewest rows that tl.dot takes."""


@triton.jit(do_not_specialize=["splits"])
def _latent_split(
    query,
    keys,
    row_of,
    page_starts,
    pages,
    contexts,
    parts,  # [tokens, heads, splits, LATENT_WIDTH] float32; with one split the result, [tokens, heads, LATENT]
    levels,  # [tokens, heads, splits] float32: log2 of the sum of exponentials
    scale,
    splits,
    page_stride,
    slot_stride,
    HEADS: tl.constexpr,
    M: tl.constexpr,
    LATENT: tl.constexpr,
    ROTARY: tl.constexpr,
    LATENT_WIDTH: tl.constexpr,
    ROTARY_WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One share of one token's keys for M of its heads; empty shares end at once. WHOLE: there is one share only."""
    token = tl.program_id(0)
    split = tl.program_id(2)
    row = looked_up(row_of, token)
    context = tl.load(contexts + token)
    _, share = _share(context, splits, 0, BLOCK)
    first = split * share
    end = tl.minimum(context, first + share)
    if first < end:
        head = tl.program_id(1) * M + tl.arange(0, M)
        real = head < HEADS
        column = tl.arange(0, LATENT_WIDTH)
        turning = tl.arange(0, ROTARY_WIDTH)
        rows = (token.to(tl.int64) * HEADS + head)[:, None]
        states = query + rows * (LATENT + ROTARY)
        plain = tl.load(states + column[None, :], mask=real[:, None] & (column < LATENT)[None, :], other=0.0)
        rotary = tl.load(
            states + LATENT + turning[None, :], mask=real[:, None] & (turning < ROTARY)[None, :], other=0.0
        )
        best = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        sums = tl.zeros([M, LATENT_WIDTH], tl.float32)
        own_pages = pages + tl.load(page_starts + row)
        for block in range(first, end, BLOCK):
            at = block + tl.arange(0, BLOCK)
            there = at < end
            page = tl.load(own_pages + at // PAGE_SIZE, mask=there, other=0)
            slots = keys + (page.to(tl.int64) * page_stride + (at % PAGE_SIZE) * slot_stride)[:, None]
            latent = tl.load(slots + column[None, :], mask=there[:, None] & (column < LATENT)[None, :], other=0.0)
            turned = tl.load(
                slots + LATENT + turning[None, :], mask=there[:, None] & (turning < ROTARY)[None, :], other=0.0
            )
            latent = latent.to(plain.dtype)
            scores = tl.dot(plain, tl.trans(latent), input_precision=PRECISION)
            scores = tl.dot(rotary, tl.trans(turned.to(plain.dtype)), scores, input_precision=PRECISION) * scale
            scores = tl.where(there[None, :], scores, float("-inf"))
            top = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp2(scores - top[:, None])
            shrink = tl.exp2(best - top)
            total = total * shrink + tl.sum(weights, 1)
            sums = tl.dot(weights.to(plain.dtype), latent, sums * shrink[:, None], input_precision=PRECISION)
            best = top
        sums = sums / total[:, None]
        if WHOLE:
            cells = rows * LATENT + column[None, :]
            tl.store(parts + cells, sums.to(parts.dtype.element_ty), mask=real[:, None] & (column < LATENT)[None, :])
        else:
            part = (token.to(tl.int64) * HEADS + head) * splits + split
            tl.store(parts + part[:, None] * LATENT_WIDTH + column[None, :], sums, mask=real[:, None])
            tl.store(levels + part, best + tl.log2(total), mask=real)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor,
    *,
    row_of: torch.Tensor | None,
    page_starts: torch.Tensor,
    pages: torch.Tensor,
    contexts: torch.Tensor,
    splits: int,
    scaling: float,
) -> None:
    """Attend for every token of `query` [tokens, heads, latent + rotary], dense, into `out` [tokens, heads, latent].

    keys: [pages, page_size, 1, latent + rotary], dense. `contexts` [tokens]: keys that each token sees; `row_of`
    [tokens]: its row, None: token n is row n; `page_starts` [rows + 1]: where each row's pages begin in `pages`; all
    int32. `workspace`: at least workspace_bytes(...) of uint8. `splits`: at most MAX_SPLITS.
    """
    tokens, heads, width = query.shape
    latent = out.shape[-1]
    latent_width = padded(latent)
    parts = out if splits == 1 else workspace.view(torch.float32)
    levels = parts if splits == 1 else parts[tokens * heads * splits * latent_width :]
    exact = query.dtype == torch.float32
    block = 16 if exact else 32
    _latent_split[(tokens, -(-heads // HEADS_AT_ONCE), splits)](
        query,
        keys,
        row_of,
        page_starts,
        pages,
        contexts,
        parts,
        levels,
        scaling * math.log2(math.e),
        splits,
        keys.stride(0),
        keys.stride(1),
        HEADS=heads,
        M=HEADS_AT_ONCE,
        LATENT=latent,
        ROTARY=width - latent,
        LATENT_WIDTH=latent_width,
        ROTARY_WIDTH=padded(width - latent),
        PAGE_SIZE=keys.shape[1],
        BLOCK=block,
        WHOLE=splits == 1,
        PRECISION=precision(query.dtype),
        num_warps=4,
        num_stages=2,
    )
    if splits == 1:
        return
    _decode_join[(tokens, heads)](
        None,
        contexts,
        None,
        parts,
        levels,
        out,
        splits,
        HEADS=heads,
        HEAD_DIM=latent,
        WIDTH=latent_width,
        WINDOW=0,
        BLOCK=block,
        MOST=MAX_SPLITS,
        STEP=16,
        num_warps=4,
    )


def split_count(tokens: int, heads: int, max_keys: int, processors: int) -> int:
    """Shares that keep `processors` busy with `tokens` tokens of at most `max_keys` keys.

    Few tokens are always shared out, were it for one block of keys: the kernel that joins is another one than that of
    many tokens, and is so compiled before there are long contexts.
    """
    wanted = -(-4 * processors // (tokens * -(-heads // HEADS_AT_ONCE)))
    return max(1, min(wanted, MAX_SPLITS, max(2, -(-max_keys // 32))))


def workspace_bytes(tokens: int, heads: int, latent: int, splits: int) -> int:
    """Bytes of partial results of `attend`."""
    return 0 if splits == 1 else tokens * heads * splits * (padded(latent) + 1) * 4
