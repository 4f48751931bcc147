"""A matrix times few rows: the twin is the linear of torch, and the kernel computes the same."""

import pytest
import torch
from torch import nn

from ktqueue.operators.gpu.kernels.linear import few_rows_linear

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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "columns"), [(17, 100), (5, 2100), (4100, 20)])
def test_the_kernel_equals_torch(outputs: int, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(outputs, columns).to(dtype), torch.randn(outputs).to(dtype)
    many = outputs > 1000  # the interpreter takes a second for each thousand outputs
    few = (1,) if dtype is torch.float16 else (4,)
    for tokens in few if many else (1, 3, 4):
        x = torch.randn(tokens, columns + 4).to(dtype)[:, :columns]
        for added in (bias,) if many else (None, bias):
            ours = by_kernel(few_rows_linear, x, weight, added)
            twin = x.float() @ weight.float().T + (0 if added is None else added.float())
            torch.testing.assert_close(ours.float(), twin, rtol=STEP[dtype], atol=1e-4)
        if many:
            continue
        sums = by_kernel(few_rows_linear, x, weight, dtype=torch.float32)
        torch.testing.assert_close(sums, x.float() @ weight.float().T, rtol=1e-5, atol=1e-4)
