"""Chooses one token a row, all rows at once.

Order of the filters as vLLM has it: temperature, then min_p (relative to the likeliest token), then
top_k, then top_p over what top_k left. A token as likely as the last one kept is kept too, so float
noise between equals decides nothing. The draw walks the kept tokens in vocabulary order (inverse of
the cumulative distribution) with one uniform number a row.

Passes over the whole vocabulary take all rows at once; the few candidates that are left of a row
with top_k or top_p are handled by themselves, which is faster than padding them to a matrix.
Knows nothing of requests. Each row's result depends on that row alone.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ktqueue.engine.noise import uniform

GREEDY_BELOW = 1e-5  # a smaller temperature is greedy
_GUESS = 1e-3  # candidates of top_p: tokens at least so likely, relative to the likeliest
_BLOCK = 64  # columns summed at a time
_IN_CACHE = 1 << 18  # logits that are worked on at a time

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Integers = NDArray[np.int64]
AnyDouble = TypeVar("AnyDouble", np.float64, Doubles)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of the rows, each [rows]; meanings as in SamplingParams.

    `stream` is `noise.stream` of seed and choice; `position` counts generated tokens from 0.
    """

    temperature: Doubles
    top_k: Integers
    top_p: Doubles
    min_p: Doubles
    stream: NDArray[np.uint64]
    position: Integers

    def take(self, rows: Integers) -> "SamplingRows":
        """The parameters of some rows."""
        return SamplingRows(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.stream[rows],
            self.position[rows],
        )


def greedy(logits: Floats) -> tuple[Integers, NDArray[np.bool_]]:
    """Likeliest token of each row of `logits` [rows, vocab], and which rows have a finite one.

    A row with a NaN or +inf anywhere, or with -inf everywhere, is not finite.
    """
    chosen = logits.argmax(axis=1)  # the first NaN counts as the greatest
    return chosen, np.isfinite(logits[np.arange(len(chosen)), chosen])


def sample(logits: Floats, rows: SamplingRows) -> Integers:
    """Draw a token for each row of finite `logits` [rows, vocab]; temperatures are at least GREEDY_BELOW."""
    together = max(1, _IN_CACHE // logits.shape[1])
    if len(logits) <= together:
        return _sample(logits, rows)
    parts = [np.arange(start, min(start + together, len(logits))) for start in range(0, len(logits), together)]
    return np.concatenate([_sample(logits[part], rows.take(part)) for part in parts])


def _sample(logits: Floats, rows: SamplingRows) -> Integers:
    vocab = logits.shape[1]
    padded = np.zeros((len(logits), -(-vocab // _BLOCK) * _BLOCK), dtype=np.float32)
    weights = padded[:, :vocab]
    with np.errstate(over="ignore", under="ignore"):
        np.subtract(logits, logits.max(axis=1, keepdims=True), out=weights)
        weights *= (1.0 / rows.temperature).astype(np.float32)[:, None]
        np.exp(weights, out=weights)  # 1 at the likeliest token
    noise = uniform(rows.stream, rows.position)
    few = (rows.top_k > 0) | (rows.top_p < 1.0)
    chosen = np.empty(len(logits), dtype=np.int64)
    if not few.all():
        many = np.flatnonzero(~few)
        chosen[many] = _draw_from_all(
            padded if len(many) == len(padded) else padded[many], rows.min_p[many], noise[many]
        )
    if few.any():
        totals = _block_sums(padded).sum(axis=1).tolist()
        top_k, top_p, min_p = rows.top_k.tolist(), rows.top_p.tolist(), rows.min_p.tolist()
        for row in np.flatnonzero(few).tolist():
            chosen[row] = _draw_from_few(weights[row], top_k[row], top_p[row], min_p[row], totals[row], noise[row])
    return chosen


def _draw_from_all(weights: Floats, min_p: Doubles, noise: Doubles) -> Integers:
    """Draw from whole rows; only min_p filters. Two strides: to the block of columns, then within it."""
    if min_p.any():
        weights[weights < min_p.astype(np.float32)[:, None]] = 0.0
    blocks = _block_sums(weights).cumsum(axis=1)
    target = _target(noise, blocks[:, -1])
    block = (blocks <= target[:, None]).sum(axis=1)
    every = np.arange(len(noise))
    target -= np.where(block > 0, blocks[every, block - 1], 0.0)
    inner = weights.reshape(len(noise), -1, _BLOCK)[every, block].astype(np.float64).cumsum(axis=1)
    target = np.minimum(target, np.nextafter(inner[:, -1], 0.0))  # the block's sum was rounded
    found: Integers = block * _BLOCK + (inner <= target[:, None]).sum(axis=1)
    return found


def _draw_from_few(weights: Floats, top_k: int, top_p: float, min_p: float, total: float, noise: np.float64) -> int:
    """Draw from one row, looking only at the candidates of at least a certain weight.

    With top_k or min_p that weight is exact. With top_p alone it is a guess; where the candidates hold
    too little it is done again with a weight that can't fail: what lies below (1 - top_p) / vocab of
    the total holds less than 1 - top_p of it.
    """
    floor = np.float32(min_p)
    if 0 < top_k < len(weights):
        floor = max(floor, np.partition(weights, len(weights) - top_k)[len(weights) - top_k])
    guessed = top_k == 0 and min_p == 0.0
    ids = np.flatnonzero(weights >= (_GUESS if guessed else floor))
    kept = weights[ids].astype(np.float64)  # in vocabulary order
    if top_p < 1.0:
        order, cumulative = _ordered(kept)
        wanted = top_p * (total if guessed else cumulative[-1])
        if guessed and cumulative[-1] < wanted:
            spare = 0.5 * (1.0 - top_p) * total / len(weights)  # half of it: sums are rounded
            ids = np.flatnonzero(weights >= np.float32(spare if top_p < 0.9999 else 0.0))
            kept = weights[ids].astype(np.float64)
            order, cumulative = _ordered(kept)
        last = min(int(cumulative.searchsorted(wanted)), len(order) - 1)  # the first with which top_p is reached
        kept[kept < order[last]] = 0.0
    cumulative = kept.cumsum()
    return int(ids[cumulative.searchsorted(_target(noise, cumulative[-1]), side="right")])


def _ordered(kept: Doubles) -> tuple[Doubles, Doubles]:
    """Greatest first, and their running sum."""
    order = np.sort(kept)[::-1]
    return order, order.cumsum()


def _block_sums(weights: Floats) -> Doubles:
    """Sums over blocks of columns, [rows, blocks]."""
    sums: Floats = np.einsum("rbc->rb", weights.reshape(len(weights), -1, _BLOCK))
    return sums.astype(np.float64)


def _target(noise: AnyDouble, total: AnyDouble) -> AnyDouble:
    """The cumulative weight to pass: below the total even where the product rounds up to it."""
    target: AnyDouble = np.minimum(noise * total, np.nextafter(total, 0.0))
    return target
