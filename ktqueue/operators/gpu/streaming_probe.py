"""What streaming costs here, measured before the first step: the CPU computes one layer, and copies bring another."""

import time
from collections.abc import Sequence

import numpy as np

from ktqueue.operators.gpu.expert_pool import ExpertPool
from ktqueue.operators.gpu.hybrid_experts import RoutedLayer
from ktqueue.operators.gpu.side_copies import CopyStream, host_bytes
from ktqueue.operators.gpu.streaming_costs import StreamingCosts, fit

FEW, MANY = 32, 512  # tokens
COPIED = 256 << 20  # bytes at most


def measure_costs(
    layers: Sequence[RoutedLayer], pool: ExpertPool, copies: CopyStream, max_tokens: int
) -> StreamingCosts:
    """The costs for the experts of `layers` that have no slot in `pool`, in steps of up to `max_tokens`.

    Copies go to the staging memory of `pool`. On a CPU a copy costs what it costs there.
    """
    few, many = min(FEW, max_tokens), min(MANY, max_tokens)
    layer = layers[0]
    fixed, per_token = fit((few, _compute_seconds(layer, few)), (many, _compute_seconds(layer, many)))
    rate = _copy_rate(layer, pool, copies)
    absent = [one.experts - slots for one, slots in zip(layers, pool.slots, strict=True)]
    part = sum(count / one.experts for count, one in zip(absent, layers, strict=True)) / len(layers)
    absent_bytes = sum(count * one.record.bytes for count, one in zip(absent, layers, strict=True)) / len(layers)
    return StreamingCosts(cpu_fixed=fixed * part, cpu_token=per_token * part, copy=absent_bytes / rate)


def _compute_seconds(layer: RoutedLayer, tokens: int) -> float:
    """The CPU's time for all experts of the layer: the better of two runs of random tokens, after a first one."""
    random = np.random.default_rng(tokens)
    x = random.normal(size=(tokens, layer.record.hidden)).astype(np.float32)
    ids = random.random((tokens, layer.experts)).argsort(axis=1)[:, : layer.experts_per_token].astype(np.int64)
    ids = np.ascontiguousarray(ids)
    weights, out = np.full(ids.shape, 0.1, np.float32), np.empty_like(x)
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        layer.packed.forward(x, ids, weights, out)
        seconds.append(time.perf_counter() - begun)
    return min(seconds[1:])


def _copy_rate(layer: RoutedLayer, pool: ExpertPool, copies: CopyStream) -> float:
    """Bytes a second from packed experts to the device: the better of two runs."""
    pairs, at = [], pool.staging_start
    for expert in range(layer.experts):
        for address, size in layer.packed.ranges(expert):
            if at + size <= len(pool.memory) and at + size - pool.staging_start <= COPIED:
                pairs.append((host_bytes(address, size), pool.memory[at : at + size]))
                at += size
    rates = []
    for _ in range(2):
        copies.finish()
        begun = time.perf_counter()
        copies.copy(pairs)
        copies.finish()
        rates.append((at - pool.staging_start) / (time.perf_counter() - begun))
    return max(rates)
