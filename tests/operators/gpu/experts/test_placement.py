"""Placement: experts that are used often move to the GPU, within limits, and are used only after their copy."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ktqueue.operators.gpu.copy_stream import CopyStream, Mark
from ktqueue.operators.gpu.experts.placement import READ_EVERY_STEPS, Placement
from ktqueue.operators.gpu.experts.pool import ABSENT, ExpertPool, slots_that_fit

RECORD = 64  # bytes
EXPERTS = 8


class Packed:
    """Packed experts in two ranges each. Every byte is 16 * layer + expert."""

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
    """Copies that arrive when `arrived` is True."""

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
    """Run as many steps as it takes to read the counts."""
    for _ in range(READ_EVERY_STEPS + 1):
        placement.after_step()


def holds(pool: ExpertPool, layer: int) -> set[int]:
    """The experts in the device's tables. Checks that their bytes are there."""
    found = {expert for expert in range(EXPERTS) if pool.offsets[layer, expert] != ABSENT}
    for expert in found:
        offset = int(pool.offsets[layer, expert])
        assert (pool.memory[offset : offset + RECORD] == 16 * layer + expert).all()
    return found


def test_the_first_experts_are_in_memory_at_start(parts: Parts) -> None:
    pool, placement, _ = parts
    assert (holds(pool, 0), holds(pool, 1)) == ({0, 1}, {0, 1})
    assert placement.hit_rate is None


def test_experts_that_are_used_often_replace_others(parts: Parts) -> None:
    pool, placement, _ = parts
    placement.counts[0, 5] = 100
    placement.counts[0, 1] = 50
    placement.counts[1, 0] = 70
    read(placement)
    assert (holds(pool, 0), holds(pool, 1)) == ({1}, {0, 1})  # being copied: in no table
    placement.after_step()
    assert (holds(pool, 0), holds(pool, 1)) == ({1, 5}, {0, 1})
    assert placement.moves == 1
    assert placement.hit_rate == pytest.approx(120 / 220)


def test_an_expert_is_used_after_its_copy(parts: Parts) -> None:
    pool, placement, copies = parts
    placement.counts[0, 5] = 100
    copies.arrived = False
    for _ in range(3):
        read(placement)
        assert len(holds(pool, 0)) == 1
    copies.arrived = True
    placement.after_step()
    assert 5 in holds(pool, 0)


def test_small_differences_move_nothing(parts: Parts) -> None:
    pool, placement, _ = parts
    placement.counts[:] = 1000
    placement.counts[:, 6] = 1200
    read(placement)
    placement.counts[:, 2] += 7  # too few uses, though the ratio is large
    read(placement)
    placement.after_step()
    assert placement.moves == 0 and holds(pool, 0) == {0, 1}


def test_an_expert_that_is_used_now_replaces_one_that_was_used_more(parts: Parts) -> None:
    pool, placement, _ = parts
    for _ in range(10):
        placement.counts[0, :2] += 100
        read(placement)
    for _ in range(40):
        placement.counts[0, 2:4] += 20
        read(placement)
    placement.after_step()
    assert placement.counts[0, 3] < placement.counts[0, 0]
    assert holds(pool, 0) == {2, 3}


def test_without_recent_uses_the_frequency_decides(parts: Parts) -> None:
    pool, placement, _ = parts
    placement.counts[0, 2:4] += 5000
    read(placement)
    for _ in range(100):
        placement.counts[1, 0] += 1  # steps that say nothing of layer 0
        read(placement)
    placement.counts[0, :2] += 20
    read(placement)
    placement.after_step()
    assert holds(pool, 0) == {2, 3}


def test_the_bytes_moved_beside_a_step_are_limited(parts: Parts) -> None:
    pool, _, copies = parts
    placement = Placement([layer(0), layer(1)], pool, copies, max_moved_bytes=2 * RECORD)
    placement.counts[:, 4:6] = torch.tensor([[300, 200], [400, 100]])
    read(placement)
    placement.after_step()
    assert placement.moves == 4
    assert 4 in holds(pool, 0) and 4 in holds(pool, 1)  # the most useful first
    assert 5 not in holds(pool, 0) and 5 not in holds(pool, 1)
    placement.after_step()
    assert (holds(pool, 0), holds(pool, 1)) == ({4, 5}, {4, 5})


def test_one_expert_moves_however_large_it_is(parts: Parts) -> None:
    pool, _, copies = parts
    placement = Placement([layer(0), layer(1)], pool, copies, max_moved_bytes=1)
    placement.counts[0, 4:6] = 300
    read(placement)
    assert placement.moves == 1
    placement.after_step()
    placement.after_step()
    assert placement.moves == 2 and holds(pool, 0) == {4, 5}


def test_an_expert_on_its_way_is_not_planned_again(parts: Parts) -> None:
    """Each plan sees what the last one has begun."""
    pool, placement, copies = parts
    placement.counts[0, 5] = 100
    read(placement)
    copies.arrived = False
    placement.counts[0, 5] += 100
    read(placement)
    copies.arrived = True
    for _ in range(3):
        placement.after_step()
    assert holds(pool, 0) == {5, 1} or holds(pool, 0) == {5, 0}
    assert placement.moves == 1


def test_experts_of_earlier_runs_are_placed_at_once(parts: Parts) -> None:
    pool, placement, _ = parts
    placement.counts[:] = 9  # of a step that only warms up
    uses = np.zeros((2, EXPERTS))
    uses[0, [1, 6]], uses[1, [7, 3]] = 100, 50
    placement.place(uses)
    assert (holds(pool, 0), holds(pool, 1)) == ({1, 6}, {3, 7})
    assert placement.moves == 0
    read(placement)
    assert placement.hit_rate is None  # nothing was used since
    placement.counts[0, 0] += 1
    read(placement)
    read(placement)
    assert (holds(pool, 0), holds(pool, 1)) == ({1, 6}, {3, 7})  # one use does not outweigh them


def test_placing_ends_the_moves_that_had_begun(parts: Parts) -> None:
    pool, placement, copies = parts
    placement.counts[0, 5] = 100
    copies.arrived = False
    read(placement)
    uses = np.zeros((2, EXPERTS))
    uses[:, 2:4] = 10
    placement.place(uses)
    copies.arrived = True
    read(placement)
    assert (holds(pool, 0), holds(pool, 1)) == ({2, 3}, {2, 3})


def test_counts_may_overflow(parts: Parts) -> None:
    _, placement, _ = parts
    placement.counts[:, 0] = 2**31 - 10
    read(placement)
    placement.counts[:, 0] += 30
    read(placement)
    assert placement.hit_rate == 1.0


def test_layers_share_the_memory_evenly() -> None:
    small, large = layer(0, 100), layer(1, 300)
    assert slots_that_fit([small, large], 0) == [0, 0]
    assert slots_that_fit([small, large], 850) == [2, 2]
    assert slots_that_fit([small, large], 900) == [3, 2]
    assert slots_that_fit([small, large], 10**6) == [EXPERTS, EXPERTS]
    assert slots_that_fit([small, large], EXPERTS * 400) == [EXPERTS, EXPERTS]
    assert slots_that_fit([], 100) == []
