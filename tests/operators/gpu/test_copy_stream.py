"""CopyStream's helpers."""

from ktqueue.operators.gpu.copy_stream import merge_ranges


def test_ranges_that_touch_are_one() -> None:
    assert merge_ranges([(200, 10), (100, 50), (150, 20), (170, 10)]) == [(100, 80), (200, 10)]
    assert merge_ranges([]) == []
