"""Measurements before the first step: the costs of streaming, and the best share of experts to fetch."""

import logging
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from ktqueue.operators import native
from ktqueue.operators.gpu.copy_stream import Copy, CopyStream
from ktqueue.operators.gpu.experts.fetching import FetchedShares
from ktqueue.operators.gpu.experts.pool import ExpertPool
from ktqueue.operators.gpu.experts.step import RoutedLayer, StepExperts
from ktqueue.operators.gpu.experts.streaming_choice import StreamingCosts, fit_line
from ktqueue.operators.gpu.kernels.norm import add_rms_norm

logger = logging.getLogger(__name__)

FEW_TOKENS, MANY_TOKENS = 32, 512
MAX_COPIED_BYTES = 256 << 20
COPY_ROUNDS = 6  # copies must last as long as the CPU computes

SHARES = (0.0, 0.125, 0.1875, 0.25, 0.3125, 0.375, 0.4375, 0.5)
SEVERAL_TOKENS = 8  # stands for all steps of several tokens: from 2 to 64 the best share is the same
PROBED_LAYERS = 16  # run one after the other, more than a cache holds
STEP_ROUNDS = 5
MIN_GAIN = 0.97  # a share must bring the time of a step below this part of the time without fetching


def measure_costs(
    layers: Sequence[RoutedLayer], pool: ExpertPool, copies: CopyStream, max_tokens: int
) -> StreamingCosts:
    """The costs for the experts of `layers` that have no slot in `pool`, in steps of at most `max_tokens` tokens.

    The copies go to the staging memory of `pool`. Copies and CPU read the same memory, so the CPU is timed with and
    without them. On CPU tensors a copy is an ordinary one and ends before the CPU computes.
    """
    few, many = min(FEW_TOKENS, max_tokens), min(MANY_TOKENS, max_tokens)
    layer = layers[0]
    staging_copies = _copies_to_staging(layer, pool)
    bytes_per_second = _copy_rate(staging_copies, copies)

    def start_copies() -> None:
        for _ in range(COPY_ROUNDS):
            copies.copy(staging_copies)

    with_copies = [_compute_seconds(layer, tokens, start_copies, copies.finish) for tokens in (few, many)]
    without_copies = _compute_seconds(layer, many, lambda: None, lambda: None)
    fixed, per_token = fit_line((few, with_copies[0]), (many, with_copies[1]))
    absent = [(each, each.experts - slots) for each, slots in zip(layers, pool.slots, strict=True)]
    absent_share = sum(count / each.experts for each, count in absent) / len(layers)
    absent_bytes = sum(count * each.record.bytes for each, count in absent) / len(layers)
    return StreamingCosts(
        cpu_fixed=fixed * absent_share,
        cpu_token=per_token,
        copy=absent_bytes / bytes_per_second,
        row=4 * layer.record.hidden / bytes_per_second,
        alone=min(1.0, without_copies / with_copies[1]),
        experts_per_token=layer.experts_per_token,
    )


def measure_shares(
    make_step: Callable[[float], StepExperts],
    layers: Sequence[RoutedLayer],
    slots: Sequence[int],
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
    max_tokens: int,
) -> FetchedShares:
    """The shares with the fastest steps, for one token and for several (at most `max_tokens`), with likely routing. 0
    where fetching gains too little. slots: of each layer, so many of its first experts are on the GPU.

    `make_step(share)` returns the experts of a step that fetches this share. The steps are captured, like those of
    decode: otherwise the launches would take most of the time. Shares are measured in turns, since other processes use
    memory bandwidth now and then. Needs a CUDA device.
    """
    norm = torch.ones(hidden, dtype=dtype, device=device)
    probed = layers[:PROBED_LAYERS]
    fastest_shares = []
    for tokens in (1, min(SEVERAL_TOKENS, max_tokens)):
        random = torch.Generator(device).manual_seed(tokens)
        residual = torch.randn(tokens, hidden, generator=random, device=device).to(dtype)
        logits = [likely_logits(layer, on_gpu, tokens, random) for layer, on_gpu in zip(probed, slots, strict=False)]
        with torch.inference_mode():
            graphs = {share: _capture(make_step(share), residual, norm, logits) for share in SHARES}
            seconds: dict[float, list[float]] = {share: [] for share in SHARES}
            for _ in range(STEP_ROUNDS):
                for share, graph in graphs.items():
                    begun = time.perf_counter()
                    graph.replay()
                    torch.cuda.synchronize(device)
                    seconds[share].append(time.perf_counter() - begun)
        relative = {share: median(times) / median(seconds[0.0]) for share, times in seconds.items()}
        fastest_shares.append(fastest(relative))
        times = ", ".join(f"{share:g}: {ratio:.2f}" for share, ratio in relative.items())
        logger.info(
            "steps of %d tokens fetch %g of the absent experts; time by share: %s", tokens, fastest_shares[-1], times
        )
    return FetchedShares(*fastest_shares)


def likely_logits(layer: RoutedLayer, slots: int, tokens: int, random: torch.Generator) -> torch.Tensor:
    """Random logits [tokens, experts] that choose absent experts as often as a trained router would.

    The first `slots` experts are on the GPU, and are the most used ones. Of a trained layer, the least used part p of
    the experts has about p^3 of the uses: half of them 9 to 15 % in the traces of benchmarks/figures/placement.md.
    """
    chosen = layer.experts_per_token
    place: dict[str, Any] = {"generator": random, "device": random.device}
    scores = torch.rand(tokens, layer.experts, **place)
    absent = torch.arange(layer.experts, device=random.device) >= slots
    draws = torch.rand(tokens, chosen, **place) < (1 - slots / layer.experts) ** 3
    from_cpu = draws.sum(1, keepdim=True).clamp(chosen - slots, layer.experts - slots)
    ranks = ((scores[:, None] > scores[..., None]) & (absent == absent[:, None])).sum(-1)  # among those of its place
    is_chosen = ranks < torch.where(absent, from_cpu, chosen - from_cpu)
    return scores + is_chosen.float()


def _capture(
    experts: StepExperts, residual: torch.Tensor, norm: torch.Tensor, logits: list[torch.Tensor]
) -> torch.cuda.CUDAGraph:
    """Capture the experts of one layer for each of `logits`, [tokens, experts]."""

    def run() -> None:
        for index, scores in enumerate(logits):
            buffers = experts.cpu_buffers(index, len(residual))
            ordered = experts.ordered_rows(index, residual)
            x = add_rms_norm(residual, norm, 1e-6, copy=experts.input_copy(buffers), ordered=ordered)
            experts.run(index, x, scores, None, buffers=buffers, ordered=ordered)

    run()  # compiles
    torch.cuda.synchronize(residual.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def fastest(relative: dict[float, float]) -> float:
    """The share with the fastest steps; 0 if it gains too little. relative: time by share, divided by the time of steps
    that fetch nothing."""
    best = min(relative, key=relative.__getitem__)
    return best if relative[best] < MIN_GAIN else 0.0


def _compute_seconds(layer: RoutedLayer, tokens: int, before: Callable[[], None], after: Callable[[], None]) -> float:
    """The CPU's time for all experts of the layer on random tokens: the faster of two runs, after a first one that is
    not counted. `before` and `after` are called around each run, outside of its time."""
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


def _copies_to_staging(layer: RoutedLayer, pool: ExpertPool) -> list[Copy]:
    """Copies of the layer's experts to the staging memory, at most MAX_COPIED_BYTES."""
    copies, offset = [], pool.staging_start
    for expert in range(layer.experts):
        for address, size in layer.packed.ranges(expert):
            if offset + size <= len(pool.memory) and offset + size - pool.staging_start <= MAX_COPIED_BYTES:
                copies.append((native.host_bytes(address, size), pool.memory[offset : offset + size]))
                offset += size
    return copies


def _copy_rate(staging_copies: list[Copy], copies: CopyStream) -> float:
    """Bytes per second from packed experts to the device: the faster of two runs."""
    rates = []
    for _ in range(2):
        copies.finish()
        begun = time.perf_counter()
        copies.copy(staging_copies)
        copies.finish()
        rates.append(sum(target.nbytes for _, target in staging_copies) / (time.perf_counter() - begun))
    return max(rates)
