"""The kernel of a matrix times one to four rows: as fast as memory gives the weights (a door to triton).

A program computes a few outputs from whole rows of weights, which it asks for at once, so that all that is on its way
covers the latency of memory. Its launcher takes tensors that fused.py has checked; one launch, no host sync, capturable
in a CUDA graph.
"""

import torch
import triton
import triton.language as tl

_COLUMNS = 2048  # that a program has on the way at a time, of each of its rows of weights
_PROGRAMS = 512  # at least, where there are outputs enough: about four for each multiprocessor


@triton.jit
def _few_rows_linear(
    x,
    weight,
    bias,
    out,
    outputs,
    x_stride,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """One program for BLOCK_OUT outputs of all tokens."""
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    rows = weight + output.to(tl.int64)[:, None] * COLUMNS
    token = tl.arange(0, 4)[:, None]
    sums = tl.zeros([4, BLOCK_OUT], tl.float32)
    for step in tl.static_range(STEPS):
        column = step * BLOCK + tl.arange(0, BLOCK)
        mask = (output < outputs)[:, None] & (column < COLUMNS)[None, :]
        w = tl.load(rows + column[None, :], mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        for t in tl.static_range(TOKENS):
            row = tl.load(x + t * x_stride + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
            sums += tl.where(token == t, tl.sum(w * row[None, :], axis=1)[None, :], 0.0)
    if bias is not None:
        sums += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    inside = (token < TOKENS) & (output < outputs)[None, :]
    tl.store(out + token * outputs + output[None, :], sums.to(out.dtype.element_ty), mask=inside)


def few_rows_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See fused.few_rows_linear; 1 to 4 tokens."""
    tokens, columns = x.shape
    outputs = weight.shape[0]
    out = x.new_empty(tokens, outputs, dtype=dtype)
    block_out = 8 if tokens == 1 else 4  # what registers hold on its way
    while block_out > 1 and outputs < _PROGRAMS * block_out:
        block_out //= 2
    block = min(triton.next_power_of_2(columns), _COLUMNS)
    _few_rows_linear[(triton.cdiv(outputs, block_out),)](
        x,
        weight,
        bias,
        out,
        outputs,
        x.stride(0),
        TOKENS=tokens,
        COLUMNS=columns,
        BLOCK_OUT=block_out,
        BLOCK=block,
        STEPS=triton.cdiv(columns, block),
        num_warps=4,
    )
    return out
