"""Expected uses of experts: the long-run frequency is a prior, and recent uses are added to it."""

import numpy as np
import pytest

from ktqueue.operators.gpu.experts.expected_uses import HALF_LIFE_STEPS, MOST_TOKENS, PRIOR_TOKENS, ExpectedUses


def counts(*rows: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.array(rows, np.int32)


def test_the_frequency_is_a_prior_of_so_many_tokens() -> None:
    expected = ExpectedUses([2], 4)
    expected.start(np.array([[600.0, 300.0, 100.0, 0.0]]))  # of 500 tokens
    assert expected.values[0] == pytest.approx(PRIOR_TOKENS * np.array([1.2, 0.6, 0.2, 0.0]))
    expected.learn(counts([0, 0, 1, 1]), 1)
    assert expected.values[0, 3] == pytest.approx(1 + PRIOR_TOKENS / 501)


def test_a_recent_use_counts_half_after_the_half_life() -> None:
    expected = ExpectedUses([1], 2)
    expected.start(np.array([[1e12, 1e12]]))  # so that the frequency does not change
    expected.learn(counts([40, 0]), 16)
    expected.learn(counts([0, 0]), HALF_LIFE_STEPS)
    assert np.diff(expected.values[0])[0] == pytest.approx(-20)


def test_a_long_prompt_counts_like_a_step_of_many_sequences() -> None:
    expected = ExpectedUses([1], 2)
    expected.start(np.array([[1e12, 1e12]]))
    expected.learn(counts([8000, 192]), 1)
    assert np.diff(expected.values[0])[0] == pytest.approx(-7808 * MOST_TOKENS / 8192)


def test_layers_are_estimated_apart() -> None:
    expected = ExpectedUses([1, 2], 3)
    expected.learn(counts([4, 0, 0], [4, 4, 0]), 4)
    assert (expected.values[0] == expected.values[1] * [1, 0, 0]).all()
