"""A matrix times one to four rows, as fast as memory delivers the weights."""

import torch

from ktqueue.operators.gpu.device import is_gpu
from ktqueue.operators.gpu.kernels.activation import activated, gated
from ktqueue.operators.gpu.kernels.norm import RmsNorm, add_rms_norm, weighted
from ktqueue.operators.gpu.kernels.operation import (
    check_fits,
    launch_options,
    runs_kernel,
    tl,
    triton,
    wait_for_previous,
)
from ktqueue.operators.native import ActivationName

FEW_ROWS = 4
"""Up to here our kernel reads a matrix faster; for more rows, tensor cores (torch's kernels) are needed to keep up."""
_COLUMNS = 2048
"""Columns that a program has in flight at a time, of each of its rows of weights."""
_REGISTERS = 96
"""Most of a thread for one row, so that five programs fit into a multiprocessor."""
_PROGRAMS = 512
"""Programs to start at least, if there are enough outputs: about four per multiprocessor."""


@triton.jit
def _used_from_here(x):
    """Return `x` of 16 bits. The compiler converts no number of it earlier, which would wait for its load."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@triton.jit
def _few_rows_linear(
    x, weight, bias, norm, out, outputs, x_stride, epsilon,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
    ADDS: tl.constexpr, AHEAD: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_OUT outputs of all tokens. It requests whole rows of weights at once, so that what is in
    flight covers the latency of memory. norm: weights of an RMSNorm of x, which each program computes again; or None.
    ADDS: the rounded product is added to what is in `out`. AHEAD: steps whose weights are requested before those of the
    first are multiplied, and then whole rows of x; more than 1 only with one token."""
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    rows = weight + output.to(tl.int64)[:, None] * COLUMNS
    token = tl.arange(0, 4)[:, None]
    sums = tl.zeros([4, BLOCK_OUT], tl.float32)
    requested = ()
    x_rows = ()
    for step in tl.static_range(STEPS):
        if step % AHEAD == 0:
            requested = ()
            for ahead in tl.static_range(min(AHEAD, STEPS - step)):
                place = (step + ahead) * BLOCK + tl.arange(0, BLOCK)
                mask = (output < outputs)[:, None] & (place < COLUMNS)[None, :]
                w = tl.load(rows + place[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
                requested = requested + (w,)
        column = step * BLOCK + tl.arange(0, BLOCK)
        if norm is not None:
            factors = tl.load(norm + column, mask=column < COLUMNS, other=0.0)
        if step == 0:
            wait_for_previous(WAITS)  # while weights arrive, which no kernel of a step writes
            if norm is not None:
                scales = ()
                for t in tl.static_range(TOKENS):
                    squares = 0.0
                    for part in tl.static_range(STEPS):
                        place = part * BLOCK + tl.arange(0, BLOCK)
                        some = tl.load(x + t * x_stride + place, mask=place < COLUMNS, other=0.0).to(tl.float32)
                        squares += tl.sum(some * some, axis=0)
                    scales = scales + (tl.rsqrt(squares / COLUMNS + epsilon),)
        if norm is not None:
            factors = factors.to(tl.float32)
        w = requested[step % AHEAD]
        if AHEAD > 1:
            if step % AHEAD == 0:
                x_rows = ()
                for ahead in tl.static_range(min(AHEAD, STEPS - step)):
                    place = (step + ahead) * BLOCK + tl.arange(0, BLOCK)
                    x_rows = x_rows + (tl.load(x + place, mask=place < COLUMNS, other=0.0),)
            w = _used_from_here(w)
        w = w.to(tl.float32)
        for t in tl.static_range(TOKENS):
            if AHEAD == 1:
                row = tl.load(x + t * x_stride + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
            else:
                row = x_rows[step % AHEAD].to(tl.float32)
            if norm is not None:
                row = weighted(row * scales[t], factors, x.dtype.element_ty, norm.dtype.element_ty != tl.float32)
                row = row.to(tl.float32)
            sums += tl.where(token == t, tl.sum(w * row[None, :], axis=1)[None, :], 0.0)
    if bias is not None:
        sums += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    inside = (token < TOKENS) & (output < outputs)[None, :]
    targets = out + token * outputs + output[None, :]
    result = sums.to(out.dtype.element_ty)
    if ADDS:
        before = tl.load(targets, mask=inside, other=0.0).to(tl.float32)
        result = (before + result.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(targets, result, mask=inside)


@triton.jit
def _few_rows_gate_up(
    x, weight, out, x_stride,
    INTERMEDIATE: tl.constexpr, ACTIVATION: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    """Like _few_rows_linear, for BLOCK_OUT columns of the activation's result: of gate and of up."""
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    rows = weight + output.to(tl.int64)[:, None] * COLUMNS
    token = tl.arange(0, 4)[:, None]
    gate = tl.zeros([4, BLOCK_OUT], tl.float32)
    up = tl.zeros([4, BLOCK_OUT], tl.float32)
    for step in tl.static_range(STEPS):
        column = step * BLOCK + tl.arange(0, BLOCK)
        mask = (output < INTERMEDIATE)[:, None] & (column < COLUMNS)[None, :]
        of_gate = rows + column[None, :]
        g = tl.load(of_gate, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        u = tl.load(of_gate + INTERMEDIATE * COLUMNS, mask=mask, other=0.0, eviction_policy="evict_first")
        u = u.to(tl.float32)
        if step == 0:
            wait_for_previous(WAITS)  # while weights arrive, which no kernel of a step writes
        for t in tl.static_range(TOKENS):
            row = tl.load(x + t * x_stride + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
            gate += tl.where(token == t, tl.sum(g * row[None, :], axis=1)[None, :], 0.0)
            up += tl.where(token == t, tl.sum(u * row[None, :], axis=1)[None, :], 0.0)
    dtype: tl.constexpr = out.dtype.element_ty
    result = activated(gate.to(dtype).to(tl.float32), ACTIVATION).to(dtype).to(tl.float32)
    result *= up.to(dtype).to(tl.float32)
    inside = (token < TOKENS) & (output < INTERMEDIATE)[None, :]
    tl.store(out + token * INTERMEDIATE + output[None, :], result.to(dtype), mask=inside)


def few_rows_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    norm: RmsNorm | None = None,
    added_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [tokens, columns] times weight [outputs, columns] transposed, plus bias [outputs] -> [tokens, outputs].

    The same as torch.nn.functional.linear, which computes it except for 1 to FEW_ROWS tokens of 16 bits on a GPU: with
    one row torch reaches only a part of the memory bandwidth. `weight` must not be written in the same step: see
    `dependent_launches`. Sums are float32. Rows of x may be strided. `dtype` of
    the result is that of x, or float32, which keeps the sums unrounded. norm: x is normed first. added_to: contiguous
    [tokens, outputs] in the dtype of x; the rounded result is added to it IN PLACE, and it is returned.
    """
    if _few(x, weight) and runs_kernel(x):
        return _launch(x, weight, bias, dtype, norm, added_to)
    if norm is not None:
        x = add_rms_norm(x, *norm)
    if added_to is not None:
        if is_gpu(x.device) and bias is None:
            return added_to.addmm_(x, weight.t())  # one launch, which rounds once
        return added_to.add_(torch.nn.functional.linear(x, weight, bias))
    if dtype in (None, x.dtype):
        return torch.nn.functional.linear(x, weight, bias)
    if is_gpu(x.device):
        product = torch.mm(x, weight.t(), out_dtype=dtype)
        return product if bias is None else product.add_(bias)
    return torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype | None,
    norm: RmsNorm | None,
    added_to: torch.Tensor | None,
) -> torch.Tensor:
    tokens, columns = x.shape
    outputs = weight.shape[0]
    out = x.new_empty(tokens, outputs, dtype=dtype) if added_to is None else added_to
    fits = out.shape == (tokens, outputs) and out.is_contiguous() and (norm is None or norm.weight.shape == (columns,))
    check_fits(fits, "few_rows_linear", x=x, weight=weight, norm=norm and norm.weight, added_to=added_to)
    block_out = _outputs_of_a_program(8 if tokens == 1 else 4, outputs)
    block = min(triton.next_power_of_2(columns), _COLUMNS)
    _few_rows_linear[(triton.cdiv(outputs, block_out),)](
        x, weight, bias, norm and norm.weight, out, outputs, x.stride(0), norm.epsilon if norm else 0.0,
        TOKENS=tokens,
        COLUMNS=columns,
        BLOCK_OUT=block_out,
        BLOCK=block,
        STEPS=triton.cdiv(columns, block),
        ADDS=added_to is not None,
        AHEAD=2 if tokens == 1 else 1,
        **launch_options(),
        num_warps=4,
        maxnreg=_REGISTERS if tokens == 1 else None,
    )  # fmt: skip
    return out


def few_rows_gated(activation: ActivationName, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`gated` of few_rows_linear, in one launch for 1 to FEW_ROWS tokens of 16 bits, with the same roundings.

    x [tokens, columns]; weight [2 * intermediate, columns], gate above up. Returns [tokens, intermediate].
    """
    if not (_few(x, weight) and runs_kernel(x)):
        return gated(activation, few_rows_linear(x, weight))
    tokens, columns = x.shape
    intermediate = len(weight) // 2
    out = x.new_empty(tokens, intermediate)
    block_out = _outputs_of_a_program(4 if tokens == 1 else 2, intermediate)
    block = min(triton.next_power_of_2(columns), _COLUMNS)
    _few_rows_gate_up[(triton.cdiv(intermediate, block_out),)](
        x, weight, out, x.stride(0),
        INTERMEDIATE=intermediate,
        ACTIVATION=activation,
        TOKENS=tokens,
        COLUMNS=columns,
        BLOCK_OUT=block_out,
        BLOCK=block,
        STEPS=triton.cdiv(columns, block),
        **launch_options(),
        num_warps=4,
    )  # fmt: skip
    return out


def _few(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a kernel of this module can multiply x [tokens, columns] by the weight."""
    few = 1 <= x.shape[0] <= FEW_ROWS and x.dtype == weight.dtype != torch.float32
    return few and x.stride(1) == 1 and weight.is_contiguous()


def _outputs_of_a_program(most: int, outputs: int) -> int:
    """How many of `outputs` a program computes: at most what registers hold of loads in flight."""
    while most > 1 and outputs < _PROGRAMS * most:
        most //= 2
    return most
