"""Placement: hot experts come in, within limits, and nobody uses one before it is there."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ktqueue.operators.gpu.copy_stream import CopyStream, Mark
from ktqueue.operators.gpu.experts.placement import HALF_LIFE_TOKENS, READ_EVERY_STEPS, Placement
from ktqueue.operators.gpu.experts.pool import ABSENT, ExpertPool, slots_that_fit

RECORD = 64  # bytes
EXPERTS = 8


class Packed:
    """Experts whose bytes all hold the layer's and the expert's number; in two ranges."""

    def __init__(self, layer: int) -> None:
        self._data = np.repeat(np.arange(EXPERTS, dtype=np.uint8) + 16 * layer, RECORD)

    def ranges(self, expert: int) -> list[tuple[int, int]]:
        begin = self._data.ctypes.data + expert * RECORD
        return [(begin, RECORD // 2), (begin + RECORD // 2, RECORD // 2)]


def layer(index: int, size: int = RECORD) -> Any:
    return SimpleNamespace(
        packed=Packed(index), record=SimpleNamespace(bytes=size), experts=EXPERTS, experts_per_token=2
    )


class LateCopies(CopyStream):
    """Copies that are there when the test says so."""

    arrived = True

    def mark(self) -> Mark:
        mark = Mark(None)
        mark.passed = lambda: self.arrived  # type: ignore[method-assign]
        return mark


Parts = tuple[ExpertPool, Placement, LateCopies]


@pytest.fixture
def parts() -> Parts:
    layers, copies = [layer(0), layer(1)], LateCopies("cpu")
    pool = ExpertPool(layers, [2, 2], 0, copies)
    return pool, Placement(layers, pool, copies), copies


def read(placement: Placement) -> None:
    """As many steps as it takes until counts have been looked at, and what was sent has come."""
    for _ in range(READ_EVERY_STEPS + 1):
        placement.after_step()


def holds(pool: ExpertPool, layer: int) -> set[int]:
    """The experts that the tables on the device name, each of them checked to be there."""
    found = {expert for expert in range(EXPERTS) if pool.offsets[layer, expert] != ABSENT}
    for expert in found:
        at = int(pool.offsets[layer, expert])
        assert (pool.memory[at : at + RECORD] == 16 * layer + expert).all()
    return found


def test_begins_with_the_first_experts(parts: Parts) -> None:
    pool, placement, _ = parts
    assert (holds(pool, 0), holds(pool, 1)) == ({0, 1}, {0, 1})
    assert placement.hit_rate is None


def test_hot_experts_come_in_for_cold_ones(parts: Parts) -> None:
    pool, placement, _ = parts
    placement.counts[0, 5] = 100
    placement.counts[0, 1] = 50
    placement.counts[1, 0] = 70
    read(placement)
    assert (holds(pool, 0), holds(pool, 1)) == ({1}, {0, 1})  # on its way: nobody has it
    placement.after_step()
    assert (holds(pool, 0), holds(pool, 1)) == ({1, 5}, {0, 1})
    assert placement.moves == 1
    assert placement.hit_rate == pytest.approx(120 / 220)


def test_an_expert_is_used_when_its_copy_is_there(parts: Parts) -> None:
    pool, placement, copies = parts
    placement.counts[0, 5] = 100
    copies.arrived = False
    for _ in range(3):
        read(placement)
        assert len(holds(pool, 0)) == 1
    copies.arrived = True
    placement.after_step()
    assert 5 in holds(pool, 0)


def test_little_more_use_moves_nothing(parts: Parts) -> None:
    pool, placement, _ = parts
    placement.counts[:] = 1000
    placement.counts[:, 6] = 1200
    read(placement)
    placement.counts[:, 2] += 7  # few uses say little, however large the ratio
    read(placement)
    placement.after_step()
    assert placement.moves == 0 and holds(pool, 0) == {0, 1}


def test_old_uses_are_forgotten(parts: Parts) -> None:
    pool, placement, _ = parts
    placement.counts[0, :2] = 20 * HALF_LIFE_TOKENS
    read(placement)
    for _ in range(6):
        placement.counts[0, 3] += 2 * HALF_LIFE_TOKENS
        read(placement)
    placement.after_step()
    assert 3 in holds(pool, 0)  # though it was used less in all


def test_moves_of_one_time_are_limited(parts: Parts) -> None:
    pool, _, copies = parts
    placement = Placement([layer(0), layer(1)], pool, copies, max_moved_bytes=2 * RECORD)
    placement.counts[:, 4:6] = torch.tensor([[300, 200], [400, 100]])
    read(placement)
    placement.after_step()
    assert placement.moves == 2
    assert 4 in holds(pool, 0) and 4 in holds(pool, 1)  # the most useful first
    read(placement)
    read(placement)
    assert (holds(pool, 0), holds(pool, 1)) == ({4, 5}, {4, 5})


def test_counts_may_wrap_round(parts: Parts) -> None:
    _, placement, _ = parts
    placement.counts[:, 0] = 2**31 - 10
    read(placement)
    placement.counts[:, 0] += 30
    read(placement)
    assert placement.hit_rate == 1.0


def test_memory_is_divided_evenly() -> None:
    small, large = layer(0, 100), layer(1, 300)
    assert slots_that_fit([small, large], 0) == [0, 0]
    assert slots_that_fit([small, large], 850) == [2, 2]
    assert slots_that_fit([small, large], 900) == [3, 2]
    assert slots_that_fit([small, large], 10**6) == [EXPERTS, EXPERTS]
    assert slots_that_fit([small, large], EXPERTS * 400) == [EXPERTS, EXPERTS]
    assert slots_that_fit([], 100) == []
