"""Dense weights on a device, decoded to the compute type or as quantised as they are stored; matrices that share their
input are one.

Knows ModuleWeights, no file and no layer.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, Protocol

import numpy as np
import torch

from ktqueue.operators import native
from ktqueue.operators.gpu.kernels.linear import few_rows_linear
from ktqueue.operators.gpu.kernels.panel_matrix import PanelMatrix
from ktqueue.operators.gpu.quantised_linear import DecodedWeights, QuantisedLinear, stays_quantised
from ktqueue.operators.packed import ModuleWeights, PackedMatrix

logger = logging.getLogger(__name__)

DenseType = Literal["dequantised", "quantised"]
"""How dense matrices are held: in the compute type, or in that of the file where it is a quantised one."""
DEFAULT_DENSE: DenseType = "dequantised"
ONE_PRODUCT = (
    {"q_proj", "k_proj", "v_proj"},
    {"gate_proj", "up_proj"},
    {"q_proj", "kv_a_proj_with_mqa"},
    {"q_a_proj", "kv_a_proj_with_mqa"},
)
"""Linear modules of one module that share their input, and so are one."""
AT_ONCE = 1 << 22  # weights that a thread has as float32 at one time: 16 MB


class Linear(Protocol):
    """A linear layer, however its weights [rows, columns] are held."""

    def __call__(self, x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """x [tokens, columns] -> [tokens, rows]; `dtype` as fused.few_rows_linear has it."""

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weights: ids [tokens] int64 -> [tokens, columns] in the compute type."""


@dataclass(frozen=True, slots=True)
class Dense:
    """Linear of decoded weights. weight: [rows, columns]; bias: [rows] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See Linear."""
        return few_rows_linear(x, self.weight, self.bias, dtype=dtype)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return torch.nn.functional.embedding(ids, self.weight)


class DenseWeights:
    """The dense weights of a model, put on `device` in `dtype` as they are asked for; linear layers by `kind`.

    bytes: of all so far.
    """

    def __init__(
        self, weights: ModuleWeights, dtype: torch.dtype, device: str, kind: DenseType = "dequantised"
    ) -> None:
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self._kind = kind
        self._decoded = DecodedWeights(dtype, device)
        self._floats: set[str] = set()  # formats that were to stay quantised and are not
        self.bytes = 0

    def vector(self, name: str) -> torch.Tensor:
        """A one-dimensional tensor, [size]."""
        return self._count(torch.from_numpy(self._weights.vector(name)).to(self._device, self._dtype, copy=True))

    def matrix(self, name: str) -> torch.Tensor:
        """A two-dimensional tensor, [rows, columns]."""
        return self._stacked([self._weights.matrix(name)])

    def linear(self, *modules: str) -> Linear:
        """The linear modules of these names as one, their rows one below the other; where one has a bias, all do."""
        parts = [self._weights.matrix(f"{name}.weight") for name in modules]
        if len({part.columns for part in parts}) != 1:
            raise ValueError(f"matrices with {[part.columns for part in parts]} columns do not share their input")
        biases = [f"{name}.bias" for name in modules if self._weights.has(f"{name}.bias")]
        if 0 < len(biases) < len(modules):
            raise ValueError(f"of {', '.join(modules)} only some have a bias")
        bias = torch.cat([self.vector(name) for name in biases]) if biases else None
        if self._kind == "quantised":
            if all(stays_quantised(part.quant) for part in parts):
                return QuantisedLinear(self._packed(parts), bias, self._decoded)
            self._say_decoded({part.quant for part in parts if not stays_quantised(part.quant)})
        return Dense(self._stacked(parts), bias)

    def _packed(self, parts: Sequence[PackedMatrix]) -> list[PanelMatrix]:
        """Neighbours of one format are one part."""
        columns = parts[0].columns
        self.bytes += self._decoded.announce(sum(part.rows for part in parts), columns)
        found = []
        for quant, alike in groupby(parts, lambda part: part.quant):
            same = list(alike)
            data = np.concatenate([part.data for part in same]) if len(same) > 1 else same[0].data
            found.append(
                PanelMatrix.pack(PackedMatrix(quant, sum(part.rows for part in same), columns, data), self._device)
            )
            self.bytes += found[-1].packed.nbytes
        return found

    def _say_decoded(self, quants: set[str]) -> None:
        if new := quants - self._floats:
            logger.warning("dense matrices with %s are decoded, they cannot stay as they are", ", ".join(sorted(new)))
            self._floats |= quants

    def _stacked(self, parts: Sequence[PackedMatrix]) -> torch.Tensor:
        columns = parts[0].columns
        out = torch.empty(sum(part.rows for part in parts), columns, dtype=self._dtype, device=self._device)
        pieces, row, step = [], 0, max(1, AT_ONCE // columns)  # (matrix, its first row, where the rows go)
        for part in parts:
            target = out[row : row + part.rows]
            pieces += [(part, first, target[first : first + step]) for first in range(0, part.rows, step)]
            row += part.rows
        with ThreadPoolExecutor(native.threads()) as threads:
            for _ in threads.map(_decode, *zip(*pieces, strict=True)):
                pass
        return self._count(out)

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        self.bytes += tensor.nbytes
        return tensor


def _decode(matrix: PackedMatrix, first: int, target: torch.Tensor) -> None:
    """Dequantise the matrix's rows from `first` on into `target`."""
    row_bytes = native.row_bytes(matrix.quant, matrix.columns)
    data = matrix.data[first * row_bytes : (first + len(target)) * row_bytes]
    decoded = native.dequantize(matrix.quant, data, target.numel())
    target.copy_(torch.from_numpy(decoded).view(target.shape).to(target.device))
