"""A linear layer whose weights stay quantised in GPU memory.

Few rows are multiplied by the weights as they come from memory; for more, weights are decoded to a buffer that all such
layers share, and torch multiplies. Nothing waits for the device. Knows no format.
"""

from collections.abc import Iterator, Sequence

import torch

from ktqueue.operators.gpu.kernels import panel_layout
from ktqueue.operators.gpu.kernels.linear import few_rows_linear
from ktqueue.operators.gpu.kernels.panel_matrix import PanelMatrix, multiply_few

FEW_ROWS = 4
"""Up to here weights are multiplied as they come from memory, if rows are of 16 bits; beyond they are decoded first."""
DECODED_AT_ONCE = 1 << 24
"""Weights that are decoded at a time: 32 MB of 16 bits, less than the second-level cache of a large GPU."""


def stays_quantised(quant: str) -> bool:
    """Whether a matrix of this format is left as it is: not if it is one of floats, which gains nothing."""
    return quant not in panel_layout.FLOATS


class DecodedWeights:
    """The buffer for decoded weights, [weights]; a row of every matrix that was announced fits."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.weights = torch.empty(0, dtype=dtype, device=device)

    def announce(self, rows: int, columns: int) -> int:
        """A matrix of that shape will be decoded, DECODED_AT_ONCE weights at a time: by how many bytes the buffer has
        grown. Views of it that were taken before are of no use then."""
        wanted = max(min(rows * columns, DECODED_AT_ONCE), columns)
        grown = max(0, wanted - self.weights.numel())
        if grown:
            self.weights = self.weights.new_empty(wanted)
        return grown * self.weights.itemsize


class QuantisedLinear:
    """parts: rows of the matrix, one below the other, of the same columns; bias: [rows] or None."""

    def __init__(self, parts: Sequence[PanelMatrix], bias: torch.Tensor | None, decoded: DecodedWeights) -> None:
        self._parts = parts
        self._bias = bias
        self._decoded = decoded
        self._rows, self._columns = sum(part.rows for part in parts), parts[0].columns

    def __call__(self, x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """x [tokens, columns] -> [tokens, rows]; `dtype` as fused.few_rows_linear has it."""
        if 1 <= len(x) <= FEW_ROWS and x.dtype != torch.float32:
            out = x.new_empty(len(x), self._rows, dtype=dtype)
            multiply_few(self._parts, x, self._bias, out)
            return out
        products = []
        for first, weights in self._decoded_pieces():
            bias = None if self._bias is None else self._bias[first : first + len(weights)]
            products.append(few_rows_linear(x, weights, bias, dtype=dtype))
        return products[0] if len(products) == 1 else torch.cat(products, dim=1)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of `ids` [tokens] int64 of a matrix of one part: [tokens, columns] in the compute type."""
        (part,) = self._parts
        out = self._decoded.weights.new_empty(len(ids), self._columns)
        part.decode(out, ids=ids)
        return out

    def _decoded_pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, weights [rows, columns] in the compute type), each in the same place as the one before."""
        buffer = self._decoded.weights
        most = buffer.numel() // self._columns
        for first in range(0, self._rows, most):
            weights = buffer[: min(most, self._rows - first) * self._columns].view(-1, self._columns)
            row = 0
            for part in self._parts:
                begin, end = max(first, row), min(first + len(weights), row + part.rows)
                if begin < end:
                    part.decode(weights[begin - first : end - first], first=begin - row)
                row += part.rows
            yield first, weights
