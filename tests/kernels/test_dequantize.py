"""Decoding of every weight format against the gguf package, bit for bit."""

import gguf
import numpy as np
import pytest

from ktqueue.operators import native


@pytest.mark.parametrize("quant", native.QUANTS)
def test_equals_gguf(quant, isa, pack):
    data = pack(quant, 64 * 256)
    expected = gguf.dequantize(data, gguf.GGMLQuantizationType[quant]).reshape(-1)
    np.testing.assert_array_equal(native.dequantize(quant, data, 64 * 256, isa=isa), expected)


@pytest.mark.parametrize("quant", ["Q4_0", "Q8_0", "F32"])
def test_gives_back_what_gguf_quantised(quant, isa):
    values = np.random.default_rng(1).normal(size=1024).astype(np.float32)
    packed = gguf.quantize(values, gguf.GGMLQuantizationType[quant]).view(np.uint8).reshape(-1)
    decoded = native.dequantize(quant, packed, 1024, isa=isa)
    assert np.abs(decoded - values).max() <= {"Q4_0": 0.3, "Q8_0": 0.02, "F32": 0.0}[quant]


def test_every_half(isa):
    """All 65536 halves, subnormal, infinite and NaN ones too."""
    halves = np.arange(65536, dtype="<u2")
    decoded = native.dequantize("F16", halves.view(np.uint8), 65536, isa=isa)
    np.testing.assert_array_equal(decoded, halves.view(np.float16).astype(np.float32))


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("count", [1, 31, 33, 45])
def test_odd_counts_of_plain_formats(quant, count, isa, pack):
    data = pack(quant, count)
    expected = gguf.dequantize(data, gguf.GGMLQuantizationType[quant]).reshape(-1)
    np.testing.assert_array_equal(native.dequantize(quant, data, count, isa=isa), expected)


def test_any_alignment_and_read_only_memory(isa, pack, tmp_path):
    data = pack("Q6_K", 1024)
    (tmp_path / "weights").write_bytes(b"x" + data.tobytes())
    mapped = np.memmap(tmp_path / "weights", np.uint8, mode="r")[1:]
    np.testing.assert_array_equal(
        native.dequantize("Q6_K", mapped, 1024, isa=isa), native.dequantize("Q6_K", data, 1024, isa=isa)
    )


def test_nothing_is_nothing():
    assert native.dequantize("Q4_K", np.empty(0, np.uint8), 0).shape == (0,)


@pytest.mark.parametrize(
    ("quant", "size", "count", "message"),
    [
        ("Q4_K", 144, 100, "multiple of 256 weights for Q4_K, got 100"),
        ("Q4_0", 18, 16, "multiple of 32 weights for Q4_0, got 16"),
        ("Q4_0", 17, 32, r"data must have shape \[18\], got \[17\]"),
        ("Q9_Z", 17, 32, "quant must be one of F32, F16, .*, got 'Q9_Z'"),
        ("F32", 4, -1, "count must not be negative, got -1"),
    ],
)
def test_refuses(quant, size, count, message):
    with pytest.raises(ValueError, match=message):
        native.dequantize(quant, np.zeros(size, np.uint8), count)


def test_refuses_other_types_of_data():
    with pytest.raises(ValueError, match="data has the wrong element type"):
        native.dequantize("F32", np.zeros(4, np.int8), 1)
    with pytest.raises(ValueError, match="data must be contiguous"):
        native.dequantize("F32", np.zeros(8, np.uint8)[::2], 1)


def test_row_bytes():
    sizes = [native.row_bytes(quant, 512) for quant in native.QUANTS]
    assert sizes == [2048, 1024, 1024, 288, 544, 288, 352, 420]
    with pytest.raises(ValueError, match="positive multiple of 1 weights for F32, got 0"):
        native.row_bytes("F32", 0)
