"""Where the experts of a layer are in host memory."""

import pytest

from ktqueue.operators.gpu.experts.fetching import split_into_parts


def test_parts_are_contiguous_in_all_experts() -> None:
    apart, touching = [(1000, 64), (5000, 128)], [(2000, 192)]
    parts, addresses = split_into_parts([apart, touching])
    assert parts == [(0, 64), (64, 128)]
    assert addresses == [[1000, 5000], [2000, 2064]]
    assert split_into_parts([touching])[0] == [(0, 192)]
    with pytest.raises(ValueError, match="have 192 bytes, not 64"):
        split_into_parts([apart, [(3000, 64)]])
