"""Decoding of every weight format against the gguf package, bit for bit."""

import gguf
import numpy as np
import pytest

from ktqueue.operators import native

BLOCKS = {q: tuple(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[q]]) for q in native.QUANTS}
BLOCK_QUANTS = [quant for quant, (elements, _) in BLOCKS.items() if elements > 1]
# Offsets of the halfs in a block; MXFP4's scale is the byte 0.
HALFS = {"Q4_0": [0], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
HALFS |= {"IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": []}


def assert_equals_gguf(quant, data):
    """Bit for bit, signs of zeros and infinities too; any NaN equals any other."""
    elements, size = BLOCKS[quant]
    count = data.size // size * elements
    with np.errstate(over="ignore", invalid="ignore"):
        expected = gguf.dequantize(data, gguf.GGMLQuantizationType[quant]).reshape(-1)
    got = native.dequantize(quant, data, count)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(got[number].view(np.uint32), expected[number].view(np.uint32))


@pytest.mark.parametrize("quant", native.QUANTS)
def test_equals_gguf(quant, random_weights):
    assert_equals_gguf(quant, random_weights(quant, 64 * 256))


@pytest.mark.parametrize("quant", BLOCK_QUANTS)
def test_every_bit_counts_for_itself(quant, random_weights):
    """Blocks with one bit set, with one bit clear, with none and with all, under a scale of 1 (MXFP4: 2^-4)."""
    size = BLOCKS[quant][1]
    ones = np.eye(8 * size, dtype=np.uint8)
    blocks = np.packbits(np.concatenate([ones, 1 - ones, np.zeros_like(ones[:1]), np.ones_like(ones[:1])]), axis=1)
    for offset in HALFS[quant]:
        blocks[:, offset : offset + 2] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    if quant == "MXFP4":
        blocks[:, 0] = 124
    assert_equals_gguf(quant, blocks.reshape(-1))


@pytest.mark.parametrize("quant", BLOCK_QUANTS)
@pytest.mark.parametrize("scale", [0.0, -0.0, 6e-8, -1.5, 65504.0, np.inf, -np.inf, np.nan])
def test_extreme_scales(quant, scale, random_weights):
    """Zero, subnormal, negative, largest and non-finite halfs, each in each place."""
    elements, size = BLOCKS[quant]
    for offset in HALFS[quant]:
        blocks = random_weights(quant, 16 * elements).reshape(-1, size)
        blocks[:, offset : offset + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        assert_equals_gguf(quant, blocks.reshape(-1))


def test_every_exponent_of_mxfp4(random_weights):
    blocks = random_weights("MXFP4", 256 * 32).reshape(-1, 17)
    blocks[:, 0] = np.arange(256)
    assert_equals_gguf("MXFP4", blocks.reshape(-1))


@pytest.mark.parametrize("quant", ["Q4_0", "Q8_0", "MXFP4", "F32"])
def test_gives_back_what_gguf_quantised(quant):
    values = np.random.default_rng(1).normal(size=1024).astype(np.float32)
    packed = gguf.quantize(values, gguf.GGMLQuantizationType[quant]).view(np.uint8).reshape(-1)
    decoded = native.dequantize(quant, packed, 1024)
    assert np.abs(decoded - values).max() <= {"Q4_0": 0.3, "Q8_0": 0.02, "MXFP4": 1.0, "F32": 0.0}[quant]


def test_every_half():
    """All 65536 halves, subnormal, infinite and NaN ones too."""
    halves = np.arange(65536, dtype="<u2")
    decoded = native.dequantize("F16", halves.view(np.uint8), 65536)
    np.testing.assert_array_equal(decoded, halves.view(np.float16).astype(np.float32))


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("count", [1, 31, 33, 45])
def test_odd_counts_of_plain_formats(quant, count, random_weights):
    data = random_weights(quant, count)
    expected = gguf.dequantize(data, gguf.GGMLQuantizationType[quant]).reshape(-1)
    np.testing.assert_array_equal(native.dequantize(quant, data, count), expected)


def test_any_alignment_and_read_only_memory(random_weights, tmp_path):
    data = random_weights("Q6_K", 1024)
    (tmp_path / "weights").write_bytes(b"x" + data.tobytes())
    mapped = np.memmap(tmp_path / "weights", np.uint8, mode="r")[1:]
    np.testing.assert_array_equal(native.dequantize("Q6_K", mapped, 1024), native.dequantize("Q6_K", data, 1024))


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
    assert sizes == [2048, 1024, 1024, 288, 544, 168, 220, 288, 352, 420, 288, 272, 272]
    with pytest.raises(ValueError, match="positive multiple of 1 weights for F32, got 0"):
        native.row_bytes("F32", 0)
