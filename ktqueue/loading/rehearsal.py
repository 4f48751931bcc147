"""Three tokens through a model that runs by transformers' modules: what they cannot do with attention and operators of
ours is found before anything is served, not by the first request."""

import copy
import dataclasses
import math
from collections import Counter
from typing import Any

import torch
from torch import nn

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.inject import inject
from ktqueue.loading.plan import LoadPlan
from ktqueue.loading.skeleton import compute_buffers
from ktqueue.operators.experts import CpuExperts
from ktqueue.operators.kv_cache import KVCache, KVLayout
from ktqueue.operators.linear import CpuLinear
from ktqueue.operators.step import StepContext

_TOKENS, _POSITIONS = (1, 2, 1), (1, 0, 1)
_SAME = (0, 2)  # of these rows the numbers must be the same
_NEAR = {torch.float32: 1e-3}  # of the largest number; of the other types
_NEAR_HALF = 3e-2
_SEED, _STRIDE = 7, 7919
_OWN = 1 << 20  # numbers that a tensor has for itself; those of a larger one share memory


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


class DummyLinear(nn.Module):
    """In the place of an nn.Linear, or of the operator that is to replace it: each row takes one number of the input,
    or its opposite. `read`: whether anybody has asked for the weights, which the operator does not have."""

    def __init__(self, rows: int, columns: int, bias: bool) -> None:
        super().__init__()
        self.out_features = rows
        self.in_features = columns
        self._taken = torch.arange(rows).mul_(_STRIDE).remainder_(columns)
        self._sign = 1.0 - 2.0 * (torch.arange(rows) % 3 == 0)
        self._bias = bias
        self.read = False

    @property
    def weight(self) -> torch.Tensor:
        """[rows, columns]."""
        self.read = True
        return dummy_values(self.out_features, self.in_features)

    @property
    def bias(self) -> torch.Tensor | None:
        """[rows], if there is one."""
        self.read = True
        return dummy_values(self.out_features) if self._bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., columns] -> [..., rows]. Raises ValueError for another width."""
        if x.shape[-1] != self.in_features:
            raise ValueError(f"a product with {self.in_features} columns is given {x.shape[-1]} numbers")
        return x[..., self._taken] * self._sign.to(x.dtype)


class DummyExperts(nn.Module):
    """In the place of CpuExperts."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See CpuExperts. Raises RuntimeError where there are not as many indices as weights, or as tokens."""
        return hidden_states * (top_k_weights * top_k_index).sum(-1, keepdim=True).to(hidden_states.dtype)


def rehearse_without_weights(skeleton: nn.Module, plan: LoadPlan, layout: KVLayout, source: str) -> LoadPlan:
    """Carry out the plan on a copy of the skeleton and rehearse it without weights, on the CPU in float32. The plan
    that remains: a linear module whose weights the model's own code reads is left as it is, since CpuLinear has none.

    A model that becomes one operator, and one with operators that nothing here stands in for, is not rehearsed.
    Raises RuleError where an operator cannot stand in for its module, CheckpointError as `rehearse` does.
    """
    model, operators = inject(copy.deepcopy(skeleton), plan)
    if not all(isinstance(one, CpuLinear | CpuExperts) for one in operators.values()):
        return plan
    linear = _hollow_out(model, skeleton)
    rehearse(model, dataclasses.replace(layout, dtype=torch.float32), source)
    needed = {name for name, module in linear.items() if module.read}
    return dataclasses.replace(plan, replacements=[one for one in plan.replacements if one.name not in needed])


def _hollow_out(model: Any, skeleton: nn.Module) -> dict[str, DummyLinear]:
    """Fill a copy of the skeleton into which operators have been put. Its linear modules, by name."""
    model.set_experts_implementation("eager")  # others ask for more of a tensor's strides
    linear: dict[str, DummyLinear] = {}
    for name, module in [*model.named_modules()]:
        if isinstance(module, CpuLinear) or type(module) is nn.Linear:
            bias = skeleton.get_submodule(name).bias is not None
            linear[name] = DummyLinear(module.out_features, module.in_features, bias)
            _put(model, name, linear[name])
        elif isinstance(module, CpuExperts):
            _put(model, name, DummyExperts())
    for module in model.modules():
        for key, weight in module.named_parameters(recurse=False):
            module._parameters[key] = nn.Parameter(dummy_values(*weight.shape), requires_grad=False)
        for key, buffer in module.named_buffers(recurse=False):
            if key not in module._non_persistent_buffers_set:
                floats = buffer.is_floating_point()
                module._buffers[key] = dummy_values(*buffer.shape) if floats else torch.zeros_like(buffer, device="cpu")
    compute_buffers(model, skeleton, "cpu")
    return linear


def dummy_values(*shape: int) -> torch.Tensor:
    """Numbers that differ along every dimension, the same ones for the same shape; of a large tensor they repeat along
    its diagonals, which takes the memory of its edges."""
    large = math.prod(shape) > _OWN
    numbers = torch.randn(sum(shape) if large else math.prod(shape), generator=torch.Generator().manual_seed(_SEED))
    return numbers.as_strided(shape, (1,) * len(shape)) if large else numbers.view(shape)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
