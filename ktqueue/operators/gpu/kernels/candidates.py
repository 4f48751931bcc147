"""Draws tokens from the most likely candidates of each row, filtered by top_k, top_p and min_p, in one launch.

The draw walks through the tokens that are kept in vocabulary order. The kernel sorts nothing: for each candidate it
adds up the weights of those with a lower or the same id. Sums are float64 in both, but not in the same order.
"""

from typing import NamedTuple

import torch

from ktqueue.operators.gpu.kernels.operation import check_fits, runs_kernel, tl, triton

MOST_CANDIDATES = 1024
"""Of the kernel. For more, torch draws."""

_COLUMNS = 4096  # of the vocabulary, added at a time
_OTHERS = 16  # candidates that all are compared with at a time
_NO_ID = tl.constexpr(1 << 62)


class Filters(NamedTuple):
    """Parameters of rows, each [rows]: top_k int64, 0 for none; top_p float64; min_p float32; noise float64."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    noise: torch.Tensor


@triton.jit
def _draw_kernel(
    values,
    ids,
    weights,
    top_k,
    top_p,
    min_p,
    noise,
    tokens,
    enough,
    VOCAB: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """One program for a row."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < CANDIDATES
    values += row * CANDIDATES
    ids += row * CANDIDATES
    weights += row * VOCAB
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    limited = (k > 0) & (k < VOCAB)
    kth = tl.load(values + tl.minimum(tl.maximum(k - 1, 0), CANDIDATES - 1))
    floor = tl.load(min_p + row)
    floor = tl.where(limited & (kth > floor), kth, floor)
    value = tl.load(values + place, mask=inside, other=0.0)
    candidate = tl.load(ids + place, mask=inside, other=_NO_ID)
    kept = tl.where(inside & (value >= floor), value, 0.0).to(tl.float64)
    total = tl.sum(kept, axis=0)
    if (limited == 0) & (p < 1.0):
        sums = tl.zeros((COLUMNS,), tl.float64)
        for start in range(0, VOCAB, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            weight = tl.load(weights + column, mask=column < VOCAB, other=0.0)
            sums += tl.where(weight >= floor, weight, 0.0).to(tl.float64)
        total = tl.sum(sums, axis=0)
    reached = tl.cumsum(kept, axis=0) >= p * total
    last = tl.minimum(tl.sum((inside & (reached == 0)).to(tl.int32), axis=0), CANDIDATES - 1)
    cut = tl.sum(tl.where(place == last, kept, 0.0), axis=0)
    cut = tl.where(p < 1.0, cut, 0.0)
    kept = tl.where(kept >= cut, kept, 0.0)
    least = tl.load(values + CANDIDATES - 1)
    bound = floor.to(tl.float64)
    bound = tl.where((limited == 0) & (cut > bound), cut, bound)
    suffices = (least <= 0.0) | ((least.to(tl.float64) < bound) & ((limited == 0) | (k <= CANDIDATES)))
    total = tl.sum(kept, axis=0)
    below = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)  # the next smaller number
    target = tl.minimum(tl.load(noise + row) * total, below)
    up_to = tl.zeros((BLOCK,), tl.float64)  # weight of the kept tokens with a lower or the same id
    count = tl.sum((kept > 0.0).to(tl.int32), axis=0)  # the kept ones are the first
    for start in range(0, count, OTHERS):
        other = start + tl.arange(0, OTHERS)
        other_inside = other < count
        other_id = tl.load(ids + other, mask=other_inside, other=_NO_ID)
        weight = tl.load(values + other, mask=other_inside, other=0.0).to(tl.float64)
        up_to += tl.sum(tl.where(other_id[None, :] <= candidate[:, None], weight[None, :], 0.0), axis=1)
    token = tl.min(tl.where((kept > 0.0) & (up_to > target), candidate, _NO_ID), axis=0)
    highest = tl.max(tl.where(kept > 0.0, candidate, 0), axis=0)  # sums may be rounded to less than the target
    tl.store(tokens + row, tl.minimum(token, highest))
    tl.store(enough + row, suffices)


def draw_from_candidates(
    values: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, filters: Filters
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token of each row from its most likely tokens.

    values: [rows, candidates] float32, in falling order; ids: [rows, candidates] int64; weights: [rows, vocab] float32,
    of which these are the greatest. Returns the tokens, [rows] int64, and whether the candidates suffice, [rows] bool.
    Where they do not, or weights are not finite, the token has no meaning, but is in the vocabulary.
    """
    rows, candidates = values.shape
    vocab = weights.shape[1]
    fits = values.shape == ids.shape and len(weights) == rows and all(len(numbers) == rows for numbers in filters)
    fits = fits and values.is_contiguous() and ids.is_contiguous() and weights.is_contiguous()
    check_fits(fits, "draw_from_candidates", values=values, ids=ids, weights=weights)
    if not runs_kernel(values) or candidates > MOST_CANDIDATES:
        tokens, enough = _draw(values, ids, weights, filters)
    else:
        tokens, enough = ids.new_empty(rows), ids.new_empty(rows, dtype=torch.bool)
        if rows:
            _draw_kernel[(rows,)](
                values, ids, weights, *filters, tokens, enough,
                VOCAB=vocab, CANDIDATES=candidates, BLOCK=triton.next_power_of_2(candidates), COLUMNS=_COLUMNS,
                OTHERS=_OTHERS, num_warps=8,
            )  # fmt: skip
    return tokens, enough if candidates < vocab else torch.ones_like(enough)


def _draw(
    values: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, filters: Filters
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of the kernel."""
    candidates, vocab = values.shape[1], weights.shape[1]
    top_k, top_p, min_p, noise = filters
    least = values[:, -1]
    limited = (top_k > 0) & (top_k < vocab)
    kth = values.gather(1, (top_k - 1).clamp_(0, candidates - 1)[:, None])[:, 0]
    floor = torch.where(limited, torch.maximum(min_p, kth), min_p)
    kept = without(values, floor).double()  # in falling order, with zeros at the end
    cumulative = kept.cumsum(dim=1)
    everywhere = without(weights, floor).sum(dim=1, dtype=torch.float64)
    wanted = top_p * torch.where(limited, cumulative[:, -1], everywhere)
    last = (cumulative < wanted[:, None]).sum(dim=1, keepdim=True).clamp_(max=candidates - 1)
    cut = torch.where(top_p < 1.0, kept.gather(1, last)[:, 0], 0.0)  # of the token with which top_p is reached
    kept = torch.where(kept >= cut[:, None], kept, 0.0)
    # Candidates suffice if all other tokens have no weight, or less weight than the tokens that are kept. With top_k
    # they must include all tokens as likely as the last one, since top_p is a share of their weight.
    bound = torch.where(limited, floor.double(), torch.maximum(floor.double(), cut))
    enough = (least <= 0.0) | ((least < bound) & ~(limited & (top_k > candidates)))
    order = ids.argsort(dim=1)
    cumulative = kept.gather(1, order).cumsum(dim=1)
    target = below(noise * cumulative[:, -1], cumulative[:, -1])
    place = (cumulative <= target[:, None]).sum(dim=1, keepdim=True).clamp_(max=candidates - 1)
    return ids.gather(1, order.gather(1, place))[:, 0], enough


def without(weights: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """The weights [rows, columns], with 0 for those below the row's floor [rows]."""
    return torch.where(weights >= floor[:, None], weights, 0.0)


def below(target: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    """The target, but below the end even if the product that made it was rounded up."""
    return torch.minimum(target, torch.nextafter(end, torch.zeros_like(end)))
