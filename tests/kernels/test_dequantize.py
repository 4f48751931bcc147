"""Decoding of every weight format against the gguf package, bit for bit."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from kernel_types import RandomWeights
from stored_blocks import block_size, values_of

from ktqueue.operators import native
from ktqueue.operators.packed import Bytes

BLOCKS = {quant: block_size(quant) for quant in native.QUANTS}
BLOCK_QUANTS = [quant for quant, (elements, _) in BLOCKS.items() if elements > 1]
# Offsets of the halves in a block. MXFP4 has its scale in byte 0, and NVFP4 in bytes 0 to 3. The half of IQ1_M is in
# the upper four bits of four words, from byte 48.
HALFS = {"Q4_0": [0], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
HALFS |= {"IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [], "NVFP4": [], "IQ1_M": []}
HALFS |= {"Q4_1": [0, 2], "Q5_1": [0, 2], "UINT4": [0], "FP8": [], "FP4": []}
HALFS |= {quant: [0] for quant in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S")}


def assert_equals_gguf(quant: str, data: Bytes) -> None:
    """Compare bit for bit, including the signs of zeros and infinities. All NaN count as equal."""
    elements, size = BLOCKS[quant]
    count = data.size // size * elements
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values_of(quant, data)
    got = native.dequantize(quant, data, count)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(got[number].view(np.uint32), expected[number].view(np.uint32))


@pytest.mark.parametrize("quant", native.QUANTS)
def test_decoded_weights_equal_those_of_gguf(quant: str, random_weights: RandomWeights) -> None:
    assert_equals_gguf(quant, random_weights(quant, 64 * 256))


@pytest.mark.parametrize("quant", BLOCK_QUANTS)
def test_each_bit_of_a_block_is_decoded(quant: str, random_weights: RandomWeights) -> None:
    """Blocks have one bit set, one bit clear, no bit set or all bits set. Their scale is 1 (MXFP4: 2^-4)."""
    size = BLOCKS[quant][1]
    ones = np.eye(8 * size, dtype=np.uint8)
    blocks = np.packbits(np.concatenate([ones, 1 - ones, np.zeros_like(ones[:1]), np.ones_like(ones[:1])]), axis=1)
    for offset in HALFS[quant]:
        blocks[:, offset : offset + 2] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    if quant == "MXFP4":
        blocks[:, 0] = 124
    if quant == "NVFP4":
        blocks[:, :4] = 64
    if quant == "FP8":  # the scale is 1; NaN is refused before, and not a number here
        blocks[:, :4] = np.frombuffer(np.float32(1).tobytes(), np.uint8)
        np.copyto(blocks[:, 4:], 0, where=(blocks[:, 4:] & 127) == 127)
    if quant == "FP4":
        blocks[:, :12] = np.frombuffer(np.array([1, 2**-30], "<f4").tobytes() + b"\x38" * 4, np.uint8)
    if quant == "IQ1_M":  # 0x3c00, which is 1
        blocks[:, 49::2] &= 15
        blocks[:, 53] |= 0xC0
        blocks[:, 55] |= 0x30
    assert_equals_gguf(quant, blocks.reshape(-1))


@pytest.mark.parametrize("quant", BLOCK_QUANTS)
@pytest.mark.parametrize("scale", [0.0, -0.0, 6e-8, -1.5, 65504.0, np.inf, -np.inf, np.nan])
def test_extreme_scales_are_decoded(quant: str, scale: float, random_weights: RandomWeights) -> None:
    """Each of a block's scales is a zero, subnormal, negative, largest or non-finite half."""
    elements, size = BLOCKS[quant]
    for offset in HALFS[quant]:
        blocks = random_weights(quant, 16 * elements).reshape(-1, size)
        blocks[:, offset : offset + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        assert_equals_gguf(quant, blocks.reshape(-1))


def test_every_exponent_of_mxfp4_is_decoded(random_weights: RandomWeights) -> None:
    blocks = random_weights("MXFP4", 256 * 32).reshape(-1, 17)
    blocks[:, 0] = np.arange(256)
    assert_equals_gguf("MXFP4", blocks.reshape(-1))


def test_every_scale_of_nvfp4_is_decoded(random_weights: RandomWeights) -> None:
    blocks = random_weights("NVFP4", 256 * 64).reshape(-1, 36)
    blocks[:, :4] = np.arange(256)[:, None] + np.arange(4)
    assert_equals_gguf("NVFP4", blocks.reshape(-1))


def test_every_scale_of_fp4_is_rounded_once(random_weights: RandomWeights) -> None:
    blocks = random_weights("FP4", 254 * 64).reshape(-1, 44)
    blocks[:, 8:12] = np.array([n for n in range(256) if n & 127 != 127], np.uint8)[:, None]
    for d, r in ((1 / 3, 2**-29), (3e-5, 0), (0.7, -(2**-26))):
        blocks[:, :8] = np.array([d, r], "<f4").view(np.uint8)
        assert_equals_gguf("FP4", blocks.reshape(-1))


@pytest.mark.parametrize("scale", [0.0, -0.0, 1e-45, 1e-39, -1.5, 1e30, np.inf, np.nan])
def test_every_number_of_fp8_is_decoded(scale: float) -> None:
    numbers = np.arange(256, dtype=np.uint8)
    blocks = np.zeros((2, 132), np.uint8)
    blocks[:, :4] = np.frombuffer(np.float32(scale).tobytes(), np.uint8)
    blocks[:, 4:] = np.where(numbers & 127 == 127, 0, numbers).reshape(2, 128)
    assert_equals_gguf("FP8", blocks.reshape(-1))


@pytest.mark.parametrize("scale", [0.0, -0.0, 6e-8, -1.5, 65504.0, np.inf, np.nan])
def test_the_scattered_scale_of_iq1_m_is_decoded(scale: float, random_weights: RandomWeights) -> None:
    blocks = random_weights("IQ1_M", 16 * 256).reshape(-1, 56)
    bits = int(np.float16(scale).view(np.uint16))
    for word in range(4):
        blocks[:, 49 + 2 * word] = blocks[:, 49 + 2 * word] & 15 | (bits >> 4 * word & 15) << 4
    assert_equals_gguf("IQ1_M", blocks.reshape(-1))


@pytest.mark.parametrize("quant", ["Q4_0", "Q8_0", "MXFP4", "F32"])
def test_weights_that_gguf_quantised_are_decoded(quant: str) -> None:
    values = np.random.default_rng(1).normal(size=1024).astype(np.float32)
    packed = gguf.quantize(values, gguf.GGMLQuantizationType[quant]).view(np.uint8).reshape(-1)
    decoded = native.dequantize(quant, packed, 1024)
    assert np.abs(decoded - values).max() <= {"Q4_0": 0.3, "Q8_0": 0.02, "MXFP4": 1.0, "F32": 0.0}[quant]


def test_every_half_is_decoded() -> None:
    """These are all 65536 halves, including subnormal, infinite and NaN."""
    halves = np.arange(65536, dtype="<u2")
    decoded = native.dequantize("F16", halves.view(np.uint8), 65536)
    np.testing.assert_array_equal(decoded, halves.view(np.float16).astype(np.float32))


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("count", [1, 31, 33, 45])
def test_odd_counts_of_plain_formats_are_decoded(quant: str, count: int, random_weights: RandomWeights) -> None:
    data = random_weights(quant, count)
    expected = gguf.dequantize(data, gguf.GGMLQuantizationType[quant]).reshape(-1)
    np.testing.assert_array_equal(native.dequantize(quant, data, count), expected)


def test_data_may_have_any_alignment_and_be_read_only(random_weights: RandomWeights, tmp_path: Path) -> None:
    data = random_weights("Q6_K", 1024)
    (tmp_path / "weights").write_bytes(b"x" + data.tobytes())
    mapped = np.memmap(tmp_path / "weights", np.uint8, mode="r")[1:]
    np.testing.assert_array_equal(native.dequantize("Q6_K", mapped, 1024), native.dequantize("Q6_K", data, 1024))


def test_no_weights_give_an_empty_array() -> None:
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
def test_sizes_and_formats_that_do_not_fit_are_refused(quant: str, size: int, count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native.dequantize(quant, np.zeros(size, np.uint8), count)


def test_data_of_other_types_is_refused() -> None:
    with pytest.raises(ValueError, match="data has the wrong element type"):
        native.dequantize("F32", np.zeros(4, np.int8), 1)
    with pytest.raises(ValueError, match="data must be contiguous"):
        native.dequantize("F32", np.zeros(8, np.uint8)[::2], 1)


def test_a_row_has_the_bytes_of_its_blocks() -> None:
    sizes = [native.row_bytes(quant, 512) for quant in native.QUANTS]
    assert sizes == [
        2048,
        1024,
        1024,
        288,
        544,
        168,
        220,
        288,
        352,
        420,
        288,
        272,
        272,
        132,
        148,
        164,
        196,
        220,
        100,
        112,
        288,
        320,
        384,
        304,
        528,
        352,
    ]
    with pytest.raises(ValueError, match="positive multiple of 1 weights for F32, got 0"):
        native.row_bytes("F32", 0)
