"""Random weights written directly in a storage format: valid blocks with a given standard deviation.

No quantiser runs. Payload bits are uniform, and scales are chosen so that the decoded weights are centred on zero. The
layouts are ggml's (ggml-common.h).
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from ktqueue.loading.quantize import quantize
from ktqueue.loading.weight_formats import LAYOUTS, Bytes

GROUP = 32  # elements per block in formats without blocks
_JITTER = 0.25  # relative variation of block scales, up and down
_SCALES = range(16, 32)  # of 64: large enough to vary, small enough for a normal half float as block scale
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
_E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()  # without a sign, ascending

# The root mean square of weights of random bits for d = 1. It is sqrt(mean of the grid's squares) times that of scales.
_GRID_UNITS = {
    "IQ2_XXS": 53.36,
    "IQ2_XS": 55.90,
    "IQ2_S": 56.39,
    "IQ3_XXS": 142.41,
    "IQ3_S": 140.24,
    "IQ1_S": 7.20,
    "IQ1_M": 7.20,
}
Blocks = np.ndarray[Any, np.dtype[np.void]]
Random = np.random.Generator
Scales = np.ndarray[Any, np.dtype[np.float64]]


def random_blocks(quant: str, count: int, deviation: float, random: Random) -> Bytes:
    """Return [count, bytes per block] of weights around 0 with the standard deviation `deviation`.

    F32, F16 and BF16 are normally distributed.
    """
    if quant not in LAYOUTS:
        values = random.standard_normal((count, GROUP), np.float32)
        return quantize(values * np.float32(deviation), quant)
    layout = LAYOUTS[quant]
    blocks = np.frombuffer(bytearray(random.bytes(count * layout.itemsize)), layout)
    _SET[quant](blocks, deviation, random)
    return blocks.view(np.uint8).reshape(count, layout.itemsize)


def _rms(values: Iterable[float]) -> float:
    return float(np.sqrt(np.mean(np.square(list(values), dtype=np.float64))))


def _scale(blocks: Blocks, unit: float, deviation: float, random: Random) -> None:
    """Set `d`. `unit` is the standard deviation of the weights for d = 1."""
    blocks["d"] = _jittered(len(blocks), unit, deviation, random)


def _jittered(count: int, unit: float, deviation: float, random: Random) -> Scales:
    middle = deviation / unit / float(np.sqrt(1 + _JITTER**2 / 3))
    return middle * random.uniform(1 - _JITTER, 1 + _JITTER, count)


def _flip(blocks: Blocks, random: Random) -> None:
    """Give `d` a random sign, which centres an asymmetric table of values."""
    blocks["d"] *= random.choice(np.array([-1, 1], np.float16), len(blocks))


def _q4_0(blocks: Blocks, deviation: float, random: Random) -> None:
    _scale(blocks, _rms(range(-8, 8)), deviation, random)
    _flip(blocks, random)


def _q8_0(blocks: Blocks, deviation: float, random: Random) -> None:
    np.maximum(blocks["q"], -127, out=blocks["q"])  # as quantisers do
    _scale(blocks, _rms([*range(-127, 128), -127]), deviation, random)


def _q2_k(blocks: Blocks, deviation: float, random: Random) -> None:
    """Weight d * scale * q - dmin * min with min = scale and dmin = 1.5 d: centred."""
    scales = random.integers(4, 16, blocks["scales"].shape, np.uint8)
    blocks["scales"] = scales | scales << 4
    _scale(blocks, _rms(range(4, 16)) * _rms((-1.5, -0.5, 0.5, 1.5)), deviation, random)
    blocks["dmin"] = 1.5 * blocks["d"]


def _q3_k(blocks: Blocks, deviation: float, random: Random) -> None:
    """Scales are 6 bits minus 32, so random bytes give both signs."""
    _scale(blocks, _rms(range(-32, 32)) * _rms(range(-4, 4)), deviation, random)


def _min_and_scale(levels: int) -> Callable[[Blocks, float, Random], None]:
    """Q4_K (16 levels) and Q5_K (32): min = scale and dmin = middle level * d, which centres the weights."""
    middle = (levels - 1) / 2

    def fill(blocks: Blocks, deviation: float, random: Random) -> None:
        scales = random.integers(_SCALES.start, _SCALES.stop, (len(blocks), 8), np.uint8)
        low, high = scales[:, :4], scales[:, 4:]
        packed = blocks["scales"]  # groups 0-3: scales, mins; groups 4-7: low nibbles, their high bits above the others
        packed[:, 0:4] = packed[:, 4:8] = low | high >> 4 << 6
        packed[:, 8:12] = high & 15 | high << 4
        _scale(blocks, _rms(_SCALES) * _rms(level - middle for level in range(levels)), deviation, random)
        blocks["dmin"] = middle * blocks["d"]

    return fill


def _q6_k(blocks: Blocks, deviation: float, random: Random) -> None:
    sign = random.choice(np.array([-1, 1], np.int8), blocks["scales"].shape)
    blocks["scales"] = sign * random.integers(_SCALES.start, _SCALES.stop, sign.shape, np.int8)
    _scale(blocks, _rms(_SCALES) * _rms(range(-32, 32)), deviation, random)


def _iq4_nl(blocks: Blocks, deviation: float, random: Random) -> None:
    _scale(blocks, _rms(_IQ4), deviation, random)
    _flip(blocks, random)


def _iq4_xs(blocks: Blocks, deviation: float, random: Random) -> None:
    """Scales are like those of Q3_K."""
    _scale(blocks, _rms(range(-32, 32)) * _rms(_IQ4), deviation, random)


def _mxfp4(blocks: Blocks, deviation: float, random: Random) -> None:
    """The scale is a power of two. The two nearest powers are mixed so that the mean square is right."""
    wanted = deviation / _rms(_MXFP4)
    exponent = np.floor(np.log2(wanted))
    larger = ((wanted / 2**exponent) ** 2 - 1) / 3
    blocks["e"] = 127 + exponent + (random.random(len(blocks)) < larger)


def _nvfp4(blocks: Blocks, deviation: float, random: Random) -> None:
    """The two scales nearest to the wanted one are mixed so that the mean square is right."""
    wanted = deviation / _rms(_MXFP4)
    lower = int(np.searchsorted(_E4M3, wanted, side="right")) - 1
    below, above = _E4M3[lower : lower + 2] ** 2
    blocks["e"] = lower + (random.random(blocks["e"].shape) < (wanted**2 - below) / (above - below))


def _with_minimum(levels: int) -> Callable[[Blocks, float, Random], None]:
    """Q4_1 (16 levels) and Q5_1 (32): m = -middle level * d, which centres the weights."""
    middle = (levels - 1) / 2

    def fill(blocks: Blocks, deviation: float, random: Random) -> None:
        _scale(blocks, _rms(level - middle for level in range(levels)), deviation, random)
        blocks["m"] = -middle * blocks["d"]

    return fill


def _uint4(blocks: Blocks, deviation: float, random: Random) -> None:
    """Zero points are 7 and 8, which centres the weights."""
    blocks["zero"] = 7 + (blocks["zero"] & 1)
    _scale(blocks, _rms((*range(-8, 8), *range(-7, 9))), deviation, random)


def _fp8(blocks: Blocks, deviation: float, random: Random) -> None:
    """All numbers but NaN, so most weights are small."""
    np.copyto(blocks["q"], 0, where=(blocks["q"] & 127) == 127)
    _scale(blocks, _rms((*_E4M3, 0)), deviation, random)


def _fp4(blocks: Blocks, deviation: float, random: Random) -> None:
    """All blocks have the same d, and scales near 100."""
    unit = 100 * _rms(_MXFP4)
    _nvfp4(blocks, unit, random)
    blocks["d"], blocks["r"] = deviation / unit, 0


def _grid(quant: str) -> Callable[[Blocks, float, Random], None]:
    def fill(blocks: Blocks, deviation: float, random: Random) -> None:
        _scale(blocks, _GRID_UNITS[quant], deviation, random)
        _flip(blocks, random)

    return fill


def _iq1_m(blocks: Blocks, deviation: float, random: Random) -> None:
    """Four bits of the half `d` are the upper ones of each word."""
    d = _jittered(len(blocks), _GRID_UNITS["IQ1_M"], deviation, random)
    d *= random.choice(np.array([-1, 1]), len(blocks))
    bits = d.astype(np.float16).view(np.uint16)[:, None] >> np.arange(0, 16, 4, dtype=np.uint16)
    blocks["words"] = blocks["words"] & 0x0FFF | bits << 12


_SET: dict[str, Callable[[Blocks, float, Random], None]] = {
    "Q4_0": _q4_0,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _min_and_scale(16),
    "Q5_K": _min_and_scale(32),
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    **{quant: _grid(quant) for quant in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S")},
    "IQ1_M": _iq1_m,
    "NVFP4": _nvfp4,
    "Q4_1": _with_minimum(16),
    "Q5_1": _with_minimum(32),
    "UINT4": _uint4,
    "FP8": _fp8,
    "FP4": _fp4,
}
