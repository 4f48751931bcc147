"""Chooses one token a row, all rows at once.

Order of the filters as vLLM has it: temperature, then min_p (relative to the likeliest token), then
top_k, then top_p over what top_k left. A token as likely as the last one kept is kept too, so float
noise between equals decides nothing. The draw walks the kept tokens in vocabulary order (inverse of
the cumulative distribution) with one uniform number a row.

Knows nothing of requests. Each row's result depends on that row alone.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ktqueue.engine.noise import uniform

GREEDY_BELOW = 1e-5  # a smaller temperature is greedy
_GUESS = 1e-3  # candidates of top_p: tokens at least so likely, relative to the likeliest
_SIZES = (64, 512)  # candidate counts up to which rows are padded together
_BLOCK = 64  # columns summed at a time
_IN_CACHE = 1 << 18  # logits that are worked on at a time

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of the rows, each [rows]; meanings as in SamplingParams. `position` counts generated tokens from 0."""

    temperature: Doubles
    top_k: Integers
    top_p: Doubles
    min_p: Doubles
    seed: Integers
    index: Integers
    position: Integers

    def take(self, rows: Integers) -> "SamplingRows":
        """The parameters of some rows."""
        return SamplingRows(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.seed[rows],
            self.index[rows],
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
    noise = uniform(rows.seed, rows.index, rows.position)
    together = max(1, _IN_CACHE // logits.shape[1])
    if len(noise) <= together:
        return _sample(logits, rows, noise)
    parts = [np.arange(start, min(start + together, len(noise))) for start in range(0, len(noise), together)]
    return np.concatenate([_sample(logits[part], rows.take(part), noise[part]) for part in parts])


def _sample(logits: Floats, rows: SamplingRows, noise: Doubles) -> Integers:
    vocab = logits.shape[1]
    padded = np.zeros((len(logits), -(-vocab // _BLOCK) * _BLOCK), dtype=np.float32)
    weights = padded[:, :vocab]
    with np.errstate(over="ignore", under="ignore"):
        np.subtract(logits, logits.max(axis=1, keepdims=True), out=weights)
        weights *= (1.0 / rows.temperature).astype(np.float32)[:, None]
        np.exp(weights, out=weights)  # 1 at the likeliest token
    chosen = np.empty(len(noise), dtype=np.int64)
    few = (rows.top_k > 0) | (rows.top_p < 1.0)
    many = np.flatnonzero(~few)
    if many.size:
        chosen[many] = _draw_from_all(_part(padded, many), rows.min_p[many], noise[many])
    left = np.flatnonzero(few)
    if left.size:
        chosen[left] = _draw_from_few(_part(padded, left), rows.take(left), noise[left])
    return chosen


def _part(weights: Floats, rows: Integers) -> Floats:
    return weights if len(rows) == len(weights) else weights[rows]


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


def _draw_from_few(weights: Floats, rows: SamplingRows, noise: Doubles) -> Integers:
    """Draw where top_k or top_p filter, looking only at the candidates of at least a certain weight.

    With top_k or min_p that weight is exact. With top_p alone it is a guess; rows whose candidates
    hold too little are done again with a weight that can't fail: what lies below (1 - top_p) / vocab
    of the total holds less than 1 - top_p of it.
    """
    total = _block_sums(weights).sum(axis=1)
    guessed = (rows.top_k == 0) & (rows.min_p == 0.0)
    floor = np.where(guessed, _GUESS, rows.min_p)
    for k in np.unique(rows.top_k[rows.top_k > 0]):
        same = np.flatnonzero(rows.top_k == k)
        place = max(weights.shape[1] - int(k), 0)
        floor[same] = np.maximum(floor[same], np.partition(_part(weights, same), place, axis=1)[:, place])
    chosen, held = _draw_candidates(weights, rows, noise, floor, np.where(guessed, total, 0.0))
    missed = np.flatnonzero(guessed & (held < rows.top_p * total))
    if missed.size:
        spare = 1.0 - rows.top_p[missed]
        floor = np.where(spare > 1e-5, 0.5 * spare * total[missed] / weights.shape[1], 0.0)  # half: sums are rounded
        part = weights[missed]
        chosen[missed], _ = _draw_candidates(part, rows.take(missed), noise[missed], floor, total[missed])
    return chosen


def _draw_candidates(
    weights: Floats, rows: SamplingRows, noise: Doubles, floor: Doubles, total: Doubles
) -> tuple[Integers, Doubles]:
    """Draw from the tokens of at least `floor`, of which top_p of the `total` (0: of their own) is kept.

    Returns ids and what the candidates weigh together. Rows with about as many candidates are padded to one matrix.
    """
    vocab = weights.shape[1]
    flat = np.flatnonzero(weights >= floor.astype(np.float32)[:, None])
    ends = flat.searchsorted(np.arange(len(noise) + 1) * vocab)
    counts = np.diff(ends)
    chosen = np.empty(len(noise), dtype=np.int64)
    held = np.empty(len(noise))
    size = np.searchsorted(_SIZES, counts)
    for one in np.unique(size):
        group = np.flatnonzero(size == one)
        sizes = counts[group]
        row = np.repeat(np.arange(len(group)), sizes)
        column = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        token = flat[np.repeat(ends[group], sizes) + column] - np.repeat(group * vocab, sizes)
        kept = np.zeros((len(group), int(sizes.max())), dtype=np.float32)
        kept[row, column] = weights[group[row], token]
        ids = np.zeros(kept.shape, dtype=np.int64)
        ids[row, column] = token
        order = -np.sort(-kept, axis=1)  # greatest first, padding (0) last
        cumulative = order.astype(np.float64).cumsum(axis=1)
        held[group] = cumulative[:, -1]
        wanted = rows.top_p[group] * np.where(total[group] > 0.0, total[group], held[group])
        before = ((cumulative - order < wanted[:, None]) & (order > 0.0)).sum(axis=1)
        every = np.arange(len(group))
        cut = np.where(rows.top_p[group] < 1.0, order[every, np.maximum(before, 1) - 1], 0.0)
        kept[kept < cut[:, None]] = 0.0
        cumulative = kept.astype(np.float64).cumsum(axis=1)
        chosen[group] = ids[every, (cumulative <= _target(noise[group], cumulative[:, -1])[:, None]).sum(axis=1)]
    return chosen, held


def _block_sums(weights: Floats) -> Doubles:
    """Sums over blocks of columns, [rows, blocks]."""
    sums: Floats = np.einsum("rbc->rb", weights.reshape(len(weights), -1, _BLOCK))
    return sums.astype(np.float64)


def _target(noise: Doubles, total: Doubles) -> Doubles:
    """The cumulative weight to pass: below the total even where the product rounds up to it."""
    return np.minimum(noise * total, np.nextafter(total, 0.0))
