"""The noise of sampling: a pure function of (seed, choice index, position), so that it can be repeated anywhere.

splitmix64 (Steele, Lea, Flood 2014; constants from Vigna's public-domain splitmix64.c) over the three numbers.
"""

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + _GAMMA
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


def uniform(seed: NDArray[np.int64], index: NDArray[np.int64], position: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) a row, of 53 random bits. All arguments and the result are [rows]."""
    state = _mix(seed.astype(np.uint64))
    state = _mix(state ^ index.astype(np.uint64))
    state = _mix(state ^ position.astype(np.uint64))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
