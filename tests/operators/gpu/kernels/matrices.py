"""Random matrices in packed panels, and what they decode to."""

from collections.abc import Callable

import numpy as np
import torch

from ktqueue.loading import weight_formats
from ktqueue.operators import native
from ktqueue.operators.gpu.kernels import panel_layout
from ktqueue.operators.gpu.kernels.panel_matrix import PanelMatrix
from ktqueue.operators.packed import Bytes, PackedMatrix

BLOCKS = [quant for quant in native.QUANTS if quant not in panel_layout.FLOAT_PRODUCTS]


def columns_of(quant: str) -> int:
    """Two superblocks, the second of them not whole if the format allows that."""
    return 256 + max(32, weight_formats.BLOCKS[quant][0])


def make_panels(
    random_weights: Callable[..., Bytes], quant: str, rows: int, columns: int, device: str = "cpu", seed: int = 0
) -> tuple[PanelMatrix, torch.Tensor]:
    """Random panels, and their weights [rows, columns] float32 on the CPU."""
    data = random_weights(quant, rows * columns, seed)
    if quant == "FP4":  # each row has its own factors
        data.view("<f4").reshape(rows, -1, 11)[:, :, :2] *= np.exp2(-(np.arange(rows) % 5))[:, None, None]
    decoded = torch.from_numpy(native.dequantize(quant, data, rows * columns)).view(rows, columns)
    return PanelMatrix.pack(PackedMatrix(quant, rows, columns, data), device), decoded


def activations(tokens: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Noise [tokens, columns]."""
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens)).to(dtype)
