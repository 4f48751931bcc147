"""Rows of an embedding table: the kernel (interpreted) copies what its twin does."""

import pytest
import torch

from ktqueue.operators.gpu.kernels.take_rows import take_rows

from ..interpreted import by_kernel, by_twin


@pytest.mark.parametrize("columns", [32, 1024, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_the_table(columns: int, dtype: torch.dtype) -> None:
    table = torch.randn(9, columns + 4, generator=torch.Generator().manual_seed(columns)).to(dtype)[:, :columns]
    ids = torch.tensor([8, 0, 3, 3])
    for run in (by_kernel, by_twin):
        assert torch.equal(run(take_rows, table, ids), table[ids])
    assert by_kernel(take_rows, table, ids[:0]).shape == (0, columns)
