"""Compiles the kernels of a matrix in packed panels for an H200: see sm_90."""

import sys

import torch
from sm_90 import compiling

from ktqueue.operators.gpu.kernels import matrix as triton_matrix
from ktqueue.operators.gpu.kernels.panel_matrix import Panels


def matrix(quant: str, rows: int, columns: int) -> Panels:
    """Of a model's size; nothing reads it."""
    return Panels(torch.zeros(64, dtype=torch.uint8), quant, rows, columns)


if __name__ == "__main__":
    with compiling() as names:
        for tokens, columns, parts in (
            (1, 2048, [matrix("Q4_K", 4608, 2048), matrix("Q6_K", 512, 2048)]),
            (4, 4096, [matrix("Q4_K", 2048, 4096)]),
            (2, 2880, [matrix("IQ4_NL", 100, 2880)]),
        ):
            x = torch.zeros(tokens, columns, dtype=torch.float16 if columns == 2880 else torch.bfloat16)
            out = torch.zeros(tokens, sum(part.rows for part in parts), dtype=x.dtype)
            triton_matrix.few_rows(parts, x, out[0] if columns == 2880 else None, out)
        for quant, ids in (("Q4_K", None), ("Q6_K", torch.zeros(3, dtype=torch.int64))):
            triton_matrix.decode(matrix(quant, 512, 2048), torch.zeros(3, 2048, dtype=torch.bfloat16), ids=ids)
    sys.stdout.write(" ".join(names))
