"""A model without its weights that runs: transformers' own code over made-up numbers that take next to no memory, so
that what the code does with its modules is known before a weight is read. What comes out means nothing."""

import copy
import dataclasses
import math
from typing import Any

import torch
from torch import nn

from ktqueue.loading.inject import inject
from ktqueue.loading.plan import Plan
from ktqueue.loading.rehearsal import rehearse
from ktqueue.loading.skeleton import compute_buffers
from ktqueue.operators.experts import CpuExperts
from ktqueue.operators.kv_cache import KVLayout
from ktqueue.operators.linear import CpuLinear

_SEED, _STRIDE = 7, 7919
_OWN = 1 << 20  # numbers that a tensor has for itself; those of a larger one share memory


class HollowLinear(nn.Module):
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
        return made_up(self.out_features, self.in_features)

    @property
    def bias(self) -> torch.Tensor | None:
        """[rows], if there is one."""
        self.read = True
        return made_up(self.out_features) if self._bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., columns] -> [..., rows]. Raises ValueError for another width."""
        if x.shape[-1] != self.in_features:
            raise ValueError(f"a product with {self.in_features} columns is given {x.shape[-1]} numbers")
        return x[..., self._taken] * self._sign.to(x.dtype)


class HollowExperts(nn.Module):
    """In the place of CpuExperts."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See CpuExperts. Raises RuntimeError where there are not as many indices as weights, or as tokens."""
        return hidden_states * (top_k_weights * top_k_index).sum(-1, keepdim=True).to(hidden_states.dtype)


def rehearse_hollow(skeleton: nn.Module, plan: Plan, layout: KVLayout, source: str) -> Plan:
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


def _hollow_out(model: Any, skeleton: nn.Module) -> dict[str, HollowLinear]:
    """Fill a copy of the skeleton into which operators have been put. Its linear modules, by name."""
    model.set_experts_implementation("eager")  # others ask for more of a tensor's strides
    linear: dict[str, HollowLinear] = {}
    for name, module in [*model.named_modules()]:
        if isinstance(module, CpuLinear) or type(module) is nn.Linear:
            bias = skeleton.get_submodule(name).bias is not None
            linear[name] = HollowLinear(module.out_features, module.in_features, bias)
            _put(model, name, linear[name])
        elif isinstance(module, CpuExperts):
            _put(model, name, HollowExperts())
    for module in model.modules():
        for key, weight in module.named_parameters(recurse=False):
            module._parameters[key] = nn.Parameter(made_up(*weight.shape), requires_grad=False)
        for key, buffer in module.named_buffers(recurse=False):
            if key not in module._non_persistent_buffers_set:
                floats = buffer.is_floating_point()
                module._buffers[key] = made_up(*buffer.shape) if floats else torch.zeros_like(buffer, device="cpu")
    compute_buffers(model, skeleton, "cpu")
    return linear


def made_up(*shape: int) -> torch.Tensor:
    """Numbers that differ along every dimension, the same ones for the same shape; of a large tensor they repeat along
    its diagonals, which takes the memory of its edges."""
    large = math.prod(shape) > _OWN
    numbers = torch.randn(sum(shape) if large else math.prod(shape), generator=torch.Generator().manual_seed(_SEED))
    return numbers.as_strided(shape, (1,) * len(shape)) if large else numbers.view(shape)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
