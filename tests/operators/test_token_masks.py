"""Masks of grammars on the CPU, against numpy."""

import numpy as np
import pytest
from numpy.typing import NDArray

from ktqueue.operators.token_masks import mask_logits


def twin(logits: NDArray[np.float32], masks: NDArray[np.int32], rows: list[int]) -> NDArray[np.float32]:
    result = logits.copy()
    allowed = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
    result[rows] = np.where(allowed == 1, logits[rows], -np.inf)
    return result


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 257, 8192, 151_665])
def test_what_is_not_allowed_is_never_chosen(vocab: int) -> None:
    draw = np.random.default_rng(vocab)
    logits = draw.standard_normal((5, vocab), dtype=np.float32)
    masks = draw.integers(-(1 << 31), 1 << 31, (3, -(-vocab // 32)), dtype=np.int64).astype(np.int32)
    masks[1] = -1  # allows all tokens
    masks[2, : masks.shape[1] // 2] = 0
    rows = [4, 0, 2]
    expected = twin(logits, masks, rows)
    mask_logits(logits, masks, rows)
    np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize(
    ("shape", "words", "rows", "reason"),
    [
        ((2, 64), 3, [0], "masks must have shape [1, 2]"),
        ((2, 64), 2, [0, 1], "masks must have shape [2, 2]"),
        ((2, 64), 2, [2], "rows has 2, but there are 2 rows of logits"),
    ],
)
def test_wrong_shapes_are_refused(shape: tuple[int, int], words: int, rows: list[int], reason: str) -> None:
    logits = np.zeros(shape, dtype=np.float32)
    with pytest.raises(ValueError, match=reason.replace("[", r"\[")):
        mask_logits(logits, np.zeros((1, words), dtype=np.int32), rows)
    assert not logits.any()
