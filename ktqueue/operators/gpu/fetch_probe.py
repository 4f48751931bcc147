"""Which share of the experts that a short step uses comes to the GPU fastest here, tried before the first step."""

import time
from collections.abc import Callable, Sequence

import torch

from ktqueue.operators.gpu.hybrid_experts import RoutedLayer, StepExperts

SHARES = (0.0, 0.125, 0.1875, 0.25, 0.3125, 0.375, 0.4375, 0.5, 0.625)
TOKENS = 8  # enough experts for a share to be what it says, few enough to be bound by memory
LAYERS = 16  # that are run one after the other: more than a cache holds
ROUNDS = 3
WORTH = 0.97  # of what a step takes without: one that comes no nearer is left


def measure_share(
    step: Callable[[float], StepExperts],
    layers: Sequence[RoutedLayer],
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
    max_tokens: int,
) -> float:
    """The share with the fastest steps of TOKENS tokens (`max_tokens` at most) of random routing; 0 where none is worth
    it, and on a CPU.

    `step(share)`: the experts of a step that fetches so much.
    """
    if device.type == "cpu":
        return 0.0
    random = torch.Generator(device).manual_seed(1)
    count, tokens = min(LAYERS, len(layers)), min(TOKENS, max_tokens)
    x = torch.randn(tokens, hidden, generator=random, device=device).to(dtype)
    logits = [torch.randn(tokens, layers[index].experts, generator=random, device=device) for index in range(count)]

    def seconds(share: float) -> float:
        experts = step(share)
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        for index in range(count):
            buffers = experts.buffers(index, tokens)
            if buffers is not None:
                buffers.x.copy_(x)
            experts.run(index, x, logits[index], None, None, buffers)
        torch.cuda.synchronize(device)
        return time.perf_counter() - begun

    with torch.inference_mode():
        for share in SHARES[:2]:  # kernels are compiled
            seconds(share)
        taken = {share: min(seconds(share) for _ in range(ROUNDS)) for share in SHARES}
    best = min(taken, key=taken.__getitem__)
    return best if taken[best] < WORTH * taken[0.0] else 0.0
