"""A matrix in GPU memory as the CPU's kernels pack it (csrc/formats/panel_layout.h): made, decoded, multiplied.

Each has a Triton kernel for CUDA tensors and a torch twin for all others. Knows no layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ktqueue.operators import native
from ktqueue.operators.gpu.copy_stream import host_bytes
from ktqueue.operators.gpu.kernels import panel_layout
from ktqueue.operators.packed import PackedMatrix


@dataclass(frozen=True, slots=True)
class Panels:
    """Rows of a matrix in GPU memory. packed: [bytes] uint8, panels of a block format one after the other."""

    packed: torch.Tensor
    quant: str
    rows: int
    columns: int

    @classmethod
    def pack(cls, matrix: PackedMatrix, device: str) -> "Panels":
        """Pack the matrix by the CPU's kernels, and copy it. Raises ValueError where a scale is not finite."""
        linear = native.Linear(matrix.quant, matrix.rows, matrix.columns, matrix.data)
        packed = host_bytes(*linear.range).to(device, copy=True)
        return cls(packed, matrix.quant, matrix.rows, matrix.columns)

    def decode(self, out: torch.Tensor, *, first: int = 0, ids: torch.Tensor | None = None) -> None:
        """out [count, columns] of any float type = the rows from `first` on, or those of `ids` [count] int64."""
        if out.is_cuda:
            from ktqueue.operators.gpu.kernels import matrix as triton_matrix

            triton_matrix.decode(self, out, first=first, ids=ids)
            return
        panels = self.packed.view(panel_layout.panel_count(self.rows), -1)
        numbers = torch.arange(first, first + len(out)) if ids is None else ids
        used, place = np.unique(numbers.numpy() // panel_layout.PANEL_ROWS, return_inverse=True)
        decoded = panel_layout.dequantize(panels[torch.from_numpy(used)], self.quant, self.columns)
        out.copy_(decoded[torch.from_numpy(place) * panel_layout.PANEL_ROWS + numbers % panel_layout.PANEL_ROWS])


def multiply_few(parts: Sequence[Panels], x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """out [tokens, rows of all parts] = x [tokens, columns] times all of them transposed, plus bias [rows of all].

    For few tokens of 16 bits. Weights are not rounded; sums are float32.
    """
    row = 0
    if out.is_cuda:
        from ktqueue.operators.gpu.kernels import matrix as triton_matrix

        for i in range(0, len(parts), 2):
            rows = sum(part.rows for part in parts[i : i + 2])
            added = None if bias is None else bias[row : row + rows]
            triton_matrix.few_rows(parts[i : i + 2], x, added, out[:, row : row + rows])
            row += rows
        return
    weights = torch.empty(out.shape[1], x.shape[1])
    for part in parts:
        part.decode(weights[row : row + part.rows])
        row += part.rows
    out.copy_(torch.nn.functional.linear(x.float(), weights, None if bias is None else bias.float()))
