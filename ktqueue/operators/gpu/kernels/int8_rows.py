"""Activations as int8 with one scale for each slab of 32 columns, as the integer dot products of experts want them.

x[column] = scale * code up to rounding, scale = max |x| / 127 of the slab, as csrc/formats/activations.h has it for the
CPU. A slab with an infinity or a NaN has the scale NaN, which poisons the results of that row and of no other. Sums are
of codes, not of x, for minimums too: what is multiplied is one row of rounded activations, so that rounding errors meet
whole weights (whose mean is near zero) and not their codes.
"""

from dataclasses import dataclass

import torch

from ktqueue.operators.gpu.kernels.panel_layout import SLAB


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """codes [rows, columns] int8; scales [rows, slabs] float32; sums [rows, slabs] int32: the sum of the codes of
    columns 0 .. 15 of the slab, plus 65536 times that of columns 16 .. 31."""

    codes: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device) -> "Int8Rows":
        """To be written. columns: a multiple of 32."""
        slabs = columns // SLAB
        return cls(
            torch.empty(rows, columns, dtype=torch.int8, device=device),
            torch.empty(rows, slabs, dtype=torch.float32, device=device),
            torch.empty(rows, slabs, dtype=torch.int32, device=device),
        )

    @classmethod
    def quantise(cls, x: torch.Tensor) -> "Int8Rows":
        """x [rows, columns] of any float type; the twin of what the kernels do."""
        slabs = x.float().view(len(x), -1, SLAB)
        largest = slabs.abs().amax(2)
        finite = slabs.isfinite().all(2)
        inverse = torch.where(finite & (largest > 0), torch.full_like(largest, 127.0) / largest, 0.0)
        codes = torch.where(finite[:, :, None], slabs * inverse[:, :, None], 0.0).round().to(torch.int8)
        halves = codes.int().view(len(x), -1, 2, SLAB // 2).sum(3, dtype=torch.int32)
        scales = torch.where(finite, largest / 127.0, torch.nan)
        return cls(codes.view(x.shape), scales, halves[:, :, 0] + 65536 * halves[:, :, 1])

    def floats(self) -> torch.Tensor:
        """[rows, columns] float32: what the codes stand for."""
        slabs = self.codes.view(*self.scales.shape, SLAB).float() * self.scales[:, :, None]
        return slabs.view(self.codes.shape)
