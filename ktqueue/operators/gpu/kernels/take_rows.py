"""Rows of a table, such as the embeddings of tokens."""

import torch

from ktqueue.operators.gpu.kernels.operation import launch_options, runs_kernel, tl, triton, wait_for_previous

_COLUMNS = 1024
"""Of a program."""


@triton.jit
def _take_rows_kernel(table, ids, out, row_stride, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, WAITS: tl.constexpr):
    """One program for BLOCK columns of a token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    wait_for_previous(WAITS)
    row = tl.load(ids + token)
    tl.store(out + token * COLUMNS + column, tl.load(table + row * row_stride + column, mask=inside), mask=inside)


def take_rows(table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """table [rows, columns], ids [tokens] int64, all below `rows` -> [tokens, columns] of the table's type. out: dense,
    where they are written.

    torch's own kernels take 6 to 12 us for few tokens on an H200, and this one 2.
    """
    columns = table.shape[1]
    out = table.new_empty(len(ids), columns) if out is None else out
    if not (runs_kernel(table) and table.stride(1) == 1 and len(ids)):
        return torch.index_select(table, 0, ids, out=out)
    block = min(_COLUMNS, triton.next_power_of_2(columns))
    _take_rows_kernel[(len(ids), triton.cdiv(columns, block))](
        table, ids, out, table.stride(0), COLUMNS=columns, BLOCK=block, **launch_options()
    )
    return out
