"""Scores of the indexer: the kernel equals its twin. Tests of decoders compare the twin with transformers."""

import torch

from ktqueue.operators.gpu.attention.index_scores import index_scores

from ..interpreted import by_kernel
from ..kernels.comparing import assert_same


def test_the_kernel_equals_its_twin() -> None:
    """With more keys than a block has, and rows whose last page is partly filled, or not used at all."""
    torch.manual_seed(2)
    query, weights = torch.randn(3, 6, 40), torch.randn(3, 6)
    keys = torch.randn(30, 8, 40)
    pages = torch.randperm(30)[:27].view(3, 9).to(torch.int32)
    arguments = query, weights, keys, pages, torch.tensor([70, 13, 1], dtype=torch.int32)
    expected = index_scores(*arguments)
    assert expected.isfinite().sum(1).tolist() == [70, 13, 1]
    assert_same(by_kernel(index_scores, *arguments), expected)
