"""Quantisers of weights: errors of what gguf decodes, weights of errors, threads, and refused values."""

import gguf
import numpy as np
import pytest

from ktqueue.loading.quantize import WRITABLE, quantize
from ktqueue.operators import native
from ktqueue.operators.packed import Bytes

Floats = native.Floats
# The root of the mean squared error as a share of that of normal weights. llama.cpp's quantisers reach the second
# number on this matrix without an importance matrix (ggml-quants.c of llama-cpp-python 0.3.36).
MOST_ERROR = {
    "Q4_0": (0.0815, 0.085),
    "Q4_1": (0.0695, 0.0769),
    "Q5_0": (0.0401, 0.042),
    "Q5_1": (0.0336, 0.0375),
    "Q8_0": (0.005, 0.0053),
    "Q2_K": (0.267, 0.2926),
    "Q3_K": (0.145, 0.1492),
    "Q4_K": (0.0695, 0.0699),
    "Q5_K": (0.0345, 0.0356),
    "Q6_K": (0.0168, 0.0173),
    "IQ4_NL": (0.0735, 0.0751),
    "IQ4_XS": (0.074, 0.0757),
    "MXFP4": (0.1128, 0.1134),
}


def normal(rows: int, columns: int = 512) -> Floats:
    return np.random.default_rng(3).normal(size=(rows, columns)).astype(np.float32) * np.float32(0.02)


def decoded(quant: str, packed: Bytes) -> Floats:
    values: Floats = gguf.dequantize(packed, gguf.GGMLQuantizationType[quant])
    return values


@pytest.mark.parametrize("quant", MOST_ERROR)
def test_errors_are_below_those_of_llama_cpp(quant: str) -> None:
    values = normal(32)
    bound, of_llama_cpp = MOST_ERROR[quant]
    error = decoded(quant, quantize(values, quant)) - values
    assert np.sqrt(np.square(error).mean() / np.square(values).mean()) < bound < of_llama_cpp


@pytest.mark.parametrize("quant", MOST_ERROR)
def test_importance_lowers_the_error_that_it_weights(quant: str) -> None:
    values, importance = normal(16), np.random.default_rng(4).lognormal(sigma=1.5, size=512).astype(np.float32)

    def weighted_error(packed: Bytes) -> float:
        return float((importance * np.square(decoded(quant, packed) - values)).mean())

    assert weighted_error(quantize(values, quant, importance)) < 0.99 * weighted_error(quantize(values, quant))
    np.testing.assert_array_equal(quantize(values, quant, np.zeros(512, np.float32)), quantize(values, quant))


def test_bytes_are_the_same_for_any_number_of_threads() -> None:
    values = normal(33, 256)
    threads = native.threads()
    packed = []
    for count in (1, 3):
        native.set_threads(count)
        packed.append([quantize(values, quant) for quant in MOST_ERROR])
    native.set_threads(threads)
    for one, three in zip(*packed, strict=True):
        np.testing.assert_array_equal(one, three)


@pytest.mark.parametrize("quant", MOST_ERROR)
def test_odd_rows_are_quantised(quant: str) -> None:
    """Rows are zero, constant, tiny, large, or have one outlier."""
    values = np.zeros((6, 256), np.float32)
    values[1], values[2], values[3] = 0.5, -0.5, normal(1, 256) * 1e-6
    values[4], values[5, 77] = normal(1, 256) * 1e5, -3.0
    found = decoded(quant, quantize(values, quant))
    assert np.isfinite(found).all() and (found[0] == 0).all()
    for row in (1, 2, 4, 5):
        assert np.abs(found[row] - values[row]).max() < 0.34 * np.abs(values[row]).max()


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16"])
def test_plain_formats_are_rounded_as_gguf_does(quant: str) -> None:
    values = normal(3, 33)
    expected = gguf.quantize(values, gguf.GGMLQuantizationType[quant]).view(np.uint8).reshape(3, -1)
    np.testing.assert_array_equal(quantize(values, quant), expected)
    assert {*MOST_ERROR, "F32", "F16", "BF16"} == {*WRITABLE}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant": "Q9_Z"}, "quant must be one of Q4_0, .*IQ4_XS, got 'Q9_Z'"),
        ({"values": np.full((2, 32), np.nan, np.float32)}, "row [01], column 0 is not a number, or its magnitude"),
        ({"values": np.zeros((2, 40), np.float32)}, "row length must be a multiple of 32 weights for Q4_0, got 40"),
        ({"row_size": 17}, r"out must have shape \[2, 18\], got \[2, 17\]"),
        ({"importance": np.zeros(31, np.float32)}, r"importance must have shape \[32\], got \[31\]"),
        ({"importance": np.full(32, -1, np.float32)}, "importance of column 0 must be finite and not below 0"),
        ({"importance": np.full(32, np.inf, np.float32)}, "importance of column 0 must be finite and not below 0"),
    ],
)
def test_what_cannot_be_quantised_is_refused(changes: dict[str, object], message: str) -> None:
    arguments = {"quant": "Q4_0", "values": np.zeros((2, 32), np.float32), "row_size": 18} | changes
    with pytest.raises(ValueError, match=message):
        native.quantize(**arguments)  # type: ignore[arg-type]
