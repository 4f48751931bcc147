"""Expert weights as they lie on disk: quantised rows, one array an expert. Knows no kernel and no file."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """One matrix of every expert: [rows, columns] weights in GGUF format `quant` (such as "Q4_K").

    data: one [rows * row_bytes] uint8 array an expert; views into a mapped file, any alignment.
    """

    quant: str
    rows: int
    columns: int
    data: Sequence[Bytes]

    @property
    def bytes(self) -> int:
        """Bytes of all experts together."""
        return sum(one.nbytes for one in self.data)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of one layer: gate and up [intermediate, hidden], down [hidden, intermediate]."""

    gate: PackedExperts
    up: PackedExperts
    down: PackedExperts

    @property
    def bytes(self) -> int:
        """Bytes of the three together."""
        return self.gate.bytes + self.up.bytes + self.down.bytes
