"""One token through a model that runs by transformers' modules: what they cannot do with attention and operators of
ours is found before anything is served, not by the first request."""

import torch
from torch import nn

from ktqueue.core.errors import CheckpointError
from ktqueue.operators.kv_cache import KVCache, KVLayout
from ktqueue.operators.step import StepContext


def rehearse(module: nn.Module, layout: KVLayout, source: str) -> None:
    """Run a step of one token on the CPU, over a cache of `layout`. Raises CheckpointError where that fails."""
    zero = torch.zeros(1, dtype=torch.int64)
    step = StepContext(
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([1], dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32),
        zero,
        KVCache(layout, 1),
    )
    try:
        with torch.inference_mode():
            module(input_ids=zero[None], position_ids=zero[None], use_cache=False, logits_to_keep=zero, step=step)
    except Exception as error:  # a model is a program: it can fail in any way
        name = type(module).__name__
        raise CheckpointError(f"{source}: {name} cannot be run: {type(error).__name__}: {error}") from error
