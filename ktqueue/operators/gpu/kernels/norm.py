"""Residual sum and norm between two matrix products, in one launch.

It rounds where the modules of transformers round; a sum of several terms is rounded only once. No host sync: it can be
captured in a CUDA graph.
"""

from typing import NamedTuple

import torch

from ktqueue.operators.gpu.device import is_gpu
from ktqueue.operators.gpu.kernels.operation import (
    check_fits,
    launch_options,
    runs_kernel,
    tl,
    triton,
    wait_for_previous,
)

_WORDS = 1024
"""Of two columns, that a program puts in order."""
_COLUMNS_OF_A_WARP = 128
"""Four of each thread, since what it loads of all slots is on its way at once."""


class RmsNorm(NamedTuple):
    """Of rows [tokens, hidden]. weight: [hidden], of any float type: see add_rms_norm."""

    weight: torch.Tensor
    epsilon: float


@triton.jit
def weighted(x, factors, dtype: tl.constexpr, ROUNDS: tl.constexpr):
    """Normed numbers, float32, times the norm's weights, in `dtype`. ROUNDS: they are rounded before, too."""
    if ROUNDS:
        x = x.to(dtype).to(tl.float32)
    return (x * factors).to(dtype)


@triton.jit
def word_in_order(word):
    """Where `in_order` writes a word of two columns."""
    return word // 16 * 16 + word // 2 % 2 * 8 + word % 2 * 4 + word // 4 % 4


def in_order(x: torch.Tensor) -> torch.Tensor:
    """x [rows, columns] -> the same, of each 32 columns 8t + 4s + 2h + e at 16s + 8h + 2t + e: the order of
    expert_warpgroups.cu. On a GPU, numbers have 2 bytes."""
    if not runs_kernel(x):
        return x.reshape(-1, 4, 2, 2, 2).permute(0, 2, 3, 1, 4).reshape(x.shape)
    words = x.contiguous().view(torch.int32)
    out = torch.empty_like(words)
    if words.numel():
        _order_words[(triton.cdiv(words.numel(), _WORDS),)](words, out, words.numel(), BLOCK=_WORDS)
    return out.view(x.dtype)


@triton.jit
def _order_words(x, out, words, BLOCK: tl.constexpr):
    """One program for BLOCK words."""
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = word < words
    tl.store(out + word_in_order(word), tl.load(x + word, mask=inside), mask=inside)


@triton.jit
def _add_rms_norm(
    residual,
    weight,
    added,
    added_rows,
    partials,
    shared,
    shared_gate,
    normed,
    copy,
    ordered,
    epsilon,
    scale,
    FROM_HOST: tl.constexpr,
    SLOTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    LAYER: tl.constexpr,
    SCALED: tl.constexpr,
    WAITS: tl.constexpr,
):
    """One program per token. LAYER: the norm is a LayerNorm. FROM_HOST: `added` is in host memory and is read past the
    caches. The CPU has just written it, and L2 may still hold the old contents. ordered: words of two numbers."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    element = token * HIDDEN + column
    scales = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(WAITS)
    x = tl.load(residual + element, mask=inside, other=0.0).to(tl.float32)
    if added is not None:
        is_added = inside
        if added_rows is not None:
            is_added = inside & (tl.load(added_rows + token) > 0)
        if FROM_HOST:
            x += tl.load(added + element, mask=is_added, other=0.0, volatile=True).to(tl.float32)
        else:
            x += tl.load(added + element, mask=is_added, other=0.0).to(tl.float32)
    if partials is not None:
        total = tl.zeros([BLOCK], tl.float32)
        for slot in tl.static_range(SLOTS):  # unrolled: all loads start before the first result is needed
            part = tl.load(partials + (token * SLOTS + slot) * HIDDEN + column, mask=inside, other=0.0)
            total += part.to(tl.float32)
        x += total
    if shared is not None:
        shared_row = tl.load(shared + element, mask=inside, other=0.0).to(tl.float32)
        if shared_gate is not None:
            shared_row *= tl.sigmoid(tl.load(shared_gate + token).to(tl.float32))
        x += shared_row
    rounded = x.to(residual.dtype.element_ty)
    if SCALED:
        rounded = (rounded.to(tl.float32) * scale).to(residual.dtype.element_ty)
    tl.store(residual + element, rounded, mask=inside)
    x = rounded.to(tl.float32)  # the norm sees the sum as the next layer will
    if LAYER:
        x = tl.where(inside, x - tl.sum(x, axis=0) / HIDDEN, 0.0)
    x *= tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + epsilon)
    if LAYER:
        shifts = tl.load(weight + HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
        result = (x * scales + shifts).to(normed.dtype.element_ty)
    else:
        result = weighted(x, scales, normed.dtype.element_ty, weight.dtype.element_ty != tl.float32)
    tl.store(normed + element, result, mask=inside)
    if copy is not None:
        tl.store(copy + element, result.to(tl.float32).to(copy.dtype.element_ty), mask=inside)
    if ordered is not None:
        word = tl.arange(0, BLOCK // 2)
        halves = tl.reshape(result.to(tl.uint16, bitcast=True).to(tl.uint32), (BLOCK // 2, 2))
        low, high = tl.split(halves)
        place = token * (HIDDEN // 2) + word_in_order(word)
        tl.store(ordered + place, (low | high << 16).to(tl.int32, bitcast=True), mask=word < HIDDEN // 2)


def add_rms_norm(
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    *,
    added: torch.Tensor | None = None,
    added_rows: torch.Tensor | None = None,
    partials: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    copy: torch.Tensor | None = None,
    ordered: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Add `added` + sum(`partials`) + sigmoid(`shared_gate`) * `shared` to the residual IN PLACE; return its norm.

    residual [tokens, hidden]; weight [hidden] of an RMSNorm, or [2, hidden], weights and biases of a LayerNorm; added,
    shared [tokens, hidden]; shared_gate [tokens, 1], the logit of a gate, only with `shared` (without it, all of
    `shared` is added), partials [tokens, slots, hidden]: any float dtype. Returns [tokens, hidden] in the dtype
    of `residual`, and also writes it to `copy` [tokens, hidden] of any float dtype. ordered: like the residual,
    gets the norm with its columns as of `in_order`. The sum is float32 and rounded once; then it is multiplied by
    `scale` and rounded again (Gemma 4), unless that is 1. The norm is that of the rounded sum: rounded, then multiplied
    by the weight (transformers' LlamaRMSNorm and its copies). A LayerNorm is rounded once. `added` and `copy` may be in
    pinned host memory. added_rows [tokens] int32: rows of `added` with 0 are not read. All must be contiguous.
    Raises ValueError for shapes that do not fit.
    """
    shape = residual.shape
    fits = weight.shape in (shape[1:], (2, *shape[1:])) and all(
        x is None or x.shape == shape for x in (added, shared, copy, ordered)
    )
    fits &= ordered is None or (ordered.dtype == residual.dtype and shape[1] % 32 == 0)
    fits &= ordered is None or residual.itemsize == 2 or not runs_kernel(residual)
    fits &= partials is None or partials.shape[::2] == shape
    fits &= added_rows is None or (added_rows.shape == shape[:1] and added_rows.dtype == torch.int32)
    fits &= shared_gate is None or (shared is not None and shared_gate.numel() == shape[0])
    check_fits(fits, "add_rms_norm", residual=residual, weight=weight, added=added, partials=partials, copy=copy)
    if runs_kernel(residual):
        tokens, hidden = shape
        normed = torch.empty_like(residual)
        block = triton.next_power_of_2(hidden)
        if tokens:
            _add_rms_norm[(tokens,)](
                residual, weight, added, added_rows, partials, shared, shared_gate, normed, copy,
                None if ordered is None else ordered.view(torch.int32), epsilon, scale,
                FROM_HOST=added is not None and not is_gpu(added.device),
                SLOTS=0 if partials is None else partials.shape[1],
                HIDDEN=hidden,
                BLOCK=block,
                LAYER=weight.dim() == 2,
                SCALED=scale != 1,
                **launch_options(),
                num_warps=min(max(block // _COLUMNS_OF_A_WARP, 1), 32),
            )  # fmt: skip
        return normed
    total = residual.float()
    if added is not None:
        total = total + (added if added_rows is None else torch.where(added_rows[:, None] > 0, added, 0)).float()
    if partials is not None:
        total = total + partials.float().sum(1)
    if shared is not None:
        gate = 1.0 if shared_gate is None else shared_gate.float().sigmoid().view(-1, 1)
        total = total + gate * shared.float()
    residual.copy_(total)
    if scale != 1:
        residual.mul_(scale)
    normed = (
        rms_norm(residual, weight, epsilon)
        if weight.dim() == 1
        else layer_norm(residual, weight[0], weight[1], epsilon)
    )
    if copy is not None:
        copy.copy_(normed)
    if ordered is not None:
        ordered.copy_(in_order(normed))
    return normed


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The torch twin of the norm over the last dimension: float32 inside, rounded, then times weight, as dtype of x.
    With weights in float32, it is rounded once."""
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    normed = x.float() * scale
    return (weight * (normed if weight.dtype == torch.float32 else normed.to(x.dtype))).to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The torch twin of a LayerNorm over the last dimension: float32, rounded once to the dtype of x."""
    return torch.nn.functional.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), epsilon).to(x.dtype)
