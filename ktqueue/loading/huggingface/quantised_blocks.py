"""Weights of quantised folders as blocks of our formats, with the same values. Arrays in, bytes out; knows no names.

Codes are unsigned here: a weight is scale * (code - zero). Formats: weight_formats.py.
"""

import numpy as np
import numpy.typing as npt

from ktqueue.loading.weight_formats import Bytes, Floats

Halves = npt.NDArray[np.float16]

GROUP = 32  # columns of a block of Q4_0, UINT4 and Q8_0
FP8_BLOCK = 128  # columns of a block of FP8
_Q4_0 = np.dtype([("d", "<f2"), ("low", "u1", 16)])
_UINT4 = np.dtype([("d", "<f2"), ("zero", "u1"), ("low", "u1", 16)])
_Q8_0 = np.dtype([("d", "<f2"), ("q", "i1", 32)])
_FP8 = np.dtype([("d", "<f4"), ("q", "u1", 128)])
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of each of the eight nibbles of a word, lowest first. Source: AutoAWQ's pack_awq."""
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FLOAT4 = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
_HALF_STEP = 2.0**-25
"""The largest error of a half below 2^-14."""


def nibbles(packed: Bytes) -> Bytes:
    """Return the nibbles of bytes [..., n] as [..., 2 * n], the lower half of each byte first."""
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)


def awq_nibbles(packed: Bytes) -> Bytes:
    """Return the nibbles of AWQ's words [rows, 4 * words] of bytes as [rows, 8 * words], in the order of columns."""
    words = nibbles(packed).reshape(len(packed), -1, 8)
    out = np.empty_like(words)
    out[..., _AWQ_ORDER] = words
    return out.reshape(len(packed), -1)


def as_halves(scales: Floats) -> Halves:
    """Return scales as halves. Raises ValueError with the first value that they do not hold.

    Values below 2^-14 become multiples of 2^-24, which changes a weight of four bits by at most 2^-21.
    """
    with np.errstate(over="ignore"):
        halves: Halves = scales.astype(np.float16)
        wrong = ~(np.abs(halves.astype(np.float32) - scales) <= _HALF_STEP)
    if wrong.any():
        raise ValueError(f"a scale is {scales[wrong][0]}, which float16 does not hold")
    return halves


def four_bit_blocks(codes: Bytes, scales: Halves, zeros: Bytes | None) -> Bytes:
    """Return codes [rows, columns] below 16, with scales and zeros [rows, groups], as UINT4, without zeros as Q4_0.

    Without zeros, each is 8. A group has the same number of columns, a multiple of 32.
    """
    rows, columns = codes.shape
    out = np.empty((rows, columns // GROUP), _Q4_0 if zeros is None else _UINT4)
    times = columns // GROUP // scales.shape[1]
    out["d"] = np.repeat(scales, times, 1)
    if zeros is not None:
        out["zero"] = np.repeat(zeros, times, 1)
    blocks = codes.reshape(rows, -1, GROUP)
    np.bitwise_or(blocks[..., :16], blocks[..., 16:] << 4, out=out["low"])
    return out.reshape(-1).view(np.uint8)


def eight_bit_blocks(numbers: npt.NDArray[np.int8], scales: Halves) -> Bytes:
    """Return signed numbers [rows, columns], with scales [rows, groups], as Q8_0."""
    rows, columns = numbers.shape
    out = np.empty((rows, columns // GROUP), _Q8_0)
    out["d"] = np.repeat(scales, columns // GROUP // scales.shape[1], 1)
    out["q"] = numbers.reshape(rows, -1, GROUP)
    return out.reshape(-1).view(np.uint8)


def float8_blocks(numbers: Bytes, scales: Floats) -> Bytes:
    """Return numbers in float8_e4m3fn [rows, columns], with scales [rows, columns / 128], as FP8."""
    rows = len(numbers)
    out = np.empty(scales.shape, _FP8)
    out["d"] = scales
    out["q"] = numbers.reshape(rows, -1, FP8_BLOCK)
    return out.reshape(-1).view(np.uint8)


def float8_values(codes: Bytes) -> Floats:
    """Return numbers of float8_e4m3fn as float32, in the shape of `codes`.

    Their bits are those of halves whose exponent is smaller by 8, except for NaN.
    """
    bits = (codes & 0x80).astype(np.uint16) << 8 | (codes & 0x7F).astype(np.uint16) << 7
    values: Floats = bits.view(np.float16).astype(np.float32) * np.float32(256)
    return values


def float8_floats(numbers: Bytes, scales: Floats) -> Bytes:
    """Return numbers in float8_e4m3fn, with scales, both [rows, columns], as F32."""
    return (float8_values(numbers) * scales).reshape(-1).view(np.uint8)


def float4_floats(codes: Bytes, scales: Floats) -> Bytes:
    """Return numbers of float4_e2m1 [rows, columns] by their codes, with scales [rows, columns / 16], as F32.

    The lower three bits of a code are a magnitude, the highest is its sign. Source: OCP Microscaling Formats 1.0.
    """
    by_column = np.repeat(scales, codes.shape[1] // scales.shape[1], 1)
    return (_FLOAT4[codes] * by_column).reshape(-1).view(np.uint8)


def signed_floats(numbers: npt.NDArray[np.int8], scales: Floats) -> Bytes:
    """Return signed numbers, with scales, both [rows, columns], as F32."""
    return (numbers * scales).reshape(-1).view(np.uint8)


def spread(scales: Floats, block: tuple[int, int], shape: tuple[int, int]) -> Floats:
    """Return scales of blocks of rows and columns as one for each row and column of `shape`.

    Blocks at the ends may be cut.
    """
    return np.repeat(np.repeat(scales, block[0], 0)[: shape[0]], block[1], 1)[:, : shape[1]]
