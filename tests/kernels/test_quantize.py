"""Quantisers of weights: errors of what gguf decodes, weights of errors, threads, and refused values."""

import gguf
import numpy as np
import pytest

from ktqueue.loading.quantize import WRITABLE, quantize
from ktqueue.operators import native
from ktqueue.operators.packed import Bytes

Floats = native.Floats
# Roots of the mean squared error as a share of that of normal weights: what ours stay below, and what llama.cpp's
# quantisers reach on this matrix, without importance and with it (ggml-quants.c of llama-cpp-python 0.3.36).
MOST_ERROR = {
    "Q4_0": (0.0802, 0.085, 0.0727),
    "Q4_1": (0.0687, 0.0769, 0.0575),
    "Q5_0": (0.0396, 0.042, 0.0357),
    "Q5_1": (0.0332, 0.0375, 0.0275),
    "Q8_0": (0.00496, 0.0053, 0.0052),
    "Q2_K": (0.2635, 0.2926, 0.2063),
    "Q3_K": (0.143, 0.1492, 0.1233),
    "Q4_K": (0.0691, 0.0699, 0.0589),
    "Q5_K": (0.0341, 0.0356, 0.03),
    "Q6_K": (0.0166, 0.0173, 0.0147),
    "IQ4_NL": (0.0726, 0.0751, 0.0649),
    "IQ4_XS": (0.0733, 0.0757, 0.0658),
    "MXFP4": (0.1123, 0.1134, 0.1119),
}


def normal(rows: int, columns: int = 512) -> Floats:
    return np.random.default_rng(3).normal(size=(rows, columns)).astype(np.float32) * np.float32(0.02)


def decoded(quant: str, packed: Bytes) -> Floats:
    values: Floats = gguf.dequantize(packed, gguf.GGMLQuantizationType[quant])
    return values


@pytest.mark.parametrize("quant", MOST_ERROR)
def test_errors_are_below_those_of_llama_cpp(quant: str) -> None:
    values = normal(32)
    bound, of_llama_cpp, _ = MOST_ERROR[quant]
    error = decoded(quant, quantize(values, quant)) - values
    assert np.sqrt(np.square(error).mean() / np.square(values).mean()) < bound < of_llama_cpp


@pytest.mark.parametrize("quant", MOST_ERROR)
def test_importance_lowers_the_error_that_it_weights(quant: str) -> None:
    values, importance = normal(16), np.random.default_rng(4).lognormal(sigma=1.5, size=512).astype(np.float32)

    def weighted_error(packed: Bytes) -> float:
        return float((importance * np.square(decoded(quant, packed) - values)).mean())

    found = weighted_error(quantize(values, quant, importance))
    assert found < 0.99 * weighted_error(quantize(values, quant))
    assert np.sqrt(found / (importance * np.square(values)).mean()) < MOST_ERROR[quant][2]  # of llama.cpp
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
