"""From how many keys on a decode step is faster in halves that take turns, by trying both. See docs/adr/0034."""

import logging
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Literal

import numpy as np
import torch

from ktqueue.engine.batch import Batch
from ktqueue.engine.bucket import Bucket
from ktqueue.operators.kv_cache import KVCache
from ktqueue.operators.step import StepContext

logger = logging.getLogger(__name__)

Overlap = Literal["auto", "on", "off"]
"""Whether decode steps are cut into halves; "auto": where that is faster."""

SHORT = 128  # keys of a row in the first trial; in the second it has about as many as all rows can have at once
ROUNDS = 5
WORTH = 0.97  # of what a whole step takes: halves that come no nearer are left


def keys_to_overlap(
    bucket: Bucket,
    kv: KVCache,
    vocabulary: int,
    wait: Callable[[], None],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> int | None:
    """The keys of all rows together from which steps of `bucket`, which is cut, take less in halves; None: there are
    none. `wait`: for what the device was given; `clock`: in seconds. Writes to pages of `kv`, which nobody may own
    yet."""
    pages = min(bucket.max_pages, kv.pages // bucket.rows)
    if pages == 0:
        return None
    most = (pages - 1) * kv.layout.page_size + 1  # the last page of the longest sequence may not be all its own
    lengths = [min(SHORT, most), most]
    times = [_seconds(bucket, trial_batch(bucket.rows, keys, kv, vocabulary), wait, clock) for keys in lengths]
    keys = crossing([bucket.rows * one for one in lengths], [WORTH * whole - halves for whole, halves in times])
    told = ", ".join(
        f"{1e3 * halves:.1f} instead of {1e3 * whole:.1f} ms with {length} keys a row"
        for length, (whole, halves) in zip(lengths, times, strict=True)
    )
    use = "run whole" if keys is None else f"overlap in halves from {keys} keys on"
    logger.info("decode steps of %d rows %s: %s", bucket.rows, use, told)
    return keys


def crossing(keys: Sequence[int], gains: Sequence[float]) -> int | None:
    """Where a gain that was measured at the first and the last of `keys`, rising, becomes positive, if it is a line
    between them; 0: it is at both, None: not at the last."""
    first, last = gains[0], gains[-1]
    if last <= 0:
        return None
    if first > 0:
        return 0
    return round(keys[0] + (keys[-1] - keys[0]) * first / (first - last))


def trial_batch(rows: int, keys: int, kv: KVCache, vocabulary: int) -> Batch:
    """A decode step of `rows` rows that see `keys` keys each, in pages of their own, at random tokens."""
    page_size = kv.layout.page_size
    count = -(-keys // page_size)
    table = np.arange(rows * count, dtype=np.int32).reshape(rows, count)
    slots = table[:, -1].astype(np.int64) * page_size + (keys - 1) % page_size
    tokens = np.random.default_rng(rows).integers(0, vocabulary, (1, rows))
    step = StepContext(
        query_starts=torch.arange(rows + 1, dtype=torch.int32),
        context_lengths=torch.full((rows,), keys, dtype=torch.int32),
        page_table=torch.from_numpy(table),
        slot_mapping=torch.from_numpy(slots),
        kv=kv,
    )
    return Batch(torch.from_numpy(tokens), torch.full((1, rows), keys - 1), torch.arange(rows), step)


def _seconds(bucket: Bucket, batch: Batch, wait: Callable[[], None], clock: Callable[[], float]) -> tuple[float, float]:
    """What the batch takes whole, and in halves. They take turns, since other processes disturb now and then."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for keys, times in zip((None, 0), taken, strict=True):
            bucket.overlapped_keys = keys
            bucket.prepare(batch)
            wait()
            begun = clock()
            bucket.run(batch)
            wait()
            times.append(clock() - begun)
    return median(taken[0]), median(taken[1])
