"""CpuLinear compared with the nn.Linear that it replaces."""

import pytest
import torch
from own_weights import OwnWeights
from torch import nn

from ktqueue.operators import native
from ktqueue.operators.linear import CpuLinear


def made(given_weights: type[OwnWeights], module: nn.Linear, quant: str = "F32", **options: str) -> CpuLinear:
    operator = CpuLinear.from_module(module, **options)
    weights = given_weights(module, quant)
    operator.load(weights)
    assert not weights.left
    return operator


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(64,), (0, 64), (1, 64), (3, 5, 64)])
def test_the_operator_equals_the_module_that_it_replaces(
    bias: bool, shape: tuple[int, ...], given_weights: type[OwnWeights]
) -> None:
    module = nn.Linear(64, 50, bias=bias)
    x = torch.randn(shape)
    with torch.no_grad():
        torch.testing.assert_close(made(given_weights, module)(x), module(x), rtol=1e-5, atol=1e-6)


def test_quantised_weights_are_near_the_module(given_weights: type[OwnWeights]) -> None:
    module = nn.Linear(96, 40)
    x = torch.randn(7, 96)
    operator = made(given_weights, module, "Q8_0", activations="float32")
    packed = given_weights(module, "Q8_0").matrix("weight")
    twin = torch.from_numpy(native.dequantize("Q8_0", packed.data, 96 * 40)).view(40, 96)
    expected = x @ twin.T + module.bias.detach()
    torch.testing.assert_close(operator(x), expected, rtol=1e-5, atol=1e-6)
    rounded = made(given_weights, module, "Q8_0")(x)
    assert 1e-4 < (rounded - expected).norm() / expected.norm() < 0.02
    assert operator.device_bytes()["cpu"] > 0


def test_the_operator_keeps_the_dtype(given_weights: type[OwnWeights]) -> None:
    operator = made(given_weights, nn.Linear(32, 16))
    x = torch.randn(2, 32).bfloat16()
    assert torch.equal(operator(x), operator(x.float()).bfloat16())


def test_modules_and_weights_that_do_not_fit_are_refused(given_weights: type[OwnWeights]) -> None:
    with pytest.raises(ValueError, match=r"ReLU cannot be replaced by CpuLinear: it is no nn\.Linear"):
        CpuLinear.from_module(nn.ReLU())
    with pytest.raises(ValueError, match="CpuLinear knows no option 'speed'"):
        CpuLinear.from_module(nn.Linear(2, 2), speed=1)
    with pytest.raises(ValueError, match="isa must be a text, got 2"):
        CpuLinear.from_module(nn.Linear(2, 2), isa=2)
    with pytest.raises(ValueError, match=r"weight must be \[16, 32\], got \[8, 32\]"):
        CpuLinear.from_module(nn.Linear(32, 16)).load(given_weights(nn.Linear(32, 8), "F32"))
    with pytest.raises(RuntimeError, match="CpuLinear has no weights yet"):
        CpuLinear.from_module(nn.Linear(32, 16))(torch.zeros(1, 32))
