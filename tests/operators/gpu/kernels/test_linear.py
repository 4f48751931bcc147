"""A matrix times few rows: the twin is the linear of torch, and the kernel computes the same."""

import pytest
import torch
from torch import nn

from ktqueue.operators.gpu.kernels import linear
from ktqueue.operators.gpu.kernels.activation import gated
from ktqueue.operators.gpu.kernels.linear import few_rows_gated, few_rows_linear
from ktqueue.operators.gpu.kernels.norm import RmsNorm, add_rms_norm
from ktqueue.operators.native import ActivationName

from ..interpreted import by_kernel
from .comparing import STEP


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_few_rows_are_multiplied_as_torch_does() -> None:
    x, weight, bias = torch.randn(3, 48), torch.randn(7, 48), torch.randn(7)
    assert torch.equal(few_rows_linear(x, weight, bias), nn.functional.linear(x, weight, bias))
    x, weight = x.bfloat16(), weight.bfloat16()
    sums = few_rows_linear(x, weight, dtype=torch.float32)
    assert torch.equal(sums, x.float() @ weight.float().T)
    assert not torch.equal(sums, few_rows_linear(x, weight).float())


# 8 outputs in a program need 4,096 on a GPU. With two programs as the least, 17 outputs take the same path: whole
# programs and a last one that is mostly outside. The interpreter takes a second for 512 programs.
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "columns", "programs"), [(17, 100, 512), (5, 2100, 512), (17, 20, 2)])
def test_the_kernel_equals_torch(
    outputs: int, columns: int, programs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_PROGRAMS", programs)
    torch.manual_seed(0)
    weight, bias = torch.randn(outputs, columns).to(dtype), torch.randn(outputs).to(dtype)
    for tokens in (1, 3, 4):
        x = torch.randn(tokens, columns + 4).to(dtype)[:, :columns]
        for added in (None, bias):
            ours = by_kernel(few_rows_linear, x, weight, added)
            twin = x.float() @ weight.float().T + (0 if added is None else added.float())
            torch.testing.assert_close(ours.float(), twin, rtol=STEP[dtype], atol=1e-4)
        sums = by_kernel(few_rows_linear, x, weight, dtype=torch.float32)
        torch.testing.assert_close(sums, x.float() @ weight.float().T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "columns"), [(17, 100), (5, 2100)])
def test_a_norm_before_and_a_sum_behind_are_part_of_the_launch(
    outputs: int, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row is normed whole, also where weights come in several steps. Sums are rounded as by launches of their own.
    A program has several outputs, the last one fewer."""
    monkeypatch.setattr(linear, "_PROGRAMS", 1)
    weight, factors = (torch.randn(outputs, columns) / columns**0.5).to(dtype), torch.rand(columns)
    for tokens in (1, 3, 4):
        x = torch.randn(tokens, columns).to(dtype)
        for norm in (RmsNorm(factors, 1e-5), RmsNorm(factors.to(dtype), 1e-5)):
            ours = by_kernel(few_rows_linear, x, weight, norm=norm, dtype=torch.float32)
            twin = few_rows_linear(x, weight, norm=norm, dtype=torch.float32)
            assert torch.equal(twin, few_rows_linear(add_rms_norm(x, *norm), weight, dtype=torch.float32))
            torch.testing.assert_close(ours, twin, rtol=1e-2, atol=STEP[dtype])
        before = torch.randn(tokens, outputs).to(dtype)
        product, ours, twin = by_kernel(few_rows_linear, x, weight), before.clone(), before.clone()
        assert by_kernel(few_rows_linear, x, weight, added_to=ours) is ours
        assert torch.equal(ours, (before.float() + product.float()).to(dtype))
        assert few_rows_linear(x, weight, added_to=twin) is twin
        assert torch.equal(twin, (before.float() + few_rows_linear(x, weight).float()).to(dtype))


def test_one_row_has_the_bits_of_a_row_among_others() -> None:
    """Its weights come in three steps, of which two are requested at once."""
    x, weight, before = torch.randn(2, 4500).bfloat16(), torch.randn(5, 4500).bfloat16(), torch.randn(2, 5).bfloat16()
    bias, norm = weight[:, 0].contiguous(), RmsNorm(torch.rand(4500).bfloat16(), 1e-6)
    for options in ({"bias": bias}, {"norm": norm}):
        both = by_kernel(few_rows_linear, x, weight, **options)
        assert torch.equal(by_kernel(few_rows_linear, x[:1], weight, **options), both[:1])
    both = by_kernel(few_rows_linear, x, weight, added_to=before.clone())
    assert torch.equal(by_kernel(few_rows_linear, x[:1], weight, added_to=before[:1].clone()), both[:1])


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("intermediate", "columns", "programs"), [(9, 100, 512), (3, 2100, 512), (9, 20, 2)])
def test_gate_and_up_are_joined_in_their_product(
    intermediate: int,
    columns: int,
    programs: int,
    dtype: torch.dtype,
    activation: ActivationName,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The twin is the activation behind the product, also for more rows and for float32."""
    monkeypatch.setattr(linear, "_PROGRAMS", programs)
    weight = (torch.randn(2 * intermediate, columns) / columns**0.5).to(dtype)
    for tokens in (1, 3, 4):
        x = torch.randn(tokens, columns + 4).to(dtype)[:, :columns]
        ours = by_kernel(few_rows_gated, activation, x, weight)
        product = (x.float() @ weight.float().T).to(dtype)
        torch.testing.assert_close(ours.float(), gated(activation, product).float(), rtol=2 * STEP[dtype], atol=2e-2)
        assert (ours == gated(activation, product)).float().mean() > 0.9
    x = torch.randn(5, columns)
    assert torch.equal(few_rows_gated(activation, x, weight.float()), gated(activation, x @ weight.float().T))
