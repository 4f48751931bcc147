"""The kernel between the qkv matmul and attention: norms of query and key, rotation, append to the paged cache (a door
to triton).

Its launcher takes tensors that fused.py has checked; one launch, no host sync, capturable in a CUDA graph.
"""

import torch
import triton
import triton.language as tl

_FEW_TOKENS = 128  # up to here a program has one head, so that all of the GPU works; beyond, several


@triton.jit
def _clipped(x, CLIP: tl.constexpr, limit):
    """x within +-limit. By comparison: NaN stays NaN."""
    if CLIP:
        x = tl.where(x > limit, limit, x)
        x = tl.where(x < -limit, -limit, x)
    return x


@triton.jit
def _store(pointers, x, mask, rounded: tl.constexpr):
    """x (float32) as the model's dtype `rounded` has it, cast to what the pointers point to; fp8 saturates."""
    x = x.to(rounded)
    if pointers.dtype.element_ty == tl.float8e4nv:
        x = _clipped(x.to(tl.float32), True, 448.0)
    tl.store(pointers, x.to(tl.float32).to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _turned(
    source,
    weight,
    cosine,
    sine,
    position,
    target,
    head,
    column,
    mask,
    epsilon,
    clip,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    CLIP: tl.constexpr,
):
    """Heads of one projection (source: its first element, of this token) normed, clipped, turned, stored at target.

    head [GROUP, 1], column and mask [GROUP, HALF]: this program's. WHOLE: the norm is over all HEADS heads (in a block
    of BLOCK), with a weight for each of their elements.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = source.dtype.element_ty
    at = head * HEAD_DIM + column
    low = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + at + HALF, mask=mask, other=0.0).to(tl.float32)
    table = position * HALF + column
    c = tl.load(cosine + table, mask=mask, other=0.0)
    s = tl.load(sine + table, mask=mask, other=0.0)
    if weight is not None:
        if WHOLE:
            element = tl.arange(0, BLOCK)
            x = tl.load(source + element, mask=element < HEADS * HEAD_DIM, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(x * x, axis=0) / (HEADS * HEAD_DIM) + epsilon)
            of = weight + at
        else:
            scale = tl.rsqrt(tl.sum(low * low + high * high, axis=1, keep_dims=True) / HEAD_DIM + epsilon)
            of = weight + column
        low_weight = tl.load(of, mask=mask, other=0.0).to(tl.float32)
        high_weight = tl.load(of + HALF, mask=mask, other=0.0).to(tl.float32)
        low = ((low * scale).to(dtype).to(tl.float32) * low_weight).to(dtype).to(tl.float32)
        high = ((high * scale).to(dtype).to(tl.float32) * high_weight).to(dtype).to(tl.float32)
    low = _clipped(low, CLIP, clip)
    high = _clipped(high, CLIP, clip)
    _store(target + at, low * c - high * s, mask, dtype)
    _store(target + at + HALF, high * c + low * s, mask, dtype)


@triton.jit
def _qk_norm_rope_append(
    qkv,
    q_norm,
    k_norm,
    cosine,
    sine,
    positions,
    slot_mapping,
    query,
    keys,
    values,
    stride,
    epsilon,
    clip,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    CLIP: tl.constexpr,
):
    """One program for GROUP heads of a token: the query's, then the key's, then the value's."""
    Q_GROUPS: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    K_GROUPS: tl.constexpr = (KV_HEADS + GROUP - 1) // GROUP
    token = (tl.program_id(0) // (Q_GROUPS + 2 * K_GROUPS)).to(tl.int64)
    group = tl.program_id(0) % (Q_GROUPS + 2 * K_GROUPS)
    q_source = qkv + token * stride
    k_source = q_source + HEADS * HEAD_DIM
    v_source = k_source + KV_HEADS * HEAD_DIM
    member = tl.arange(0, GROUP)[:, None]
    column = tl.arange(0, HALF_BLOCK)[None, :]
    narrow = column < HEAD_DIM // 2
    position = tl.load(positions + token)
    slot = tl.load(slot_mapping + token) * (KV_HEADS * HEAD_DIM)
    if group < Q_GROUPS:
        _turned(
            q_source,
            q_norm,
            cosine,
            sine,
            position,
            query + token * (HEADS * HEAD_DIM),
            group * GROUP + member,
            column,
            (group * GROUP + member < HEADS) & narrow,
            epsilon,
            clip,
            HEADS,
            HEAD_DIM,
            WHOLE,
            Q_BLOCK,
            CLIP,
        )
    elif group < Q_GROUPS + K_GROUPS:
        _turned(
            k_source,
            k_norm,
            cosine,
            sine,
            position,
            keys + slot,
            (group - Q_GROUPS) * GROUP + member,
            column,
            ((group - Q_GROUPS) * GROUP + member < KV_HEADS) & narrow,
            epsilon,
            clip,
            KV_HEADS,
            HEAD_DIM,
            WHOLE,
            K_BLOCK,
            CLIP,
        )
    else:
        head = (group - Q_GROUPS - K_GROUPS) * GROUP + member
        mask = (head < KV_HEADS) & narrow
        for half in tl.static_range(2):
            at = head * HEAD_DIM + half * (HEAD_DIM // 2) + column
            x = tl.load(v_source + at, mask=mask, other=0.0).to(tl.float32)
            _store(values + slot + at, _clipped(x, CLIP, clip), mask, qkv.dtype.element_ty)


def qk_norm_rope_append(
    qkv: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    epsilon: float,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    clip: float,
) -> torch.Tensor:
    """See fused.qk_norm_rope_append."""
    tokens = qkv.shape[0]
    query = qkv.new_empty(tokens, heads, head_dim)
    half_block = triton.next_power_of_2(head_dim // 2)
    group = 1 if tokens <= _FEW_TOKENS else min(triton.next_power_of_2(kv_heads), 8)
    whole = q_norm is not None and q_norm.numel() != head_dim
    groups = triton.cdiv(heads, group) + 2 * triton.cdiv(kv_heads, group)
    if tokens:
        _qk_norm_rope_append[(tokens * groups,)](
            qkv,
            q_norm,
            k_norm,
            cosine,
            sine,
            positions,
            slot_mapping,
            query,
            keys,
            values,
            qkv.stride(0),
            epsilon,
            clip,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            HALF_BLOCK=half_block,
            GROUP=group,
            WHOLE=whole,
            Q_BLOCK=triton.next_power_of_2(heads * head_dim),
            K_BLOCK=triton.next_power_of_2(kv_heads * head_dim),
            CLIP=clip > 0,
            num_warps=4 if whole else max(group * half_block // 256, 1),
        )
    return query
