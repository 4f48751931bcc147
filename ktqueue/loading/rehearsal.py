"""Runs three tokens through a model that is made of transformers' modules, before anything is served.

So a module that does not work with our attention and operators is found at load, not by the first request. A rehearsal
without weights uses dummy values, which take almost no memory; its output has no meaning.
"""

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
from ktqueue.operators.step import ScoreOptions, StepContext

_TOKENS, _POSITIONS = (1, 2, 1), (1, 0, 1)
_EQUAL_ROWS = (0, 2)
_TOLERANCES = {torch.float32: 1e-3}  # relative to the largest number
_HALF_TOLERANCE = 3e-2  # of bfloat16 and float16, and where operators round activations to int8
_SEED, _STRIDE = 7, 7919
_MAX_DISTINCT = 1 << 20  # the numbers of a larger tensor share memory


class _RecordingAttention:
    """The attention of the rehearsed step.

    It counts how often each layer attends, and notes whether rows differ that must be equal. Each token sees only its
    own key, so the result is the token's value.
    """

    def __init__(self, *, is_rounded: bool) -> None:
        self.layers: Counter[int] = Counter()
        self.differs = False
        self._is_rounded = is_rounded

    def attend(self, layer: int, query: torch.Tensor, kv: KVCache, options: ScoreOptions) -> torch.Tensor:
        """See AttentionPlan. Raises ValueError if keys and queries differ in width."""
        heads = kv.layout.heads[layer]
        if query.shape[2] != heads.head_dim:
            raise ValueError(f"a query has {query.shape[2]} dimensions, a key of the cache {heads.head_dim}")
        self.layers[layer] += 1
        keys, values = kv.keys[layer][:, 0], kv.values[layer][:, 0]  # one token per page
        for states in (query, keys, values):
            self.compare(states[[*_EQUAL_ROWS]])
        return values.repeat_interleave(query.shape[1] // heads.kv_heads, dim=1).to(query.dtype)

    def compare(self, rows: torch.Tensor) -> None:
        """Note whether two rows, [2, ...], differ by more than rounding, which depends on the shape of a product."""
        tolerance = _HALF_TOLERANCE if self._is_rounded else _TOLERANCES.get(rows.dtype, _HALF_TOLERANCE)
        first, second = rows.float()
        bound = tolerance * float(first.abs().max())
        self.differs |= not torch.allclose(first, second, rtol=0, atol=bound, equal_nan=True)


def rehearse(module: nn.Module, layout: KVLayout, source: str, *, is_rounded: bool = False) -> None:
    """Run one step of three rows on the device of the module's first parameter.

    Two rows have the same token at the same position in different sequences; the row between them has another token.
    The logits of the two are requested. `is_rounded`: operators round activations to int8, which makes more of a small
    difference. Raises CheckpointError

    - if that fails,
    - if a layer does not attend exactly once: it would keep something else between steps, or nothing, or leave in the
      cache what it attended to first,
    - if the two rows differ: the model counts positions by itself, or lets one sequence see another.
    """
    name, device = type(module).__name__, next(module.parameters()).device
    tokens, positions = (torch.tensor([values], device=device) for values in (_TOKENS, _POSITIONS))
    rows = torch.arange(len(_TOKENS), device=device)
    equal_rows = torch.tensor(_EQUAL_ROWS, device=device)
    recorder = _RecordingAttention(is_rounded=is_rounded)
    step = StepContext(
        torch.arange(len(_TOKENS) + 1, dtype=torch.int32, device=device),
        torch.ones(len(_TOKENS), dtype=torch.int32, device=device),
        rows[:, None].to(torch.int32),
        rows,
        KVCache(layout, len(_TOKENS), str(device)),
        attention=recorder,
    )
    try:
        with torch.inference_mode():
            out = module(
                input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=equal_rows, step=step
            )
            logits = out.logits[0]
            if len(logits) != len(equal_rows):
                raise ValueError(f"{len(equal_rows)} rows of logits were requested, got {len(logits)}")
            recorder.compare(logits)
    except Exception as error:  # a model is a program and can fail in any way
        raise CheckpointError(f"{source}: {name} cannot be run: {type(error).__name__}: {error}") from error
    for layer in range(layout.layers):
        if (times := recorder.layers[layer]) != 1:
            raise CheckpointError(
                f"{source}: {name} cannot be run: layer {layer} attends {times} times per step through transformers' "
                f"attention interface, but must attend once"
            )
    if recorder.differs:
        raise CheckpointError(
            f"{source}: {name} cannot be run: the numbers of a token depend on its row in the step, but must depend "
            f"only on its sequence and position"
        )


class DummyLinear(nn.Module):
    """Stands in for an nn.Linear, or for the operator that will replace it.

    Each output is one number of the input or its negative. `weights_read` is True once code has read the weights, which
    the operator does not have.
    """

    def __init__(self, rows: int, columns: int, bias: bool) -> None:
        super().__init__()
        self.out_features = rows
        self.in_features = columns
        self._columns = torch.arange(rows).mul_(_STRIDE).remainder_(columns)
        self._sign = 1.0 - 2.0 * (torch.arange(rows) % 3 == 0)
        self._bias = bias
        self.weights_read = False

    @property
    def weight(self) -> torch.Tensor:
        """[rows, columns]."""
        self.weights_read = True
        return dummy_values(self.out_features, self.in_features)

    @property
    def bias(self) -> torch.Tensor | None:
        """[rows], if there is one."""
        self.weights_read = True
        return dummy_values(self.out_features) if self._bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., columns] -> [..., rows]. Raises ValueError for another width."""
        if x.shape[-1] != self.in_features:
            raise ValueError(f"expected {self.in_features} columns, got {x.shape[-1]}")
        return x[..., self._columns] * self._sign.to(x.dtype)


class DummyExperts(nn.Module):
    """Stands in for CpuExperts."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See CpuExperts. Raises RuntimeError if the numbers of indices, weights and tokens do not agree."""
        return hidden_states * (top_k_weights * top_k_index).sum(-1, keepdim=True).to(hidden_states.dtype)


def rehearse_without_weights(skeleton: nn.Module, plan: LoadPlan, layout: KVLayout, source: str) -> LoadPlan:
    """Carry out the plan on a copy of the skeleton and rehearse it without weights, on the CPU in float32.

    Returns the plan without the linear modules whose weights are read by the model's own code: CpuLinear has no weights
    to read, so these modules stay as they are. A model that becomes one operator, and a model with operators that have
    no dummy here, is not rehearsed. Raises RuleError if an operator cannot replace its module, CheckpointError like
    `rehearse`.
    """
    model, operators = inject(copy.deepcopy(skeleton), plan)
    if not all(isinstance(operator, CpuLinear | CpuExperts) for operator in operators.values()):
        return plan
    linear = _fill_with_dummies(model, skeleton)
    rehearse(model, dataclasses.replace(layout, dtype=torch.float32), source)
    kept = {name for name, module in linear.items() if module.weights_read}
    return dataclasses.replace(plan, replacements=[item for item in plan.replacements if item.name not in kept])


def _fill_with_dummies(model: Any, skeleton: nn.Module) -> dict[str, DummyLinear]:
    """Fill a copy of the skeleton that holds operators. Returns its linear modules by name."""
    model.set_experts_implementation("eager")  # other implementations need particular strides
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
    """Return numbers that differ along every dimension, always the same for one shape.

    In a large tensor they repeat along its diagonals, so it takes only the memory of its edges.
    """
    is_large = math.prod(shape) > _MAX_DISTINCT
    numbers = torch.randn(sum(shape) if is_large else math.prod(shape), generator=torch.Generator().manual_seed(_SEED))
    return numbers.as_strided(shape, (1,) * len(shape)) if is_large else numbers.view(shape)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
