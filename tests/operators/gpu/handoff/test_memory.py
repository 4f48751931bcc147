"""What a hand-off is said to take of the host's memory is what it takes."""

import pytest

from ktqueue.operators.gpu.handoff.handoff import Handoff
from ktqueue.operators.gpu.handoff.memory import SLOTS, input_bytes, output_bytes, pinned_bytes, word_bytes


@pytest.mark.parametrize("shape", [(32, 2, 5), (96, 3, 7), (4, 1, 1), (160, 5, 13)])
def test_slots_have_what_is_said(shape: tuple[int, int, int]) -> None:
    """And a task of the most tokens has room for all its parts, wherever they begin."""
    hidden, _, most = shape
    handoff = Handoff(*shape, "cpu")
    for slot in range(SLOTS):
        task = handoff.buffers(most, slot=slot)
        assert task.x.untyped_storage().nbytes() == input_bytes(*shape)
        assert task.result.untyped_storage().nbytes() == output_bytes(hidden, most)
        assert task.predicted.shape == task.cpu_ids.shape == (most, shape[1])
    handoff.close()


def test_memory_is_pinned_in_powers_of_two() -> None:
    mib = 1 << 20
    assert output_bytes(2048, 8192) == 64 * mib < input_bytes(2048, 8, 8192) <= 128 * mib
    assert word_bytes(SLOTS) == 640
    assert pinned_bytes(2048, 8, 8192) == 2 * (128 + 64) * mib + 1024
