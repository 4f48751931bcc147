"""Weights in their stored format: quantised rows; for experts, one array each. Knows no kernel and no file."""

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

    data: [rows * row_bytes] uint8, any alignment; may be a view of a mapped file.
    """

    quant: str
    rows: int
    columns: int
    data: Bytes


@dataclass(frozen=True, slots=True)
class JoinedMatrix(PackedMatrix):
    """The matrix that expands latents, decoded from two matrices of the file. keys: its rows for keys, transposed for
    each head, [heads * latent, plain]; values: its rows for values, [heads * value, latent]."""

    keys: PackedMatrix
    values: PackedMatrix


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """One matrix of every expert: [rows, columns] weights in GGUF format `quant` (such as "Q4_K").

    data: one [rows * row_bytes] uint8 array per expert, any alignment; may be views of a mapped file.
    bias: [experts, rows] float32, or None.
    """

    quant: str
    rows: int
    columns: int
    data: Sequence[Bytes]
    bias: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of one layer: gate and up [intermediate, hidden], down [hidden, intermediate]."""

    gate: PackedExperts
    up: PackedExperts
    down: PackedExperts


class ModuleWeights(Protocol):
    """The stored weights of one module and everything below it, by names relative to it, such as `q_proj.weight`.

    Tied parameters are found under each of their names. For a missing weight, all methods except `has` raise an error
    that names the file and the tensor.
    """

    def has(self, name: str) -> bool:
        """Return whether there is a tensor with that name."""

    def matrix(self, name: str) -> PackedMatrix:
        """Return a two-dimensional tensor in its stored format, with its rows in transformers' order."""

    def vector(self, name: str) -> Floats:
        """Return a vector, or a tensor of three dimensions such as a convolution, as float32 in its own shape. A matrix
        of one row is a vector."""

    def experts(self, name: str) -> ExpertWeights:
        """Return the routed experts of the experts module `name` ("": of this module)."""
