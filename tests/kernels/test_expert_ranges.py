"""The ranges of one expert's packed memory, which are copied to the GPU."""

import ctypes

import numpy as np
import pytest
from kernel_types import MakeWeights

from ktqueue.operators import native
from ktqueue.operators.packed import Floats


def record(layer: native.ExpertLayer, expert: int) -> bytes:
    return b"".join(ctypes.string_at(address, size) for address, size in layer.ranges(expert))


def panels(matrix: Floats) -> list[bytes]:
    """Return the panels of a float32 matrix: columns of 16 rows, padded with zeros to slabs of 32 columns."""
    rows, columns = matrix.shape
    padded = np.zeros((-(-rows // 16) * 16, -(-columns // 32) * 32), np.float32)
    padded[:rows, :columns] = matrix
    return [np.ascontiguousarray(panel.T).tobytes() for panel in padded.reshape(-1, 16, padded.shape[1])]


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_gate_and_up_alternate_before_down(nodes: int, make_weights: MakeWeights) -> None:
    native.set_threads(4, torch_threads=1, pretend_nodes=nodes)
    weights = make_weights("F32", 4, 107, 150)
    layer = native.ExpertLayer(weights)
    native.set_threads(1)
    for expert in range(4):
        gate, up, down = (
            panels(matrix.data[expert].view(np.float32).reshape(matrix.rows, matrix.columns))
            for matrix in (weights.gate, weights.up, weights.down)
        )
        pairs = [part for pair in zip(gate, up, strict=True) for part in pair]
        assert record(layer, expert) == b"".join(pairs + down)
        assert len(layer.ranges(expert)) == 2 * nodes


@pytest.mark.parametrize("quant", native.QUANTS)
def test_ranges_hold_a_whole_expert_in_every_format(quant: str, make_weights: MakeWeights) -> None:
    weights = make_weights((quant, "Q8_0", quant), 3, 256, 512)
    native.set_threads(1)
    layer = native.ExpertLayer(weights)
    native.set_threads(4, torch_threads=1, pretend_nodes=2)
    divided = native.ExpertLayer(weights)
    native.set_threads(1)
    size = sum(
        native.packed_bytes(matrix.quant, matrix.rows, matrix.columns)
        for matrix in (weights.gate, weights.up, weights.down)
    )
    records = [record(layer, expert) for expert in range(3)]
    assert [len(packed) for packed in records] == [size] * 3
    assert len(set(records)) == 3
    assert [record(divided, expert) for expert in range(3)] == records
    assert len(layer.ranges(0)) == 2
    assert all(address % 64 == 0 for address, _ in layer.ranges(2))


@pytest.mark.parametrize(("bad", "message"), [(-1, "not be negative, got -1"), (3, "from 0 to 2, got 3")])
def test_an_expert_that_is_not_there_is_refused(bad: int, message: str, make_weights: MakeWeights) -> None:
    with pytest.raises(ValueError, match=message):
        native.ExpertLayer(make_weights("Q4_0", 3, 32, 32)).ranges(bad)
