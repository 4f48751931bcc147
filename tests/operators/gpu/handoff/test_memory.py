"""pinned_bytes predicts the host memory of a hand-off."""

import pytest

from ktqueue.operators.gpu.handoff.handoff import Handoff, pinned_bytes


@pytest.mark.parametrize("shape", [(32, 2, 5), (96, 3, 7), (4, 1, 1), (160, 5, 13)])
def test_a_task_of_the_most_tokens_fits(shape: tuple[int, int, int]) -> None:
    """torch pins memory in blocks of a power of two."""
    hidden, experts_per_token, max_tokens = shape
    handoff = Handoff(*shape, "cpu")
    task = handoff.buffers(max_tokens)
    blocks = [512, task.x.untyped_storage().nbytes(), task.result.untyped_storage().nbytes()]
    assert task.result.untyped_storage().nbytes() == 4 * max_tokens * hidden
    assert task.predicted.shape == task.cpu_ids.shape == (max_tokens, experts_per_token)
    assert pinned_bytes(*shape) == sum(1 << (size - 1).bit_length() for size in blocks)
    handoff.close()


def test_memory_is_pinned_in_powers_of_two() -> None:
    mib = 1 << 20
    assert pinned_bytes(2048, 8, 8192) == (128 + 64) * mib + 512
