"""The noise of sampling: a pure function of seed, choice index and position, so that every worker can repeat it.

It is splitmix64 over the three numbers (Steele, Lea, Flood 2014; constants from Vigna's public-domain splitmix64.c).
"""

import numpy as np
from numpy.typing import NDArray

_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    x = (x + _GAMMA) & _MASK
    x = ((x ^ (x >> 30)) * _FIRST) & _MASK
    x = ((x ^ (x >> 27)) * _SECOND) & _MASK
    return x ^ (x >> 31)


def stream(seed: int, index: int) -> int:
    """64 bits that identify one choice of a request. `seed` is a signed 64-bit integer."""
    return _mix(_mix(seed & _MASK) ^ index)


def uniform(streams: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """A number in [0, 1) with 53 random bits for each row. Arguments and result are [rows]."""
    x = (streams ^ positions.astype(np.uint64)) + np.uint64(_GAMMA)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
