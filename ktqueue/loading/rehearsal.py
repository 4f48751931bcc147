"""Two tokens through a model that runs by transformers' modules: what they cannot do with attention and operators of
ours is found before anything is served, not by the first request."""

from collections import Counter

import torch
from torch import nn

from ktqueue.core.errors import CheckpointError
from ktqueue.operators.kv_cache import KVCache, KVLayout
from ktqueue.operators.step import StepContext

_TOKEN, _POSITION = 1, 1
_NEAR = {torch.float32: 1e-3}  # of the largest number; of the other types
_NEAR_HALF = 3e-2


class _Tally:
    """The attention of the step: counts how often each layer attends, and where rows that are to be the same are not.
    Each token sees its own key alone, so what comes of it is the value."""

    def __init__(self) -> None:
        self.layers: Counter[int] = Counter()
        self.differs = False

    def attend(
        self, layer: int, query: torch.Tensor, kv: KVCache, *, scaling: float, sliding_window: int = 0
    ) -> torch.Tensor:
        """See AttentionPlan. Raises ValueError where keys are not as wide as the query."""
        if query.shape[2] != kv.layout.head_dim:
            raise ValueError(f"a query has {query.shape[2]} dimensions, a key of the cache {kv.layout.head_dim}")
        self.layers[layer] += 1
        keys, values = kv.keys[layer][:, 0], kv.values[layer][:, 0]  # a page is a token's
        self.differs |= not all(_alike(states) for states in (query, keys, values))
        return values.repeat_interleave(query.shape[1] // kv.layout.kv_heads, dim=1).to(query.dtype)


def rehearse(module: nn.Module, layout: KVLayout, source: str) -> None:
    """Run a step of two rows over a cache of `layout`, on the device of the module's first parameter: the same token at
    the same position in two sequences.

    Raises CheckpointError where that fails; where a layer does not attend just once: it would keep something else
    between steps, or nothing, or leave in the cache what it had attended to first; and where the rows do not come out
    the same: the model counts positions for itself, or lets one sequence see another.
    """
    name, device = type(module).__name__, next(module.parameters()).device
    token, position = (torch.full((1, 2), one, device=device) for one in (_TOKEN, _POSITION))
    rows = torch.arange(2, device=device)
    tally = _Tally()
    step = StepContext(
        torch.arange(3, dtype=torch.int32, device=device),
        torch.ones(2, dtype=torch.int32, device=device),
        rows[:, None].to(torch.int32),
        rows,
        KVCache(layout, 2, str(device)),
        attention=tally,
    )
    try:
        with torch.inference_mode():
            out = module(input_ids=token, position_ids=position, use_cache=False, logits_to_keep=rows, step=step)
            tally.differs |= not _alike(out.logits[0])
    except Exception as error:  # a model is a program: it can fail in any way
        raise CheckpointError(f"{source}: {name} cannot be run: {type(error).__name__}: {error}") from error
    for layer in range(layout.layers):
        if (times := tally.layers[layer]) != 1:
            raise CheckpointError(
                f"{source}: {name} cannot be run: layer {layer} attends {times} times in a step by transformers' "
                f"attention interface, must be once"
            )
    if tally.differs:
        raise CheckpointError(
            f"{source}: {name} cannot be run: a token's numbers depend on where it stands in a step, must depend on "
            f"its sequence and position alone"
        )


def _alike(rows: torch.Tensor) -> bool:
    """Whether both rows of [2, ...] are the same, up to what the shape of a product does to its rounding."""
    near = _NEAR.get(rows.dtype, _NEAR_HALF)
    one, other = rows.float()
    return torch.allclose(one, other, rtol=0, atol=near * float(one.abs().max()), equal_nan=True)
