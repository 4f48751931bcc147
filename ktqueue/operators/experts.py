"""CpuExperts: the routed experts of one layer, computed by the compiled kernels on their quantised weights.

It replaces any experts module of transformers whose gate the kernels compute. Knows no file.
"""

import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from ktqueue.operators import native
from ktqueue.operators.base import KernelOptions, Operator, kernel_options
from ktqueue.operators.native import SILU, GateFacts
from ktqueue.operators.packed import ExpertWeights, ModuleWeights, PackedExperts

__all__ = ["CpuExperts", "ExpertWeights", "PackedExperts"]


_ACTIVATIONS: dict[native.ActivationName, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
}


def activation_name(function: Callable[[torch.Tensor], torch.Tensor] | None) -> native.ActivationName | None:
    """Return the kernels' name of a module's activation, found by evaluating it, or None if no kernel computes it."""
    probe = torch.linspace(-4.0, 4.0, 9, device="cpu")
    for name, known in _ACTIVATIONS.items():
        if function is not None and torch.allclose(function(probe), known(probe), rtol=0, atol=1e-6):
            return name
    return None


def known_activations() -> str:
    """Return the names of the kernels' activations, for messages."""
    return ", ".join((*_ACTIVATIONS, "gpt-oss's clamped SwiGLU", "Step-3.5's limited SiLU"))


def gate_facts(module: Any) -> GateFacts | None:
    """Return how an MLP or an experts module of transformers joins gate and up; None if no kernel computes it."""
    if type(module).__name__ == "GptOssExperts":
        return GateFacts("swiglu_clamped", float(module.alpha), float(module.limit))
    if type(module).__name__ in ("Step3p7MLP", "Step3p7Experts") and activation_name(module.act_fn) == "silu":
        return SILU if math.isinf(module.limit) else GateFacts("silu_limited", limit=float(module.limit))
    gate = getattr(type(module), "_apply_gate", None)
    if gate is not None and gate.__name__ != "_default_apply_gate":
        return None
    activation = activation_name(getattr(module, "act_fn", getattr(module, "activation_fn", None)))
    return None if activation is None else GateFacts(activation)


class CpuExperts(Operator):
    """Called like the module it replaces: (hidden_states, top_k_index, top_k_weights) -> hidden states.

    Weights are packed when they are loaded. native.ExpertLayer says in which type activations are multiplied.
    """

    any_device = True

    def __init__(
        self, experts: int, hidden: int, intermediate: int, *, gate: GateFacts, biased: bool, options: KernelOptions
    ) -> None:
        super().__init__()
        self.experts = experts
        self.hidden = hidden
        self.intermediate = intermediate
        self._gate = gate
        self._biased = biased
        self._options = options
        self._layer: native.ExpertLayer | None = None

    @classmethod
    def from_module(cls, module: nn.Module, **options: Any) -> Self:
        """Take the shapes from the module's `down_proj` [experts, hidden, intermediate]. Options: `activations`, `isa`.

        Raises ValueError with the reason if the kernels do not compute this module: another activation, another gate or
        none.
        """
        chosen = kernel_options("CpuExperts", options)
        name = type(module).__name__
        down = getattr(module, "down_proj", None)
        if not isinstance(down, torch.Tensor) or down.dim() != 3:
            raise ValueError(f"{name} cannot be replaced by CpuExperts: no down_proj of three dimensions")
        if not getattr(module, "has_gate", True):
            raise ValueError(f"{name} cannot be replaced by CpuExperts: it has no gate")
        gate = gate_facts(module)
        if gate is None:
            raise ValueError(f"{name} cannot be replaced by CpuExperts: its gate is not {known_activations()}")
        experts, rows, columns = down.shape
        hidden, intermediate = (columns, rows) if getattr(module, "is_transposed", False) else (rows, columns)
        return cls(experts, hidden, intermediate, gate=gate, biased=getattr(module, "has_bias", False), options=chosen)

    def load(self, weights: ModuleWeights) -> None:
        """Pack the weights of this layer. Raises ValueError if they do not fit."""
        experts = weights.experts("")
        wanted = (self.experts, self.intermediate, self.hidden)
        got = (len(experts.gate.data), experts.gate.rows, experts.gate.columns)
        if got != wanted:
            raise ValueError(f"gate must be [experts, rows, columns] = {list(wanted)}, got {list(got)}")
        if self._biased is not (experts.down.bias is not None):
            raise ValueError(f"biases must be {'there' if self._biased else 'absent'}, but the weights differ")
        self._layer = native.ExpertLayer(experts, self._gate, **self._options)

    def device_bytes(self) -> dict[str, int]:
        """Bytes of packed weights."""
        return {"cpu": 0 if self._layer is None else self._layer.bytes}

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [tokens, hidden], top_k_index and top_k_weights [tokens, k] -> [tokens, hidden], same dtype.

        Tensors on a GPU are copied to the host and back, and the host waits for both copies. Raises ValueError for an
        expert id out of range, and RuntimeError before `load`.
        """
        if self._layer is None:
            raise RuntimeError("CpuExperts has no weights yet")
        source = hidden_states.to("cpu", torch.float32).contiguous()
        out = torch.empty_like(source, requires_grad=False)
        self._layer.forward(
            native.as_array(source),
            native.as_array(top_k_index.to("cpu", torch.int64).contiguous()),
            native.as_array(top_k_weights.to("cpu", torch.float32).contiguous()),
            out.numpy(),
        )
        return out.to(hidden_states)
