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
_FLOORS = (1e-3, 1e-5, 0.0)  # candidate sets to try, as parts of the likeliest token's probability; 0 is all

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
    with np.errstate(over="ignore", under="ignore"):
        weights = logits - logits.max(axis=1, keepdims=True)
        weights *= (1.0 / rows.temperature).astype(np.float32)[:, None]
        np.exp(weights, out=weights)  # 1 at the likeliest token
    noise = uniform(rows.seed, rows.index, rows.position)
    chosen = np.empty(len(noise), dtype=np.int64)
    sorting = (rows.top_k > 0) | (rows.top_p < 1.0)
    plain = np.flatnonzero(~sorting)
    if plain.size:
        chosen[plain] = _draw_plain(weights[plain], rows.min_p[plain], noise[plain])
    left = np.flatnonzero(sorting)
    for floor in _FLOORS:
        if not left.size:
            break
        part = weights if left.size == len(noise) else weights[left]
        ids, decided = _draw_sorted(part, rows.take(left), noise[left], floor)
        chosen[left[decided]] = ids[decided]
        left = left[~decided]
    return chosen


def _draw_plain(weights: Floats, min_p: Doubles, noise: Doubles) -> Integers:
    """Draw from whole rows; only min_p filters."""
    if min_p.any():
        weights[weights < min_p[:, None]] = 0.0
    return _walk(weights, noise)


def _walk(weights: Floats, noise: Doubles) -> Integers:
    """First column where the cumulative weight passes `noise` times the total. Never one of weight 0."""
    cumulative = np.cumsum(weights, axis=1, dtype=np.float64)
    total = cumulative[:, -1]
    target = np.minimum(noise * total, np.nextafter(total, 0.0))
    return np.array([row.searchsorted(value, side="right") for row, value in zip(cumulative, target, strict=True)])


def _draw_sorted(
    weights: Floats, rows: SamplingRows, noise: Doubles, floor: float
) -> tuple[Integers, NDArray[np.bool_]]:
    """Draw with top_k and top_p, looking only at tokens of at least `floor` (or min_p) times the greatest weight.

    Returns ids and which rows the candidates suffice for; with floor 0 they always do.
    """
    bound = np.where(rows.min_p > 0.0, rows.min_p, floor)
    complete = (rows.min_p > 0.0) | (floor == 0.0)
    row, token = np.divmod(np.flatnonzero(weights >= bound.astype(np.float32)[:, None]), weights.shape[1])
    counts = np.bincount(row, minlength=len(noise))
    column = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    kept = np.zeros((len(noise), int(counts.max())), dtype=np.float32)
    kept[row, column] = weights[row, token]
    ids = np.zeros(kept.shape, dtype=np.int64)
    ids[row, column] = token

    order = -np.sort(-kept, axis=1)  # greatest first, padding (0) last
    every = np.arange(len(noise))
    limited = rows.top_k > 0
    last = order[every, np.where(limited, np.minimum(rows.top_k, counts), counts) - 1]
    order[order < last[:, None]] = 0.0
    cumulative = np.cumsum(order, axis=1, dtype=np.float64)
    total = cumulative[:, -1]
    full = limited | complete
    if not full.all():
        total = np.where(full, total, weights.sum(axis=1, dtype=np.float64))
    wanted = rows.top_p * total
    before = np.count_nonzero((cumulative - order < wanted[:, None]) & (order > 0.0), axis=1)
    cut = np.where(rows.top_p < 1.0, order[every, np.maximum(before, 1) - 1], last)
    enough = np.where(limited, counts >= rows.top_k, cumulative[:, -1] >= wanted)
    kept[kept < cut[:, None]] = 0.0
    return ids[every, _walk(kept, noise)], complete | enough
