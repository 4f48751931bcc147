"""The most likely token of each row: the kernel's choice is torch's, also of equal, infinite and missing numbers."""

import pytest
import torch

from ktqueue.operators.gpu.kernels.greedy import greedy

from ..interpreted import by_kernel, by_twin


def odd_rows(vocab: int) -> torch.Tensor:
    """Rows [12, vocab], most of which are not finite or have equal logits. One begins with -0, which equals 0."""
    rows = torch.randn(12, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    rows[1] = rows[1].round()
    rows[2] = 0.0
    rows[2, 0] = -0.0
    rows[3, 2::3] = torch.nan
    rows[4, 1], rows[4, 5:] = torch.inf, torch.inf
    rows[5] = -torch.inf
    rows[6, : vocab - 1] = -torch.inf
    rows[7, vocab - 1] = -torch.nan
    rows[8, 3], rows[8, 4] = torch.inf, torch.nan
    rows[9] = -rows[9].abs() - 1
    rows[10] = -1e-45
    rows[11, vocab - 1] = 3e38
    return rows


@pytest.mark.parametrize("vocab", [7, 4096, 4097, 9000])
@pytest.mark.parametrize("padding", [0, 3])
def test_the_kernel_chooses_the_tokens_of_its_twin(vocab: int, padding: int) -> None:
    logits = torch.cat([odd_rows(vocab), torch.full((12, padding), 9e9)], dim=1)[:, :vocab]
    found, expected = by_kernel(greedy, logits), by_twin(greedy, logits)
    assert torch.equal(found, expected)
    assert expected[1].tolist() == [1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 1, 1] and expected[0, 2] == 0


def test_no_rows_have_no_tokens() -> None:
    assert by_kernel(greedy, torch.zeros(0, 9)).shape == (2, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("vocab", [9, 102_400, 151_936])
def test_on_a_gpu(vocab: int) -> None:
    for logits in (odd_rows(vocab), torch.randn(256, vocab).round(decimals=2)):
        expected = by_twin(greedy, logits)
        assert torch.equal(greedy(logits.cuda()).cpu(), expected)
