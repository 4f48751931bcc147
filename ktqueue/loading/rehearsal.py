"""One token through a model that runs by transformers' modules: what they cannot do with attention and operators of
ours is found before anything is served, not by the first request."""

from collections import Counter

import torch
from torch import nn

from ktqueue.core.errors import CheckpointError
from ktqueue.operators.kv_cache import KVCache, KVLayout
from ktqueue.operators.step import StepContext


class _Tally:
    """The attention of the step: counts how often each layer attends. One key is seen, so what comes of it is of no
    interest."""

    def __init__(self) -> None:
        self.layers: Counter[int] = Counter()

    def attend(
        self, layer: int, query: torch.Tensor, kv: KVCache, *, scaling: float, sliding_window: int = 0
    ) -> torch.Tensor:
        """See AttentionPlan. Raises ValueError where keys are not as wide as the query."""
        if query.shape[2] != kv.layout.head_dim:
            raise ValueError(f"a query has {query.shape[2]} dimensions, a key of the cache {kv.layout.head_dim}")
        self.layers[layer] += 1
        return query.new_zeros(*query.shape[:2], kv.layout.value_dim)


def rehearse(module: nn.Module, layout: KVLayout, source: str) -> None:
    """Run a step of one token over a cache of `layout`, on the device of the module's first parameter.

    Raises CheckpointError where that fails, and where a layer does not attend just once: it would keep something else
    between steps, or nothing, or leave in the cache what it had attended to first.
    """
    name, device = type(module).__name__, next(module.parameters()).device
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    tally = _Tally()
    step = StepContext(
        torch.tensor([0, 1], dtype=torch.int32, device=device),
        torch.ones(1, dtype=torch.int32, device=device),
        torch.zeros(1, 1, dtype=torch.int32, device=device),
        zero,
        KVCache(layout, 1, str(device)),
        attention=tally,
    )
    try:
        with torch.inference_mode():
            module(input_ids=zero[None], position_ids=zero[None], use_cache=False, logits_to_keep=zero, step=step)
    except Exception as error:  # a model is a program: it can fail in any way
        raise CheckpointError(f"{source}: {name} cannot be run: {type(error).__name__}: {error}") from error
    for layer in range(layout.layers):
        if (times := tally.layers[layer]) != 1:
            raise CheckpointError(
                f"{source}: {name} cannot be run: layer {layer} attends {times} times in a step by transformers' "
                f"attention interface, must be once"
            )
