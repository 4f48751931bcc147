"""Kernels of what stands between two matmuls: residual sum and RMSNorm, and the gate of a dense MLP (a door to triton).

Launchers take tensors that fused.py has checked. Each is one launch, without a host sync, capturable in a CUDA graph.
All arithmetic is float32; results are rounded where transformers rounds them.
"""

import torch
import triton
import triton.language as tl

_WIDE = 1024  # columns of one program of the gate


@triton.jit
def _add_rms_norm(
    residual,
    weight,
    added,
    partials,
    shared,
    shared_gate,
    normed,
    copy,
    epsilon,
    FROM_HOST: tl.constexpr,
    SLOTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a token. FROM_HOST: `added` lies in host memory and is read past the caches: the CPU has just written
    it, and L2 may still hold what was there before."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    at = token * HIDDEN + column
    x = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    scales = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if added is not None:
        if FROM_HOST:
            x += tl.load(added + at, mask=inside, other=0.0, volatile=True).to(tl.float32)
        else:
            x += tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
    if partials is not None:
        total = tl.zeros([BLOCK], tl.float32)
        for slot in tl.static_range(SLOTS):  # unrolled: all loads are under way before the first is needed
            total += tl.load(partials + (token * SLOTS + slot) * HIDDEN + column, mask=inside, other=0.0)
        x += total
    if shared is not None:
        beside = tl.load(shared + at, mask=inside, other=0.0).to(tl.float32)
        if shared_gate is not None:
            beside *= tl.sigmoid(tl.load(shared_gate + token).to(tl.float32))
        x += beside
    kept = x.to(residual.dtype.element_ty)
    tl.store(residual + at, kept, mask=inside)
    x = kept.to(tl.float32)  # the norm sees the sum as the next layer will
    x *= tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + epsilon)
    result = (x.to(normed.dtype.element_ty).to(tl.float32) * scales).to(normed.dtype.element_ty)
    tl.store(normed + at, result, mask=inside)
    if copy is not None:
        tl.store(copy + at, result.to(tl.float32).to(copy.dtype.element_ty), mask=inside)


def add_rms_norm(
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    *,
    added: torch.Tensor | None,
    partials: torch.Tensor | None,
    shared: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
    copy: torch.Tensor | None,
) -> torch.Tensor:
    """See fused.add_rms_norm."""
    tokens, hidden = residual.shape
    normed = torch.empty_like(residual)
    block = triton.next_power_of_2(hidden)
    if tokens:
        _add_rms_norm[(tokens,)](
            residual,
            weight,
            added,
            partials,
            shared,
            shared_gate,
            normed,
            copy,
            epsilon,
            FROM_HOST=added is not None and added.device.type == "cpu",
            SLOTS=0 if partials is None else partials.shape[1],
            HIDDEN=hidden,
            BLOCK=block,
            num_warps=min(max(block // 256, 1), 16),  # 8 columns a thread: 16 bytes a load in bf16
        )
    return normed


@triton.jit
def _gated(
    gate_up,
    out,
    alpha,
    limit,
    INTERMEDIATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for BLOCK columns of a token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INTERMEDIATE
    at = gate_up + token * (2 * INTERMEDIATE) + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + INTERMEDIATE, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        gate = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(y)) / 2 = sigmoid(2 y)
        gate = gate * tl.sigmoid(2.0 * 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))
    else:  # clamps by comparison, so that NaN stays
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
        gate = gate * tl.sigmoid(alpha * gate)
    gate = gate.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * INTERMEDIATE + column, (gate * up).to(out.dtype.element_ty), mask=inside)


def gated(activation: str, gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """See fused.gated."""
    tokens, both = gate_up.shape
    out = gate_up.new_empty(tokens, both // 2)
    if tokens:
        block = min(triton.next_power_of_2(both // 2), _WIDE)
        _gated[(tokens, triton.cdiv(both // 2, block))](
            gate_up,
            out,
            alpha,
            limit,
            INTERMEDIATE=both // 2,
            ACTIVATION=activation,
            BLOCK=block,
            num_warps=max(block // 256, 1),
        )
    return out
