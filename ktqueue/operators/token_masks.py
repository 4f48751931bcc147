"""Applies the masks of grammars to logits on the CPU."""

import numpy as np
from ktqueue_kernels import _kernels
from numpy.typing import NDArray


def mask_logits(logits: NDArray[np.float32], masks: NDArray[np.int32], rows: list[int]) -> None:
    """Set the logits of tokens that are not allowed to -inf, in place. The other rows stay.

    `logits`: [scored, vocab] float32. `masks`: [rows, ceil(vocab / 32)] int32, with the lowest token in the lowest bit.
    `rows`: the row of the logits for each mask. Raises ValueError for other shapes and for a row that is not there.
    """
    _kernels.mask_logits(logits, masks, rows)
