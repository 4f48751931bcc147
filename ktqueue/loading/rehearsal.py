"""Three tokens through a model that runs by transformers' modules: what they cannot do with attention and operators of
ours is found before anything is served, not by the first request."""

from collections import Counter

import torch
from torch import nn

from ktqueue.core.errors import CheckpointError
from ktqueue.operators.kv_cache import KVCache, KVLayout
from ktqueue.operators.step import StepContext

_TOKENS, _POSITIONS = (1, 2, 1), (1, 0, 1)
_SAME = (0, 2)  # of these rows the numbers must be the same
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
        self.differs |= not all(_alike(states[[*_SAME]]) for states in (query, keys, values))
        return values.repeat_interleave(query.shape[1] // kv.layout.kv_heads, dim=1).to(query.dtype)


def rehearse(module: nn.Module, layout: KVLayout, source: str) -> None:
    """Run a step of three rows over a cache of `layout`, on the device of the module's first parameter: the same token
    at the same position in two sequences, and between them another. The logits of the two are asked for.

    Raises CheckpointError where that fails; where a layer does not attend just once: it would keep something else
    between steps, or nothing, or leave in the cache what it had attended to first; and where the two rows do not come
    out the same: the model counts positions for itself, or lets one sequence see another.
    """
    name, device = type(module).__name__, next(module.parameters()).device
    tokens, positions = (torch.tensor([one], device=device) for one in (_TOKENS, _POSITIONS))
    rows = torch.arange(len(_TOKENS), device=device)
    same = torch.tensor(_SAME, device=device)
    tally = _Tally()
    step = StepContext(
        torch.arange(len(_TOKENS) + 1, dtype=torch.int32, device=device),
        torch.ones(len(_TOKENS), dtype=torch.int32, device=device),
        rows[:, None].to(torch.int32),
        rows,
        KVCache(layout, len(_TOKENS), str(device)),
        attention=tally,
    )
    try:
        with torch.inference_mode():
            out = module(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=same, step=step)
            logits = out.logits[0]
            if len(logits) != len(same):
                raise ValueError(f"{len(same)} rows of logits are asked for, it gives {len(logits)}")
            tally.differs |= not _alike(logits)
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
