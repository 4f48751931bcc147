"""UseOrder: the experts that are used most come first, and it says which part of the uses is left."""

import numpy as np
import pytest

from ktqueue.operators.gpu.experts.use_order import HALF_LIFE_TOKENS, LEAST_TOKENS, LEVELS, UseOrder

EXPERTS = 32


def order_of(absent: np.ndarray) -> UseOrder:
    return UseOrder([EXPERTS, EXPERTS // 2], [4, 4], absent)


@pytest.fixture
def absent() -> np.ndarray:
    """All experts of both layers; the second has half as many."""
    return np.ones((2, EXPERTS), bool)


def learn(order: UseOrder, found: np.ndarray, absent: np.ndarray) -> None:
    order.learn(found.astype(np.int32))
    order.improve(absent)


def uses(tokens: int, hottest: int) -> np.ndarray:
    """Uses of two layers: half of them go to the four experts from `hottest` on."""
    found = np.zeros((2, EXPERTS))
    for row, experts in zip(found, (EXPERTS, EXPERTS // 2), strict=True):
        row[:experts] = 2 * tokens / experts
        row[[(hottest + place) % experts for place in range(4)]] += tokens / 2
    return found


def test_without_uses_all_count_alike(absent: np.ndarray) -> None:
    order = order_of(absent)
    assert order.left == pytest.approx([1 - level / LEVELS for level in range(LEVELS + 1)])
    assert order.first(0, 3, absent).tolist() == [0, 1, 2]
    assert order.first(1, EXPERTS, absent).tolist() == list(range(EXPERTS // 2))


def test_the_most_used_come_first_in_rising_order(absent: np.ndarray) -> None:
    order = order_of(absent)
    learn(order, uses(LEAST_TOKENS, 9), absent)
    assert order.version == 1
    assert order.first(0, 5, absent).tolist() == [0, 9, 10, 11, 12]
    assert order.first(1, 4, absent).tolist() == [9, 10, 11, 12]
    assert order.left[0] == 1 and order.left[LEVELS] == 0
    assert order.left[4] == pytest.approx(0.375)  # 24 of 32 experts, or 12 of 16, of which none is hot


def test_few_uses_change_nothing(absent: np.ndarray) -> None:
    order = order_of(absent)
    learn(order, uses(LEAST_TOKENS - 64, 9), absent)
    assert order.version == 0 and order.first(0, 1, absent).tolist() == [0]
    learn(order, uses(128, 9), absent)
    assert order.version == 1


def test_an_order_that_is_almost_the_best_stays(absent: np.ndarray) -> None:
    order = order_of(absent)
    learn(order, uses(HALF_LIFE_TOKENS, 9), absent)
    for _ in range(3):
        learn(order, uses(HALF_LIFE_TOKENS // 64, 20), absent)
    assert order.version == 1
    for _ in range(3):
        learn(order, uses(HALF_LIFE_TOKENS, 20), absent)
    assert order.version == 2 and order.first(0, 4, absent).tolist() == [20, 21, 22, 23]


def test_experts_in_gpu_memory_leave_no_uses(absent: np.ndarray) -> None:
    order = order_of(absent)
    absent[:, 9:13] = False
    learn(order, uses(LEAST_TOKENS, 9), absent)
    assert order.left[0] == pytest.approx(((28 * 2 / 32) + (12 * 2 / 16)) / 4 / 2)
    assert order.left[LEVELS] == 0
    assert order.first(0, 10, absent).tolist() == [*range(9), 13]


def test_uses_of_earlier_runs_count_no_more_than_recent_ones(absent: np.ndarray) -> None:
    order = order_of(absent)
    order.start(uses(100 * HALF_LIFE_TOKENS, 9))
    order.improve(absent)
    assert order.first(0, 4, absent).tolist() == [9, 10, 11, 12]
    for _ in range(3):
        learn(order, uses(HALF_LIFE_TOKENS, 20), absent)
    assert order.first(0, 4, absent).tolist() == [20, 21, 22, 23]
