"""Weights as they lie on disk: quantised rows; of experts, one array each. Knows no kernel and no file."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """[rows, columns] weights in GGUF format `quant` (such as "Q4_K").

    data: [rows * row_bytes] uint8; may be a view into a mapped file, any alignment.
    """

    quant: str
    rows: int
    columns: int
    data: Bytes


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """One matrix of every expert: [rows, columns] weights in GGUF format `quant` (such as "Q4_K").

    data: one [rows * row_bytes] uint8 array an expert; views into a mapped file, any alignment.
    bias: [experts, rows] float32, where the family has one.
    """

    quant: str
    rows: int
    columns: int
    data: Sequence[Bytes]
    bias: npt.NDArray[np.float32] | None = None

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


class ModuleWeights(Protocol):
    """The stored weights of one module and all below it, by their names relative to it, such as `q_proj.weight`.

    Tied parameters can be had under each of their names. All but `has` raise an error that names the file and the
    tensor where there is no such weight.
    """

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""

    def matrix(self, name: str) -> PackedMatrix:
        """A two-dimensional tensor as it is stored, its rows in transformers' order."""

    def vector(self, name: str) -> Floats:
        """A one-dimensional tensor as float32."""

    def experts(self, name: str) -> ExpertWeights:
        """The routed experts of the experts module `name` ("": of this module)."""
