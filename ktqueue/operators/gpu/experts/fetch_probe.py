"""Which share of the experts that a short step uses comes to the GPU fastest here, tried before the first step."""

import logging
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from ktqueue.operators.gpu.experts.fetching import FetchedShares
from ktqueue.operators.gpu.experts.step import RoutedLayer, StepExperts
from ktqueue.operators.gpu.kernels.fused import add_rms_norm
from ktqueue.operators.gpu.turns import take_turns

logger = logging.getLogger(__name__)

SHARES = (0.0, 0.125, 0.1875, 0.25, 0.3125, 0.375, 0.4375, 0.5)
TOKENS = 8  # for all steps of several tokens: the best share is the same from 2 to 64
LAYERS = 16  # that are run one after the other: more than a cache holds
ROUNDS = 5
WORTH = 0.97  # of what steps take without: a share that comes no nearer is left


def measure_shares(
    step: Callable[[float], StepExperts],
    layers: Sequence[RoutedLayer],
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
    max_tokens: int,
) -> FetchedShares:
    """The shares with the fastest steps of one token and of several (`max_tokens` at most) of random routing; 0 where
    none is worth it, and on a CPU.

    `step(share)`: the experts of a step that fetches so much. Steps are captured, as those of decode are: launched one
    by one they would take what their launches take.
    """
    if device.type == "cpu":
        return FetchedShares(0.0, 0.0)
    chosen = []
    for tokens in (1, min(TOKENS, max_tokens)):
        with torch.inference_mode():
            relative = _relative_seconds(step, layers, hidden, dtype, device, tokens)
        share = fastest(relative)
        told = ", ".join(f"{one:g}: {seconds:.2f}" for one, seconds in relative.items())
        logger.info("steps of %d tokens fetch %g of the absent experts; time by share: %s", tokens, share, told)
        chosen.append(share)
    return FetchedShares(*chosen)


def fastest(relative: dict[float, float]) -> float:
    """The share whose steps take least; 0 where none is worth it. relative: what they take, beside those that fetch
    nothing."""
    best = min(relative, key=relative.__getitem__)
    return best if relative[best] < WORTH else 0.0


def _relative_seconds(
    step: Callable[[float], StepExperts],
    layers: Sequence[RoutedLayer],
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
    tokens: int,
) -> dict[float, float]:
    """By share: what a step takes, beside one that fetches nothing. All take turns, since other processes take memory
    bandwidth now and then."""
    random = torch.Generator(device).manual_seed(tokens)
    residual = torch.randn(tokens, hidden, generator=random, device=device).to(dtype)
    norm = torch.ones(hidden, dtype=dtype, device=device)
    used = layers[:LAYERS]
    logits = [torch.randn(tokens, layer.experts, generator=random, device=device) for layer in used]

    def run(experts: StepExperts) -> None:
        for index, scores in enumerate(logits):
            buffers = experts.buffers(index, tokens)
            x = add_rms_norm(residual, norm, 1e-6, copy=buffers.x if buffers else None)
            take_turns([experts.run(index, x, scores, None, None, buffers)])

    def captured(share: float) -> torch.cuda.CUDAGraph:
        experts = step(share)
        run(experts)  # compiles
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(experts)
        return graph

    graphs = {share: captured(share) for share in SHARES}
    taken: dict[float, list[float]] = {share: [] for share in SHARES}
    for _ in range(ROUNDS):
        for share, graph in graphs.items():
            begun = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize(device)
            taken[share].append(time.perf_counter() - begun)
    return {share: median(times) / median(taken[0.0]) for share, times in taken.items()}
