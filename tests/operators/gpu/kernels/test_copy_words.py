"""Small copies between host and device: the kernel (interpreted) copies what its twin does, and nothing behind it."""

import pytest
import torch

from ktqueue.operators.gpu.kernels.copy_words import MOST_BYTES, copy_words

from ..interpreted import by_kernel, by_twin


@pytest.mark.parametrize("size", [0, 8, 4096, 4104, MOST_BYTES, MOST_BYTES + 8])
def test_all_bytes_are_copied(size: int) -> None:
    source = torch.arange(size // 8 + 1) * 0x123456789
    for run in (by_kernel, by_twin):
        target = torch.zeros_like(source)
        run(copy_words, source[: size // 8], target[: size // 8])
        assert torch.equal(target[:-1], source[:-1]) and target[-1] == 0
