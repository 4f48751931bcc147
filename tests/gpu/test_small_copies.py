"""Small copies between pinned memory and a GPU, by a kernel, and rows of a table: what one has, the other gets."""

import numpy as np
import pytest
import torch

from ktqueue.operators.gpu.kernels.copy_words import MOST_BYTES, copy_words
from ktqueue.operators.gpu.kernels.take_rows import send_rows, take_rows
from ktqueue.operators.gpu.staging import FixedStaging, ResultFetcher

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


@pytest.mark.parametrize("size", [1, 513, MOST_BYTES // 8, MOST_BYTES // 8 + 1])
def test_words_arrive_in_both_directions(size: int) -> None:
    source = (torch.arange(size) * 0x123456789).pin_memory()
    there, back = torch.zeros(size, dtype=torch.int64, device="cuda"), torch.zeros(size, dtype=torch.int64).pin_memory()
    copy_words(source, there)
    copy_words(there, back)
    torch.cuda.synchronize()
    assert torch.equal(there.cpu(), source) and torch.equal(back, source)


def test_each_step_reads_what_was_written_for_it() -> None:
    """The host writes again as soon as it may, and each sum is that of its own step."""
    staging = FixedStaging({"a": ((3,), np.int64), "b": ((5000,), np.int32)}, "cuda")
    sums = []
    for step in range(200):
        arrays = staging.open()
        arrays["a"][:], arrays["b"][:] = step, 2 * step
        staging.send()
        sums.append(staging.device["a"].sum() + staging.device["b"].sum())
    assert [int(one) for one in sums] == [10_003 * step for step in range(200)]


def test_results_are_fetched_behind_the_kernels_before() -> None:
    fetcher, x = ResultFetcher("cuda"), torch.zeros(64, dtype=torch.int64, device="cuda")
    for step in range(100):
        x.fill_(step)
        assert fetcher.fetch(x, lambda: None).tolist() == [step] * 64


@pytest.mark.parametrize("columns", [1, 2048, 7168])
def test_rows_are_those_of_the_table(columns: int) -> None:
    table = torch.randn(1000, columns, device="cuda").bfloat16()
    ids = torch.randint(0, 1000, (37,), device="cuda")
    assert torch.equal(take_rows(table, ids), table[ids])


@pytest.mark.parametrize("columns", [1, 2048, 7168])
def test_rows_with_an_absent_expert_reach_the_host(columns: int) -> None:
    x = torch.randn(37, columns, device="cuda").bfloat16()
    offsets = torch.where(torch.arange(64, device="cuda") % 9 == 0, -1, 7)
    ids = torch.randint(-1, 64, (37, 8), device="cuda")
    out = torch.full((37, columns), 7.0).pin_memory()
    sent = send_rows(x, ids, offsets, out)
    torch.cuda.synchronize()
    assert sent.tolist() == ((ids >= 0) & (ids % 9 == 0)).any(1).int().tolist()
    assert torch.equal(out, torch.where(sent[:, None] > 0, x.float(), 7.0).cpu())
