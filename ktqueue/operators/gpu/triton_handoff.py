"""Triton kernels of the hand-off: pack a task's input, fetch its output; pinned CPU memory is fine on either side."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _pack_rows(
    to_x,
    to_ids,
    to_weights,
    x,
    ids,
    weights,
    x_stride,
    ids_stride,
    weights_stride,
    hidden,
    experts,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: BLOCK columns of a token; the first of a token also its ids and weights."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    values = tl.load(x + token * x_stride + columns, mask=inside)
    tl.store(to_x + token * hidden + columns, values.to(tl.float32), mask=inside)
    if tl.program_id(1) == 0:
        slots = tl.arange(0, EXPERTS)
        chosen = slots < experts
        tl.store(to_ids + token * experts + slots, tl.load(ids + token * ids_stride + slots, mask=chosen), mask=chosen)
        shares = tl.load(weights + token * weights_stride + slots, mask=chosen)
        tl.store(to_weights + token * experts + slots, shares, mask=chosen)


@triton.jit
def _fetch_values(source, target, count, BLOCK: tl.constexpr) -> None:
    """`source` is read past the caches: the CPU has just written it."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    tl.store(target + places, tl.load(source + places, mask=inside, volatile=True), mask=inside)


def pack(
    to_x: torch.Tensor,
    to_ids: torch.Tensor,
    to_weights: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """x [tokens, hidden] as float32, ids and weights [tokens, k], last dimensions dense, into contiguous targets."""
    tokens, hidden = x.shape
    experts = ids.shape[1]
    _pack_rows[(tokens, triton.cdiv(hidden, _BLOCK))](
        to_x,
        to_ids,
        to_weights,
        x,
        ids,
        weights,
        x.stride(0),
        ids.stride(0),
        weights.stride(0),
        hidden,
        experts,
        EXPERTS=triton.next_power_of_2(experts),
        BLOCK=_BLOCK,
        num_warps=4,
    )


def fetch(source: torch.Tensor, target: torch.Tensor) -> None:
    """target = source, both contiguous and of one dtype and size."""
    count = source.numel()
    _fetch_values[(triton.cdiv(count, _BLOCK),)](source, target, count, BLOCK=_BLOCK, num_warps=4)
