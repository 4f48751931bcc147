"""The activation of a dense MLP: the twin computes what transformers does, the kernel what the twin does."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
)
from transformers.models.llama.modeling_llama import LlamaMLP

from ktqueue.operators.gpu.kernels.activation import gated

from ..interpreted import by_kernel
from .comparing import DTYPES, config_sizes


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ours", "theirs"), [("silu", "silu"), ("gelu", "gelu"), ("gelu_tanh", "gelu_pytorch_tanh")])
def test_gates_are_those_of_transformers(ours: Any, theirs: str, dtype: torch.dtype) -> None:
    mlp: Any = LlamaMLP(LlamaConfig(**config_sizes(hidden_act=theirs))).to(dtype)  # type: ignore[no-untyped-call]
    mlp.down_proj = nn.Identity()
    x = torch.randn(5, 48).to(dtype)
    gate_up = torch.cat((mlp.gate_proj(x), mlp.up_proj(x)), -1).data
    torch.testing.assert_close(gated(ours, gate_up), mlp(x).data)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_the_kernel_equals_its_twin(activation: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for tokens, intermediate in ((2, 30), (1, 1100)):
        gate_up = (torch.randn(tokens, 2 * intermediate) * 3).to(dtype)
        ours = by_kernel(gated, activation, gate_up)
        twin = gated(activation, gate_up.float())
        torch.testing.assert_close(ours.float(), twin, rtol=1e-5 if dtype == torch.float32 else 2**-6, atol=1e-5)
