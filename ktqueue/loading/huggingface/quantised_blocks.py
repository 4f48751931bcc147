"""Weights of quantised folders as blocks of our formats, with the same values. Arrays in, bytes out; knows no names.

Codes are unsigned here: a weight is scale * (code - zero). Formats: weight_formats.py.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from ktqueue.loading.weight_formats import LAYOUTS, Bytes, Floats
from ktqueue.operators import native

Halves = npt.NDArray[np.float16]

GROUP = 32  # columns of a block of Q4_0, UINT4, Q8_0 and MXFP4
FP8_BLOCK = 128  # columns of a block of FP8
PART = 1 << 19  # weights
LARGE = 16 << 20  # weights; experts have fewer, and are converted beside each other (single_experts.py)
FP4_BLOCK, FP4_GROUP = 64, 16  # columns of a block of FP4, and those of its scales
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FLOAT4 = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
_HALF_STEP = 2.0**-25
"""The largest error of a half below 2^-14."""


def in_parts(rows: int, columns: int, convert: Callable[[slice], Bytes]) -> Bytes:
    """Return the bytes of a matrix, of which `convert` returns those of some rows.

    Parts have about PART weights and begin at multiples of 64 rows. Their intermediate arrays stay in the cache, and
    their memory is used again. A matrix of more than LARGE weights is converted on all threads of the kernels.
    """
    step = max(1, PART // columns // 64) * 64
    parts = [slice(row, row + step) for row in range(0, rows, step)]
    if rows * columns <= LARGE:
        return np.concatenate([*map(convert, parts)])
    with ThreadPoolExecutor(native.threads()) as threads:
        return np.concatenate([*threads.map(convert, parts)])


def nibbles(packed: Bytes) -> Bytes:
    """Return the nibbles of bytes [..., n] as [..., 2 * n], the lower half of each byte first."""
    out = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 15, out=out[..., 0])
    np.right_shift(packed, 4, out=out[..., 1])
    return out.reshape(*packed.shape[:-1], -1)


def awq_nibbles(packed: Bytes) -> Bytes:
    """Return the nibbles of AWQ's words [rows, 4 * words] of bytes as [rows, 8 * words], in the order of columns.

    A word has columns 0, 2, 4, 6, 1, 3, 5 and 7, the first in its lowest bits. Source: AutoAWQ's pack_awq.
    """
    words = packed.view("<u4")

    def apart(four: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:  # a nibble in each byte
        two = (four | four << np.uint32(8)) & np.uint32(0x00FF00FF)
        return (two | two << np.uint32(4)) & np.uint32(0x0F0F0F0F)

    even, odd = apart(words & np.uint32(0xFFFF)), apart(words >> np.uint32(16))
    return nibbles((even | odd << np.uint32(4)).view(np.uint8))


def transposed(codes: Bytes) -> Bytes:
    """Return codes [columns, rows] as [rows, columns], a copy.

    A few columns at once, so that lines of the copy stay in the cache: 20 times as fast as numpy's own copy.
    """
    out = np.empty(codes.shape[::-1], np.uint8)
    for first in range(0, len(codes), 16):
        out[:, first : first + 16] = codes[first : first + 16].T
    return out


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


def four_bit_blocks(columns: int, codes_of: Callable[[slice], Bytes], scales: Halves, zeros: Bytes | None) -> Bytes:
    """Return codes [rows, columns] below 16, with scales and zeros [rows, groups], as UINT4, without zeros as Q4_0.

    codes_of: returns the codes of some rows. Without zeros, each is 8. A group has the same number of columns, a
    multiple of 32.
    """

    def convert(part: slice) -> Bytes:
        return _four_bit_blocks(codes_of(part), scales[part], None if zeros is None else zeros[part])

    return in_parts(len(scales), columns, convert)


def _four_bit_blocks(codes: Bytes, scales: Halves, zeros: Bytes | None) -> Bytes:
    rows, columns = codes.shape
    out = np.empty((rows, columns // GROUP), LAYOUTS["Q4_0"] if zeros is None else LAYOUTS["UINT4"])
    times = columns // GROUP // scales.shape[1]
    out["d"] = np.repeat(scales, times, 1)
    if zeros is not None:
        out["zero"] = np.repeat(zeros, times, 1)
    _join_halves(codes, GROUP, out["q"])
    return out.reshape(-1).view(np.uint8)


def _join_halves(codes: Bytes, group: int, out: Bytes) -> None:
    """Write codes of four bits [rows, columns] to `out`, which has the bytes of a block. Of each group of columns, 16
    or 32, the first half becomes the lower nibbles, the second the higher ones."""
    eights = np.ascontiguousarray(codes).view("<u8").reshape(*codes.shape[:-1], -1, 2, group // 16)
    joined = eights[..., 0, :] | eights[..., 1, :] << np.uint64(4)
    out[...] = joined.view(np.uint8).reshape(out.shape)


def eight_bit_blocks(numbers: npt.NDArray[np.int8], scales: Halves) -> Bytes:
    """Return signed numbers [rows, columns], with scales [rows, groups], as Q8_0."""
    rows, columns = numbers.shape
    out = np.empty((rows, columns // GROUP), LAYOUTS["Q8_0"])
    out["d"] = np.repeat(scales, columns // GROUP // scales.shape[1], 1)
    out["q"] = numbers.reshape(rows, -1, GROUP)
    return out.reshape(-1).view(np.uint8)


def float8_blocks(numbers: Bytes, scales: Floats) -> Bytes:
    """Return numbers in float8_e4m3fn [rows, columns], with scales [rows, columns / 128], as FP8."""
    rows = len(numbers)
    out = np.empty(scales.shape, LAYOUTS["FP8"])
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


def reciprocal(divisor: float) -> tuple[float, float]:
    """Return d and r, both float32, so that scale * (d + r), rounded once, is scale / divisor for scales of E4M3.

    divisor: a float32 from 2^-60 to 2^60, divided by as float32. d + r has at most 44 bits, so its product with a
    scale, which has four, is exact in float64. Raises ValueError if there are no such numbers.
    """
    scales = np.arange(8, 16, dtype=np.float32)  # all other scales are these times powers of two
    quotients = scales / np.float32(divisor)
    mantissa, exponent = math.frexp(1 / divisor)
    nearest = round(math.ldexp(mantissa, 44))
    for number in (nearest, nearest + 1, nearest - 1):
        factor = math.ldexp(number, exponent - 44)
        if np.array_equal((scales.astype(np.float64) * factor).astype(np.float32), quotients):
            d = float(np.float32(factor))
            return d, factor - d
    raise ValueError(f"no two numbers of float32 stand for a division by {divisor}")


def float4_blocks(codes: Bytes, scales: Bytes, factors: tuple[float, float]) -> Bytes:
    """Return numbers of float4_e2m1 [rows, columns] by their codes, with scales in E4M3 [rows, columns / 16], as FP4.

    factors: d and r of all blocks. The columns are a multiple of 64.
    """
    rows, columns = codes.shape
    out = np.empty((rows, columns // FP4_BLOCK), LAYOUTS["FP4"])
    out["d"], out["r"] = factors
    out["e"] = scales.reshape(rows, -1, 4)
    _join_halves(codes, FP4_GROUP, out["q"])
    return out.reshape(-1).view(np.uint8)


def mxfp4_blocks(codes: Bytes, exponents: Bytes) -> Bytes:
    """Return numbers of float4_e2m1 [rows, columns] by their codes, with exponents [rows, columns / 32], as MXFP4."""
    out = np.empty(exponents.shape, LAYOUTS["MXFP4"])
    out["e"] = exponents
    _join_halves(codes, GROUP, out["q"])
    return out.reshape(-1).view(np.uint8)


def float4_floats(codes: Bytes, scales: Floats) -> Bytes:
    """Return numbers of float4_e2m1 [rows, columns] by their codes, with scales [rows, columns / 16], as F32.

    The lower three bits of a code are a magnitude, the highest is its sign. Source: OCP Microscaling Formats 1.0.
    """
    by_column = np.repeat(scales, codes.shape[1] // scales.shape[1], 1)
    return (_FLOAT4[codes] * by_column).reshape(-1).view(np.uint8)


def spread(scales: Floats, block: tuple[int, int], shape: tuple[int, int]) -> Floats:
    """Return scales of blocks of rows and columns as one for each row and column of `shape`.

    Blocks at the ends may be cut.
    """
    return np.repeat(np.repeat(scales, block[0], 0)[: shape[0]], block[1], 1)[:, : shape[1]]
