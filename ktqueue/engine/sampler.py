"""Chooses one token a row, all rows at once.

Order of the filters as vLLM has it: temperature, then min_p (relative to the likeliest token), then
top_k, then top_p over what top_k left. A token as likely as the last one kept is kept too, so float
noise between equals decides nothing. The draw walks the kept tokens in vocabulary order (inverse of
the cumulative distribution) with one uniform number a row.

Passes over the whole vocabulary take all rows at once; the few candidates that are left of a row
with top_k or top_p are handled by themselves, which is faster than padding them to a matrix.
Knows nothing of requests. Each row's result depends on that row alone.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ktqueue.engine.noise import uniform

GREEDY_BELOW = 1e-5  # a smaller temperature is greedy
_GUESS = np.float32(1e-3)  # candidates of top_p: tokens at least so likely, relative to the likeliest
_BLOCK = 64  # columns summed at a time
_IN_CACHE = 1 << 18  # logits that are worked on at a time

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Integers = NDArray[np.int64]


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


class Sampler:
    """Draws tokens; keeps the memory that it works in."""

    def __init__(self) -> None:
        self._scratch: Floats = np.empty(0, dtype=np.float32)

    def sample(self, logits: Floats, rows: SamplingRows) -> Integers:
        """Draw a token for each row of finite `logits` [rows, vocab]; temperatures are at least GREEDY_BELOW."""
        together = max(1, _IN_CACHE // logits.shape[1])
        if len(logits) <= together:
            return self._sample(logits, rows)
        parts = [np.arange(start, min(start + together, len(logits))) for start in range(0, len(logits), together)]
        return np.concatenate([self._sample(logits[part], rows.take(part)) for part in parts])

    def _sample(self, logits: Floats, rows: SamplingRows) -> Integers:
        padded = self._buffer(logits.shape)
        weights = padded[:, : logits.shape[1]]
        with np.errstate(over="ignore", under="ignore"):
            np.subtract(logits, logits.max(axis=1, keepdims=True), out=weights)
            weights *= (1.0 / rows.temperature).astype(np.float32)[:, None]
            np.exp(weights, out=weights)  # 1 at the likeliest token
        noise = uniform(rows.stream, rows.position)
        few = (rows.top_k > 0) | (rows.top_p < 1.0)
        chosen = np.empty(len(logits), dtype=np.int64)
        if not few.all():
            many = np.flatnonzero(~few)
            part = padded if len(many) == len(padded) else padded[many]
            chosen[many] = _draw_from_all(part, rows.min_p[many], noise[many])
        if few.any():
            totals = _block_sums(padded).sum(axis=1).tolist()
            top_k, top_p, min_p = rows.top_k.tolist(), rows.top_p.tolist(), rows.min_p.tolist()
            each = noise.tolist()
            for row in np.flatnonzero(few).tolist():
                chosen[row] = _draw_from_few(weights[row], top_k[row], top_p[row], min_p[row], totals[row], each[row])
        return chosen

    def _buffer(self, shape: tuple[int, ...]) -> Floats:
        """[rows, vocab rounded up to whole blocks] with zeros in the columns beyond the vocabulary."""
        rows, vocab = shape
        columns = -(-vocab // _BLOCK) * _BLOCK
        if self._scratch.size < rows * columns:
            self._scratch = np.empty(rows * columns, dtype=np.float32)
        padded = self._scratch[: rows * columns].reshape(rows, columns)
        padded[:, vocab:] = 0.0
        return padded


def _draw_from_all(weights: Floats, min_p: Doubles, noise: Doubles) -> Integers:
    """Draw from whole rows; only min_p filters. Two strides: to the block of columns, then within it."""
    if min_p.any():
        weights[weights < min_p.astype(np.float32)[:, None]] = 0.0
    blocks = _block_sums(weights).cumsum(axis=1)
    target = np.minimum(noise * blocks[:, -1], np.nextafter(blocks[:, -1], 0.0))  # below, though the product rounds up
    block = (blocks <= target[:, None]).sum(axis=1)
    every = np.arange(len(noise))
    target -= np.where(block > 0, blocks[every, block - 1], 0.0)
    inner = weights.reshape(len(noise), -1, _BLOCK)[every, block].astype(np.float64).cumsum(axis=1)
    target = np.minimum(target, np.nextafter(inner[:, -1], 0.0))  # the block's sum was rounded
    found: Integers = block * _BLOCK + (inner <= target[:, None]).sum(axis=1)
    return found


def _draw_from_few(weights: Floats, top_k: int, top_p: float, min_p: float, total: float, noise: float) -> int:
    """Draw from one row, looking only at the candidates of at least a certain weight.

    With top_k or min_p that weight is exact. With top_p alone it is a guess; where the candidates hold
    too little it is done again with a weight that can't fail: what lies below (1 - top_p) / vocab of
    the total holds less than 1 - top_p of it.
    """
    floor = np.float32(min_p)
    if 0 < top_k < len(weights):
        floor = max(floor, np.partition(weights, len(weights) - top_k)[len(weights) - top_k])
    guessed = top_k == 0 and min_p == 0.0
    ids, kept = _candidates(weights, _GUESS if guessed else floor)
    if top_p < 1.0:
        order, cumulative = _ordered(kept)
        wanted = top_p * (total if guessed else float(cumulative[-1]))
        if guessed and cumulative[-1] < wanted:
            spare = 0.5 * (1.0 - top_p) * total / len(weights)  # half of it: sums are rounded
            ids, kept = _candidates(weights, np.float32(spare if top_p < 0.9999 else 0.0))
            order, cumulative = _ordered(kept)
        last = min(int(cumulative.searchsorted(wanted)), len(order) - 1)  # the first with which top_p is reached
        kept[kept < order[last]] = 0.0
    cumulative = kept.cumsum()
    weight = float(cumulative[-1])
    target = min(noise * weight, math.nextafter(weight, 0.0))
    return int(ids[cumulative.searchsorted(target, side="right")])


def _candidates(weights: Floats, floor: np.float32) -> tuple[Integers, Doubles]:
    """Tokens of at least `floor`, in vocabulary order, and their weights."""
    ids: Integers = (weights >= floor).nonzero()[0]
    return ids, weights[ids].astype(np.float64)


def _ordered(kept: Doubles) -> tuple[Doubles, Doubles]:
    """Greatest first, and their running sum."""
    order = np.sort(kept)[::-1]
    return order, order.cumsum()


def _block_sums(weights: Floats) -> Doubles:
    """Sums over blocks of columns, [rows, blocks]."""
    sums: Floats = np.einsum("rbc->rb", weights.reshape(len(weights), -1, _BLOCK))
    return sums.astype(np.float64)
