"""The most likely token of each row of logits, and whether the row is finite, in two launches.

A logit and its column become one int64. Its order is that of logits, and of equal ones the lower column is greater. So
the choice is a maximum, which parts of a row can take in any order.
"""

import torch

from ktqueue.operators.gpu.kernels.operation import early_launch_options, runs_kernel, tl, triton, wait_for_previous

_COLUMNS = 4096
"""Of a program: 38 programs for a row of Qwen3's vocabulary."""
_NAN = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def _parts_kernel(
    logits, parts, stride, VOCAB: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, WAITS: tl.constexpr
):
    """One program for COLUMNS logits of a row: the greatest of them, with its column, to `parts` [rows, PARTS]."""
    wait_for_previous(WAITS)
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    value = tl.load(logits + row * stride + column, mask=column < VOCAB, other=float("-inf")) + 0.0  # no -0
    bits = value.to(tl.int32, bitcast=True)
    order = tl.where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), _NAN)
    both = (order.to(tl.int64) << 32) + (~column & 0x7FFFFFFF)
    tl.store(parts + row * PARTS + part, tl.max(both, axis=0))


@triton.jit
def _greatest_kernel(parts, tokens, finite, PARTS: tl.constexpr, BLOCK: tl.constexpr, WAITS: tl.constexpr):
    """One program for a row."""
    wait_for_previous(WAITS)
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    both = tl.max(tl.load(parts + row * PARTS + part, mask=part < PARTS, other=-(1 << 63)), axis=0)
    order = (both >> 32).to(tl.int32)
    tl.store(tokens + row, ~both & 0x7FFFFFFF)
    tl.store(finite + row, ((order < _INFINITY) & (order > -_INFINITY - 1)).to(tl.int64))


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """logits [rows, vocab] of any float type -> [2, rows] int64: tokens, and 1 for rows that are finite.

    The first of the greatest logits is chosen; the first NaN counts as the greatest. A row is not finite if it has a
    NaN or +infinity, or only -infinity.
    """
    rows, vocab = logits.shape
    fits = logits.dtype == torch.float32 and logits.stride(1) == 1
    if not (runs_kernel(logits) and fits and rows):
        chosen = logits.argmax(dim=1)
        return torch.stack([chosen, logits.gather(1, chosen[:, None])[:, 0].isfinite().long()])
    both = torch.empty(2, rows, dtype=torch.int64, device=logits.device)
    parts = torch.empty(rows, triton.cdiv(vocab, _COLUMNS), dtype=torch.int64, device=logits.device)
    count = parts.shape[1]
    sizes = {"VOCAB": vocab, "PARTS": count, "COLUMNS": _COLUMNS}
    _parts_kernel[(count, rows)](logits, parts, logits.stride(0), **sizes, **early_launch_options(logits))
    block = triton.next_power_of_2(count)
    _greatest_kernel[(rows,)](parts, *both, PARTS=count, BLOCK=block, **early_launch_options(logits), num_warps=1)
    return both
