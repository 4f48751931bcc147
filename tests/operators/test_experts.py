"""CpuExperts compared with the transformers module that it replaces."""

import copy
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from model_types import MakeConfig, MakeModel
from own_weights import OwnWeights
from torch import nn

from ktqueue.operators import reference
from ktqueue.operators.experts import CpuExperts
from ktqueue.operators.packed import Bytes, ExpertWeights


def route(tokens: int, experts: int = 6, slots: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.rand(tokens, experts, generator=generator).topk(slots).indices
    return torch.randn(tokens, 64, generator=generator), ids, torch.rand(tokens, slots, generator=generator)


@pytest.fixture
def module(tiny_model: MakeModel) -> Any:
    return tiny_model().model.layers[0].mlp.experts


@pytest.fixture
def operator(module: Any, given_weights: type[OwnWeights]) -> CpuExperts:
    operator = CpuExperts.from_module(module)
    operator.load(given_weights(module, "F32"))
    return operator


@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
def test_the_operator_equals_the_module_that_it_replaces(tokens: int, module: Any, operator: CpuExperts) -> None:
    x, ids, weights = route(tokens)
    with torch.no_grad():
        torch.testing.assert_close(operator(x, ids, weights), module(x, ids, weights), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q4_0", "Q8_0"])
def test_the_operator_equals_the_twin_on_the_same_packed_weights(
    quant: str, module: Any, given_weights: type[OwnWeights]
) -> None:
    weights_of = given_weights(module, quant)
    operator = CpuExperts.from_module(module, activations="float32")
    operator.load(weights_of)
    packed = weights_of.experts("")

    def exact(name: str, data: Bytes, count: int) -> torch.Tensor:
        return torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[name]).reshape(-1)).double()

    x, ids, weights = route(9)
    expected = reference.experts(x.double(), ids, weights.double(), packed, exact)
    torch.testing.assert_close(operator(x, ids, weights).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", [nn.GELU(), nn.GELU(approximate="tanh")])
def test_the_operator_uses_the_activation_of_its_module(
    activation: nn.Module, module: Any, given_weights: type[OwnWeights]
) -> None:
    module.act_fn = activation
    operator = CpuExperts.from_module(module)
    operator.load(given_weights(module, "F32"))
    x, ids, weights = route(5)
    with torch.no_grad():
        torch.testing.assert_close(operator(x, ids, weights), module(x, ids, weights), rtol=1e-5, atol=1e-6)


def test_the_operator_keeps_the_dtype_and_accepts_the_outputs_of_routers(operator: CpuExperts) -> None:
    x, ids, weights = route(5)
    expected = operator(x.bfloat16().float(), ids, weights.bfloat16().float())
    got = operator(x.bfloat16(), ids.int(), weights.bfloat16())
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, expected.bfloat16())
    assert torch.equal(operator(x.T.contiguous().T, ids, weights), operator(x, ids, weights))
    assert torch.equal(operator(x.requires_grad_(), ids, weights.requires_grad_()), operator(x, ids, weights))


def test_an_operator_is_made_from_a_module_on_the_meta_device(tiny_config: MakeConfig, tiny_model: MakeModel) -> None:
    with torch.device("meta"):
        model = type(tiny_model())(tiny_config())
    operator = CpuExperts.from_module(model.model.layers[0].mlp.experts)
    assert (operator.experts, operator.hidden, operator.intermediate) == (6, 64, 32)
    assert list(operator.parameters()) == []


def test_the_operator_counts_its_bytes(module: Any, operator: CpuExperts) -> None:
    assert operator.device_bytes() == {"cpu": 6 * 3 * 64 * 32 * 4}
    assert CpuExperts.from_module(module).device_bytes() == {"cpu": 0}


def test_the_operator_needs_its_weights(module: Any) -> None:
    with pytest.raises(RuntimeError, match="CpuExperts has no weights yet"):
        CpuExperts.from_module(module)(*route(1))


def test_weights_of_another_shape_are_refused(
    module: Any, given_weights: type[OwnWeights], tiny_model: MakeModel
) -> None:
    biased = copy.copy(module)
    biased.has_bias = True
    with pytest.raises(ValueError, match="biases must be there, but the weights differ"):
        CpuExperts.from_module(biased).load(given_weights(module, "F32"))
    other = given_weights(tiny_model(num_experts=4).model.layers[0].mlp.experts, "F32")
    with pytest.raises(ValueError, match=r"gate must be \[experts, rows, columns\] = \[6, 32, 64\], got \[4, 32, 64\]"):
        CpuExperts.from_module(module).load(other)
    good = given_weights(module, "F32").experts("")
    mixed = ExpertWeights(good.gate, good.up, other.experts("").down)
    weights: Any = SimpleNamespace(experts=lambda name: mixed)
    with pytest.raises(ValueError, match="down must be 6 matrices of 64 x 32, got 4 of 64 x 32"):
        CpuExperts.from_module(module).load(weights)


def test_modules_that_the_kernels_do_not_compute_are_refused(module: Any) -> None:
    with pytest.raises(ValueError, match="CpuExperts knows no option 'speed'; it has: activations, isa"):
        CpuExperts.from_module(module, speed=2)
    with pytest.raises(ValueError, match="activations must be int8 or float32, got 'int4'"):
        CpuExperts.from_module(module, activations="int4")
    with pytest.raises(ValueError, match=r"isa must be one that this CPU has, scalar.*, got 'avx9'"):
        CpuExperts.from_module(module, isa="avx9")
    with pytest.raises(ValueError, match="Linear cannot be replaced by CpuExperts: no down_proj"):
        CpuExperts.from_module(nn.Linear(2, 2))
    for name, value, message in [
        ("has_gate", False, "it has no gate"),
        ("act_fn", nn.Tanh(), "its gate is not silu, gelu, gelu_tanh"),
    ]:
        before = getattr(module, name)
        setattr(module, name, value)
        with pytest.raises(ValueError, match=f"Qwen3MoeExperts cannot be replaced by CpuExperts: .*{message}"):
            CpuExperts.from_module(module)
        setattr(module, name, before)


def test_a_module_with_a_gate_of_its_own_is_refused() -> None:
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

    with torch.device("meta"):
        experts = DeepseekV4Experts(DeepseekV4Config(num_hidden_layers=1))
    with pytest.raises(
        ValueError, match="DeepseekV4Experts cannot be replaced by CpuExperts: its gate is not silu, gelu"
    ):
        CpuExperts.from_module(experts)


def test_an_unknown_expert_id_is_refused(operator: CpuExperts) -> None:
    x, ids, weights = route(3)
    ids[1, 1] = 6
    with pytest.raises(ValueError, match="expert id must be from 0 to 5 or -1 for none, got 6 for token 1"):
        operator(x, ids, weights)
