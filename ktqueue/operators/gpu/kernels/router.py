"""The kernel behind fused.route: softmax, top-k, which experts the CPU computes, how often each is used (a door to
triton).

Its launcher takes tensors that fused.py has checked; one launch, no host sync, capturable in a CUDA graph.
"""

import torch
import triton
import triton.language as tl

from ktqueue.operators.gpu.kernels.fused import SIGMOID_SUM_FLOOR

_TAKEN = tl.constexpr(-(2**63) + 1)  # below the rank of every logit that is not NaN


@triton.jit
def _sortable(bits):
    """Bits of a float32 as an int32 that sorts alike, and back: it is its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _route(
    logits,
    on_gpu,
    live_tokens,
    counts,
    ids_out,
    cpu_ids_out,
    weights_out,
    cpu_ids_copy,
    weights_copy,
    choice,
    scale,
    stride,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOSEN_BLOCK: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SIGMOID: tl.constexpr,
    SUM_FLOOR: tl.constexpr,
):
    """One program a token."""
    token = tl.program_id(0)
    expert = tl.arange(0, EXPERT_BLOCK)
    slot = tl.arange(0, CHOSEN_BLOCK)
    infinity: tl.constexpr = float("inf")
    x = tl.load(logits + token.to(tl.int64) * stride + expert, mask=expert < EXPERTS, other=-infinity).to(tl.float32)
    largest = tl.max(x, axis=0)
    unsound = (tl.max(((x != x) | (x == infinity)).to(tl.int32), axis=0) > 0) | (largest == -infinity)
    by = x
    if choice is not None:
        by = tl.load(choice + token.to(tl.int64) * EXPERTS + expert, mask=expert < EXPERTS, other=-infinity)
    by = tl.where(by == 0.0, 0.0, by)  # -0 equals 0, its bits do not

    # The highest logit is the greatest int64 of (logit, from the last expert backwards): among equals the lowest id, so
    # that what pads the block comes after every expert.
    rank = (_sortable(by.to(tl.int32, bitcast=True)).to(tl.int64) << 32) | (EXPERT_BLOCK - 1 - expert).to(tl.int64)
    ids = tl.zeros([CHOSEN_BLOCK], tl.int64)
    keys = tl.zeros([CHOSEN_BLOCK], tl.int32)
    for i in tl.static_range(CHOSEN):
        best = tl.max(rank, axis=0)
        ids = tl.where(slot == i, EXPERT_BLOCK - 1 - (best & (EXPERT_BLOCK - 1)), ids)
        keys = tl.where(slot == i, (best >> 32).to(tl.int32), keys)
        rank = tl.where(rank == best, _TAKEN, rank)

    taken = _sortable(keys).to(tl.float32, bitcast=True)  # their logits
    place = slot
    if choice is not None:
        taken = tl.load(logits + token.to(tl.int64) * stride + ids, mask=slot < CHOSEN, other=0.0).to(tl.float32)
        equal_first = (taken[None, :] == taken[:, None]) & (ids[None, :] < ids[:, None])
        before = ((taken[None, :] > taken[:, None]) | equal_first) & (slot < CHOSEN)[None, :]
        place = tl.where(unsound, slot, tl.sum(before.to(tl.int32), axis=1))
    if SIGMOID:
        weights = tl.where(slot < CHOSEN, tl.sigmoid(taken), 0.0)
        if RENORMALISE:
            weights = weights / (tl.sum(weights, axis=0) + SUM_FLOOR)
    else:
        weights = tl.where(slot < CHOSEN, tl.exp(taken - largest), 0.0)
        weights = weights / tl.sum(weights if RENORMALISE else tl.exp(x - largest), axis=0)
    weights *= scale
    ids = tl.where(unsound, slot.to(tl.int64), ids)  # whatever the bits of a NaN made of them
    weights = tl.where(unsound, float("nan"), weights)

    inside = slot < CHOSEN
    counted = inside
    if live_tokens is not None:
        live = token < tl.load(live_tokens)
        ids = tl.where(live, ids, -1)
        weights = tl.where(live, weights, 0.0)
        counted = inside & live
    at = token.to(tl.int64) * CHOSEN + place
    tl.store(ids_out + at, ids, mask=inside)
    tl.store(weights_out + at, weights, mask=inside)
    cpu_ids = ids
    if on_gpu is not None:
        cpu_ids = tl.where(tl.load(on_gpu + ids, mask=counted, other=-1) >= 0, -1, ids)
        tl.store(cpu_ids_out + at, cpu_ids, mask=inside)
    if cpu_ids_copy is not None:
        tl.store(cpu_ids_copy + at, cpu_ids, mask=inside)
        tl.store(weights_copy + at, weights, mask=inside)
    if counts is not None:
        tl.atomic_add(counts + ids, 1, mask=counted, sem="relaxed")


def route(
    logits: torch.Tensor,
    experts_per_token: int,
    *,
    renormalise: bool,
    on_gpu: torch.Tensor | None,
    live_tokens: torch.Tensor | None,
    counts: torch.Tensor | None,
    copies: tuple[torch.Tensor, torch.Tensor] | None,
    choice: torch.Tensor | None = None,
    sigmoid: bool = False,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, cpu_ids, weights: see fused.route."""
    tokens, experts = logits.shape
    shape = (tokens, experts_per_token)
    ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
    cpu_ids = ids if on_gpu is None else torch.empty_like(ids)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    cpu_ids_copy, weights_copy = copies or (None, None)
    block = triton.next_power_of_2(experts)
    if tokens:
        _route[(tokens,)](
            logits,
            on_gpu,
            live_tokens,
            counts,
            ids,
            cpu_ids,
            weights,
            cpu_ids_copy,
            weights_copy,
            choice,
            scale,
            logits.stride(0),
            EXPERTS=experts,
            EXPERT_BLOCK=block,
            CHOSEN=experts_per_token,
            CHOSEN_BLOCK=triton.next_power_of_2(experts_per_token),
            RENORMALISE=renormalise,
            SIGMOID=sigmoid,
            SUM_FLOOR=SIGMOID_SUM_FLOOR,
            num_warps=1 if block <= 256 else 4,
        )
    return ids, cpu_ids, weights
