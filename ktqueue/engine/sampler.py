"""Samples one token for each row of logits, on the CPU.

The filters have vLLM's order: temperature, then min_p (relative to the most likely token), then top_k, then top_p over
the tokens that top_k left. Tokens as likely as the last one kept are kept too, so rounding does not decide between
equals. The draw takes one uniform number for each row and inverts the cumulative distribution of the kept tokens, in
vocabulary order.

Passes over the whole vocabulary handle several rows at once, and threads share the rows. Rows with top_k or top_p have
few candidates left and are finished one by one, which is faster than padding them to a matrix. Each row's result
depends on that row only. Knows nothing of requests.
"""

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ktqueue.core.thread_names import name_thread
from ktqueue.engine.noise import uniform

GREEDY_BELOW = 1e-5  # a lower temperature means greedy
_GUESS = np.float32(1e-3)  # first candidates of top_p: tokens at least so likely, relative to the most likely one
_BLOCK = 64  # columns summed at a time
_IN_CACHE = 1 << 18  # number of logits that fit into the CPU cache together
_MOST_THREADS = 16  # then memory or the interpreter's lock is the limit

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Integers = NDArray[np.int64]

Uniform = Callable[[NDArray[np.uint64], Integers], Doubles]
"""Gives a number in [0, 1) for each row from streams and positions, all [rows]: see `noise.uniform`."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of the rows, each [rows], named as in SamplingParams.

    `stream`: `noise.stream` of seed and choice. `position`: number of generated tokens.
    """

    temperature: Doubles
    top_k: Integers
    top_p: Doubles
    min_p: Doubles
    stream: NDArray[np.uint64]
    position: Integers

    def take(self, rows: Integers) -> "SamplingRows":
        """The parameters of `rows` only."""
        return SamplingRows(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.stream[rows],
            self.position[rows],
        )


def greedy(logits: Floats) -> tuple[Integers, NDArray[np.bool_]]:
    """The most likely token of each row of `logits` [rows, vocab] as [rows] int64, and which rows are finite as bool.

    A row is not finite if it has a NaN or +inf, or only -inf.
    """
    chosen = logits.argmax(axis=1)  # the first NaN counts as the greatest
    return chosen, np.isfinite(logits[np.arange(len(chosen)), chosen])


class Sampler:
    """Draws tokens with the numbers of `noise`, on up to `threads` threads. Reuses its buffers between calls."""

    def __init__(self, noise: Uniform = uniform, threads: int = 1) -> None:
        self._uniform = noise
        self._buffers: list[Floats] = [np.empty(0, dtype=np.float32)] * max(1, min(threads, _MOST_THREADS))
        self._threads: ThreadPoolExecutor | None = None
        self._process = 0  # that started the threads: a forked one has to start its own

    def sample(self, logits: Floats, rows: SamplingRows) -> Integers:
        """Draw a token for each row of finite `logits` [rows, vocab]; temperatures are at least GREEDY_BELOW."""
        together = max(1, _IN_CACHE // logits.shape[1])
        if len(logits) <= together:
            return self._sample(logits, rows, 0)
        parts = [np.arange(start, min(start + together, len(logits))) for start in range(0, len(logits), together)]
        chosen = np.empty(len(logits), dtype=np.int64)

        def sample_parts(thread: int) -> None:
            for part in parts[thread::threads]:
                chosen[part] = self._sample(logits[part[0] : part[-1] + 1], rows.take(part), thread)

        threads = min(len(self._buffers), len(parts))
        others = [self._executor().submit(sample_parts, thread) for thread in range(1, threads)]
        try:
            sample_parts(0)
        finally:
            for other in others:
                other.result()
        return chosen

    def _executor(self) -> ThreadPoolExecutor:
        if self._threads is None or self._process != os.getpid():
            self._threads = ThreadPoolExecutor(len(self._buffers) - 1, "sample", name_thread, ("ktq-sample",))
            self._process = os.getpid()
        return self._threads

    def _sample(self, logits: Floats, rows: SamplingRows, thread: int) -> Integers:
        padded = self._buffer(logits.shape, thread)
        weights = padded[:, : logits.shape[1]]
        with np.errstate(over="ignore", under="ignore"):
            np.subtract(logits, logits.max(axis=1, keepdims=True), out=weights)
            weights *= (1.0 / rows.temperature).astype(np.float32)[:, None]
            np.exp(weights, out=weights)  # 1 for the most likely token
        noise = self._uniform(rows.stream, rows.position)
        few = (rows.top_k > 0) | (rows.top_p < 1.0)
        chosen = np.empty(len(logits), dtype=np.int64)
        if not few.all():
            many = np.flatnonzero(~few)
            part = padded if len(many) == len(padded) else padded[many]
            chosen[many] = _draw_from_all(part, rows.min_p[many], noise[many])
        if few.any():
            totals = _block_sums(padded).sum(axis=1).tolist()
            top_k, top_p, min_p = rows.top_k.tolist(), rows.top_p.tolist(), rows.min_p.tolist()
            noises = noise.tolist()
            for row in np.flatnonzero(few).tolist():
                chosen[row] = _draw_from_few(weights[row], top_k[row], top_p[row], min_p[row], totals[row], noises[row])
        return chosen

    def _buffer(self, shape: tuple[int, ...], thread: int) -> Floats:
        """The buffer of a thread as [rows, vocab rounded up to whole blocks].

        Columns beyond the vocabulary are zeros.
        """
        rows, vocab = shape
        columns = -(-vocab // _BLOCK) * _BLOCK
        if self._buffers[thread].size < rows * columns:
            self._buffers[thread] = np.empty(rows * columns, dtype=np.float32)
        padded = self._buffers[thread][: rows * columns].reshape(rows, columns)
        padded[:, vocab:] = 0.0
        return padded


def _draw_from_all(weights: Floats, min_p: Doubles, noise: Doubles) -> Integers:
    """Draw from whole rows, filtered by min_p only. Finds the block of columns first, then the column in it."""
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
    """Draw from one row, and look only at candidates above a minimum weight.

    With top_k or min_p the minimum is exact. With top_p alone it is a guess. If the candidates' weight is too small, a
    second minimum is safe: tokens below (1 - top_p) / vocab of the total weigh less than 1 - top_p of it together.
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
            spare = 0.5 * (1.0 - top_p) * total / len(weights)  # half of it, because sums are rounded
            ids, kept = _candidates(weights, np.float32(spare if top_p < 0.9999 else 0.0))
            order, cumulative = _ordered(kept)
        last = min(int(cumulative.searchsorted(wanted)), len(order) - 1)  # the first token with which top_p is reached
        kept[kept < order[last]] = 0.0
    cumulative = kept.cumsum()
    weight = float(cumulative[-1])
    target = min(noise * weight, math.nextafter(weight, 0.0))
    return int(ids[cumulative.searchsorted(target, side="right")])


def _candidates(weights: Floats, floor: np.float32) -> tuple[Integers, Doubles]:
    """Tokens with a weight of at least `floor`, in vocabulary order, and their weights."""
    ids: Integers = (weights >= floor).nonzero()[0]
    return ids, weights[ids].astype(np.float64)


def _ordered(kept: Doubles) -> tuple[Doubles, Doubles]:
    """The weights in falling order, and their running sums."""
    order = np.sort(kept)[::-1]
    return order, order.cumsum()


def _block_sums(weights: Floats) -> Doubles:
    """Sums over blocks of columns, [rows, blocks] float64."""
    sums: Floats = np.einsum("rbc->rb", weights.reshape(len(weights), -1, _BLOCK))
    return sums.astype(np.float64)
