"""What streaming costs here, measured before the first step: the CPU computes one layer, and copies bring another."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from ktqueue.operators.gpu.copy_stream import Copy, CopyStream, host_bytes
from ktqueue.operators.gpu.experts.pool import ExpertPool
from ktqueue.operators.gpu.experts.step import RoutedLayer
from ktqueue.operators.gpu.experts.streaming_costs import StreamingCosts, fit

FEW, MANY = 32, 512  # tokens
COPIED = 256 << 20  # bytes at most
ROUNDS = 6  # of copies, which should go on for as long as the CPU computes


def measure_costs(
    layers: Sequence[RoutedLayer], pool: ExpertPool, copies: CopyStream, max_tokens: int
) -> StreamingCosts:
    """The costs for the experts of `layers` that have no slot in `pool`, in steps of up to `max_tokens`.

    Copies go to the staging memory of `pool`; they and the CPU read the same memory, so what the CPU takes is measured
    while they run, and alone too. On a CPU a copy costs what it costs there, and is done before.
    """
    few, many = min(FEW, max_tokens), min(MANY, max_tokens)
    layer = layers[0]
    pairs = _pairs(layer, pool)
    rate = _copy_rate(pairs, copies)

    def copying() -> None:
        for _ in range(ROUNDS):
            copies.copy(pairs)

    beside = [_compute_seconds(layer, tokens, copying, copies.finish) for tokens in (few, many)]
    alone = _compute_seconds(layer, many, lambda: None, lambda: None)
    fixed, per_token = fit((few, beside[0]), (many, beside[1]))
    absent = [one.experts - slots for one, slots in zip(layers, pool.slots, strict=True)]
    part = sum(count / one.experts for count, one in zip(absent, layers, strict=True)) / len(layers)
    absent_bytes = sum(count * one.record.bytes for count, one in zip(absent, layers, strict=True)) / len(layers)
    return StreamingCosts(
        cpu_fixed=fixed * part,
        cpu_token=per_token * part,
        copy=absent_bytes / rate,
        row=4 * layer.record.hidden / rate,
        alone=min(1.0, alone / beside[1]),
    )


def _compute_seconds(layer: RoutedLayer, tokens: int, before: Callable[[], None], after: Callable[[], None]) -> float:
    """The CPU's time for all experts of the layer: the better of two runs of random tokens, after a first one. `before`
    and `after` each run are not part of it."""
    random = np.random.default_rng(tokens)
    x = random.normal(size=(tokens, layer.record.hidden)).astype(np.float32)
    ids = random.random((tokens, layer.experts)).argsort(axis=1)[:, : layer.experts_per_token].astype(np.int64)
    ids = np.ascontiguousarray(ids)
    weights, out = np.full(ids.shape, 0.1, np.float32), np.empty_like(x)
    seconds = []
    for _ in range(3):
        before()
        begun = time.perf_counter()
        layer.packed.forward(x, ids, weights, out)
        seconds.append(time.perf_counter() - begun)
        after()
    return min(seconds[1:])


def _pairs(layer: RoutedLayer, pool: ExpertPool) -> list[Copy]:
    """Copies of the layer's experts to the staging memory, COPIED bytes at most."""
    pairs, at = [], pool.staging_start
    for expert in range(layer.experts):
        for address, size in layer.packed.ranges(expert):
            if at + size <= len(pool.memory) and at + size - pool.staging_start <= COPIED:
                pairs.append((host_bytes(address, size), pool.memory[at : at + size]))
                at += size
    return pairs


def _copy_rate(pairs: list[Copy], copies: CopyStream) -> float:
    """Bytes a second from packed experts to the device: the better of two runs."""
    rates = []
    for _ in range(2):
        copies.finish()
        begun = time.perf_counter()
        copies.copy(pairs)
        copies.finish()
        rates.append(sum(target.nbytes for _, target in pairs) / (time.perf_counter() - begun))
    return max(rates)
