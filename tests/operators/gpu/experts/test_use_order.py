"""UseOrder: the experts that are used most come first, and it says which part of the uses is left."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktqueue.operators.gpu.experts.use_order import HALF_LIFE_TOKENS, LEAST_TOKENS, LEVELS, RECENT_TOKENS, UseOrder

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


def test_what_is_left_follows_the_present_text_before_the_order_does(absent: np.ndarray) -> None:
    order = order_of(absent)
    learn(order, uses(HALF_LIFE_TOKENS, 9), absent)
    before = order.left[LEVELS // 2]
    learn(order, uses(2 * RECENT_TOKENS, 20), absent)
    assert order.version == 1
    assert order.left[LEVELS // 2] > 1.5 * before
    for _ in range(8):
        learn(order, uses(RECENT_TOKENS, 9), absent)
    assert order.left[LEVELS // 2] == pytest.approx(before, rel=0.05)


@settings(max_examples=60)
@given(st.data())
def test_what_is_left_is_what_the_first_ones_leave(data: st.DataObject) -> None:
    """Also for layers that differ, for uses of one expert or of none, and for as many as a file may have."""
    experts = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    most = max(experts)
    places = np.array([np.arange(most) < count for count in experts])
    random = np.random.default_rng(data.draw(st.integers(0, 1 << 20)))
    absent = (random.random(places.shape) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))) | ~places
    found = (random.random(places.shape) ** 8 * data.draw(st.sampled_from([0, 3, 1 << 13, 1 << 27]))).round() * places
    order = UseOrder(experts, [1] * len(experts), absent)
    if data.draw(st.booleans()):
        order.start(found)
        order.improve(absent)
    else:
        learn(order, found, absent)
    assert all(1.000001 >= more >= less >= 0 for more, less in itertools.pairwise(order.left))
    for level, left in enumerate(order.left):
        parts = []
        for layer, row in enumerate(np.where(found.sum(1, keepdims=True) > 0, found, places)):
            on_cpu = absent[layer] & places[layer]
            on_cpu[order.first(layer, round(level / LEVELS * on_cpu.sum()), absent)] = False
            parts.append((row * on_cpu).sum() / row.sum())
        assert left == pytest.approx(np.mean(parts))
