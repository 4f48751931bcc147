"""Rows of a table, and rows for the CPU: the kernels (interpreted) copy what their twins do."""

import pytest
import torch

from ktqueue.operators.gpu.kernels.take_rows import send_rows, take_rows

from ..interpreted import by_kernel, by_twin


@pytest.mark.parametrize("columns", [32, 1024, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_the_table(columns: int, dtype: torch.dtype) -> None:
    table = torch.randn(9, columns + 4, generator=torch.Generator().manual_seed(columns)).to(dtype)[:, :columns]
    ids = torch.tensor([8, 0, 3, 3])
    for run in (by_kernel, by_twin):
        assert torch.equal(run(take_rows, table, ids), table[ids])
    assert by_kernel(take_rows, table, ids[:0]).shape == (0, columns)


@pytest.mark.parametrize("columns", [32, 1024, 1500])
@pytest.mark.parametrize("chosen", [1, 3])
def test_rows_with_an_absent_expert_are_sent(columns: int, chosen: int) -> None:
    x = torch.randn(6, columns, generator=torch.Generator().manual_seed(columns)).bfloat16()
    offsets = torch.tensor([0, -1, 640, -1])
    ids = torch.tensor([[0, 2, 0], [1, 0, 2], [-1, -1, -1], [3, 1, 0], [2, 0, -1], [3, -1, -1]])[
        :, :chosen
    ].contiguous()
    for run in (by_kernel, by_twin):
        out = torch.full((6, columns), 7.0)
        sent = run(send_rows, x, ids, offsets, out)
        assert sent.tolist() == [0, 1, 0, 1, 0, 1]
        assert torch.equal(out, torch.where(sent[:, None] > 0, x.float(), 7.0))
    assert len(by_kernel(send_rows, x[:0], ids[:0], offsets, x[:0].float())) == 0
