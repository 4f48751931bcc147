"""Packs float32 matrices as one of the formats that are written."""

import numpy as np
import torch

from ktqueue.loading.weight_formats import Bytes, Floats, row_bytes
from ktqueue.operators import native

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
WRITABLE = (
    *_PLAIN,
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
)


def quantize(values: Floats, quant: str, importance: Floats | None = None) -> Bytes:
    """Quantise [rows, columns] float32 to [rows, bytes per row]. `quant` is one of WRITABLE.

    `importance` [columns] float32: see `native.quantize`, which also has the errors.
    """
    if quant in _PLAIN:
        rows = torch.from_numpy(np.array(values, np.float32)).to(_PLAIN[quant])
        plain: Bytes = rows.view(torch.uint8).numpy()
        return plain
    return native.quantize(quant, values, row_bytes(quant, values.shape[1]), importance)
