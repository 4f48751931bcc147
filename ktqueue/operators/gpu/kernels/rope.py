"""Between the qkv product and attention, in one launch: norms of query and key, rotation, append to the paged cache.

No host sync: it can be captured in a CUDA graph.
"""

from dataclasses import dataclass

import torch

from ktqueue.operators.gpu.kernels.norm import rms_norm
from ktqueue.operators.gpu.kernels.operation import (
    check_fits,
    launch_options,
    runs_kernel,
    tl,
    triton,
    wait_for_previous,
)
from ktqueue.operators.kv_cache import UNSCALED, CacheScale, store

_FEW_TOKENS = 128
"""Up to here a program computes one head, so that the whole GPU is busy; for more tokens it computes several."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """Tables of positions on a device, float32.

    cosine, sine: [tables, positions, rotary / 2], for the columns of a head that are rotated. growth: [positions], the
    factors of queries in layers whose queries grow; empty if there are none.
    """

    cosine: torch.Tensor
    sine: torch.Tensor
    growth: torch.Tensor

    @property
    def bytes(self) -> int:
        """Bytes of all tables."""
        return self.cosine.nbytes + self.sine.nbytes + self.growth.nbytes


@triton.jit
def _clipped(x, CLIP: tl.constexpr, limit):
    """x clamped to +-limit by comparisons, so that NaN stays NaN."""
    if CLIP:
        x = tl.where(x > limit, limit, x)
        x = tl.where(x < -limit, -limit, x)
    return x


@triton.jit
def store_rounded(pointers, x, mask, factor, rounded: tl.constexpr):
    """Round x (float32) to the model's dtype `rounded`, then cast it to the dtype of the pointers. Numbers of fp8 are
    multiplied by `factor` and saturate."""
    x = x.to(rounded)
    if pointers.dtype.element_ty == tl.float8e4nv:
        x = _clipped(x.to(tl.float32) * factor, True, 448.0)
    tl.store(pointers, x.to(tl.float32).to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _normed(source, weight, element, place, mask, scale, clip, WHOLE: tl.constexpr, CLIP: tl.constexpr):
    """Load elements of a projection, multiply them by the norm's scale and weights if it has one, and clip them.

    place: of the elements within their head.
    """
    dtype: tl.constexpr = source.dtype.element_ty
    x = tl.load(source + element, mask=mask, other=0.0).to(tl.float32)
    if weight is not None:
        weights = tl.load(weight + (element if WHOLE else place), mask=mask, other=0.0).to(tl.float32)
        x *= scale
        if weight.dtype.element_ty != tl.float32:
            x = x.to(dtype).to(tl.float32)
        x = (x * weights).to(dtype).to(tl.float32)
    return _clipped(x, CLIP, clip)


@triton.jit
def _scale_of(source, element, mask, epsilon, HEAD_DIM: tl.constexpr):
    """The factor [GROUP, 1] that normalises each head. element: those of the first halves of the heads."""
    low = tl.load(source + element, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + element + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(low * low + high * high, axis=1, keep_dims=True) / HEAD_DIM + epsilon)


@triton.jit
def _rotate(
    source, weight, cosine, sine, position, target, head, column, mask, epsilon, clip, factor,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
    CLIP: tl.constexpr, AFTER: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Normalise, clip and rotate heads of one projection of a token, and store them at `target`.

    source: its first element. head [GROUP, 1], column and mask [GROUP, HALF]: of this program. ROTARY: columns of a
    head that are rotated. factor: see store_rounded. TABLE: columns of the rotary tables, of which the first ROTARY //
    2 are used. WHOLE: the norm is over all HEADS heads (in a block of BLOCK), with a weight for each of their elements.
    AFTER: the norm follows the rotation; then ROTARY is HEAD_DIM, and WHOLE and CLIP are false.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    PAIRS: tl.constexpr = ROTARY // 2
    dtype: tl.constexpr = source.dtype.element_ty
    element = head * HEAD_DIM + column
    scale = 1.0
    if weight is not None and not AFTER:
        if WHOLE:
            every = tl.arange(0, BLOCK)
            x = tl.load(source + every, mask=every < HEADS * HEAD_DIM, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(x * x, axis=0) / (HEADS * HEAD_DIM) + epsilon)
        else:
            scale = _scale_of(source, element, mask, epsilon, HEAD_DIM)
    if ROTARY == HEAD_DIM:
        before = None if AFTER else weight
        low = _normed(source, before, element, column, mask, scale, clip, WHOLE, CLIP)
        high = _normed(source, before, element + HALF, column + HALF, mask, scale, clip, WHOLE, CLIP)
        c = tl.load(cosine + position * TABLE + column, mask=mask, other=0.0)
        s = tl.load(sine + position * TABLE + column, mask=mask, other=0.0)
        first, second = low * c - high * s, high * c + low * s
        if AFTER:
            first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
            scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1, keep_dims=True) / HEAD_DIM + epsilon)
            low_weight = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
            high_weight = tl.load(weight + column + HALF, mask=mask, other=0.0).to(tl.float32)
            first = (first * scale).to(dtype).to(tl.float32) * low_weight
            second = (second * scale).to(dtype).to(tl.float32) * high_weight
        store_rounded(target + element, first, mask, factor, dtype)
        store_rounded(target + element + HALF, second, mask, factor, dtype)
    else:  # pairs are not HALF columns apart, so each element loads its partner
        for half in tl.static_range(2):
            place = column + half * HALF
            first = place < PAIRS
            rotated = mask & (place < ROTARY)
            partner = tl.where(first, place + PAIRS, place - PAIRS)
            pair = position * TABLE + tl.where(first, place, place - PAIRS)
            c = tl.load(cosine + pair, mask=rotated, other=1.0)
            s = tl.load(sine + pair, mask=rotated, other=0.0)
            x = _normed(source, weight, head * HEAD_DIM + place, place, mask, scale, clip, WHOLE, CLIP)
            y = _normed(source, weight, head * HEAD_DIM + partner, partner, rotated, scale, clip, WHOLE, CLIP)
            turned = x * c + tl.where(first, -y, y) * s
            store_rounded(target + head * HEAD_DIM + place, turned, mask, factor, dtype)


@triton.jit
def _qk_norm_rope_append(
    qkv, q_norm, k_norm, v_norm, cosine, sine, positions, slot_mapping, query, keys, values, stride, epsilon, clip,
    key_factor, value_factor,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr,
    HALF_BLOCK: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
    CLIP: tl.constexpr, AFTER: tl.constexpr, VALUES: tl.constexpr, TABLE: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """One program for GROUP heads of a token: first those of the query, then of the key, then of the value.

    VALUES: there are values; otherwise they are the keys. TABLE: columns of the rotary tables."""
    wait_for_previous(WAITS)
    Q_GROUPS: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    K_GROUPS: tl.constexpr = (KV_HEADS + GROUP - 1) // GROUP
    token = (tl.program_id(0) // (Q_GROUPS + 2 * K_GROUPS)).to(tl.int64)
    group = tl.program_id(0) % (Q_GROUPS + 2 * K_GROUPS)
    q_source = qkv + token * stride
    k_source = q_source + HEADS * HEAD_DIM
    v_source = k_source + (KV_HEADS * HEAD_DIM if VALUES else 0)
    member = tl.arange(0, GROUP)[:, None]
    column = tl.arange(0, HALF_BLOCK)[None, :]
    narrow = column < HEAD_DIM // 2
    position = tl.load(positions + token)
    slot = tl.load(slot_mapping + token) * (KV_HEADS * HEAD_DIM)
    if group < Q_GROUPS:
        head = group * GROUP + member
        _rotate(
            q_source, q_norm, cosine, sine, position, query + token * (HEADS * HEAD_DIM), head, column,
            (head < HEADS) & narrow, epsilon, clip, 1.0, HEADS, HEAD_DIM, ROTARY, WHOLE, Q_BLOCK, CLIP,
            AFTER, TABLE,
        )  # fmt: skip
    elif group < Q_GROUPS + K_GROUPS:
        head = (group - Q_GROUPS) * GROUP + member
        _rotate(
            k_source, k_norm, cosine, sine, position, keys + slot, head, column,
            (head < KV_HEADS) & narrow, epsilon, clip, key_factor, KV_HEADS, HEAD_DIM, ROTARY, WHOLE, K_BLOCK, CLIP,
            AFTER, TABLE,
        )  # fmt: skip
    else:
        head = (group - Q_GROUPS - K_GROUPS) * GROUP + member
        mask = (head < KV_HEADS) & narrow
        scale = 1.0
        if v_norm is not None:
            scale = _scale_of(v_source, head * HEAD_DIM + column, mask, epsilon, HEAD_DIM)
        for half in tl.static_range(2):
            place = half * (HEAD_DIM // 2) + column
            element = head * HEAD_DIM + place
            x = _normed(v_source, v_norm, element, place, mask, scale, clip, False, CLIP)
            store_rounded(values + slot + element, x, mask, value_factor, qkv.dtype.element_ty)


def qk_norm_rope_append(
    qkv: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    epsilon: float,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    clip: float = 0.0,
    norm_after_rotary: bool = False,
    v_norm: torch.Tensor | None = None,
    scale: CacheScale = UNSCALED,
) -> torch.Tensor:
    """Return the normed, rotated query of one layer [tokens, heads, head_dim]; write its keys and values to the cache.

    qkv [tokens, (heads + 2 * kv_heads) * head_dim]: query, key and value of a token one after the other; rows may be
    strided. Without values, [tokens, (heads + kv_heads) * head_dim], a value is its key before norm and rotation (Gemma
    4). q_norm, k_norm: RMSNorm weights: None, [head_dim] for each head alone (Qwen3), or [heads * head_dim] and
    [kv_heads * head_dim] over the whole projection (OLMoE). clip: query, key and value are clamped to +-clip after the
    norms (OLMoE's clip_qkv); 0: they are not. v_norm: None, or weights [head_dim] of a norm of each value.
    norm_after_rotary: each head is rotated whole and then normalised (Hunyuan). cosine, sine [positions, rotary / 2]
    float32, whose rows may be strided, indexed by `positions` [tokens] int64: of the first `rotary` elements of a head,
    element i is rotated with element i + rotary / 2. keys, values [pages, page_size, kv_heads, head_dim]: one layer's
    cache, written at `slot_mapping` [tokens] int64 in its own dtype; numbers of float8_e4m3fn are divided by `scale`
    and saturate at +-448. Norms are rounded as transformers rounds them; the rotation is float32 and rounded once.
    Raises ValueError for shapes that do not fit.
    """
    tokens, width = qkv.shape
    head_dim = keys.shape[-1]
    parts = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    if width == sum(parts[:2]):
        parts[2] = 0
    fits = width == sum(parts) and qkv.stride(1) == 1 and head_dim % 2 == 0
    fits &= keys.shape == values.shape and keys.shape[2] == kv_heads and keys.is_contiguous() and values.is_contiguous()
    rotary = cosine.shape[1] * 2
    fits &= cosine.shape == sine.shape and rotary <= head_dim
    fits &= cosine.dtype == sine.dtype == torch.float32 and cosine.stride() == sine.stride()
    fits &= rotary == 0 or cosine.stride(1) == 1
    fits &= positions.shape == slot_mapping.shape == (tokens,)
    sizes = [None if norm is None else norm.numel() for norm in (q_norm, k_norm)]
    fits &= sizes in ([None, None], [head_dim, head_dim], parts[:2])
    fits &= v_norm is None or v_norm.shape == (head_dim,)
    fits &= not norm_after_rotary or (sizes == [head_dim, head_dim] and rotary == head_dim and clip == 0)
    check_fits(
        fits, "qk_norm_rope_append", qkv=qkv, q_norm=q_norm, k_norm=k_norm, cosine=cosine, keys=keys, values=values
    )
    if runs_kernel(qkv):
        query = qkv.new_empty(tokens, heads, head_dim)
        half_block = triton.next_power_of_2(head_dim // 2)
        group = 1 if tokens <= _FEW_TOKENS else min(triton.next_power_of_2(kv_heads), 8)
        whole = q_norm is not None and q_norm.numel() != head_dim
        groups = triton.cdiv(heads, group) + 2 * triton.cdiv(kv_heads, group)
        if tokens:
            _qk_norm_rope_append[(tokens * groups,)](
                qkv, q_norm, k_norm, v_norm, cosine, sine, positions, slot_mapping, query, keys, values,
                qkv.stride(0), epsilon, clip, 1 / scale.key, 1 / scale.value,
                HEADS=heads,
                KV_HEADS=kv_heads,
                HEAD_DIM=head_dim,
                ROTARY=rotary,
                HALF_BLOCK=half_block,
                GROUP=group,
                WHOLE=whole,
                Q_BLOCK=triton.next_power_of_2(heads * head_dim),
                K_BLOCK=triton.next_power_of_2(kv_heads * head_dim),
                CLIP=clip > 0,
                AFTER=norm_after_rotary,
                VALUES=parts[2] > 0,
                TABLE=cosine.stride(0),
                **launch_options(),
                num_warps=4 if whole else max(group * half_block // 256, 1),
            )  # fmt: skip
        return query
    c, s = cosine[positions, None], sine[positions, None]  # [tokens, 1, head_dim / 2]
    rotated = []
    query, key, value = torch.split(qkv, parts, dim=-1)
    value = (value if parts[2] else key).reshape(tokens, kv_heads, head_dim)
    if v_norm is not None:
        value = rms_norm(value, v_norm, epsilon)
    for x, count, norm in ((query, heads, q_norm), (key, kv_heads, k_norm)):
        if norm is not None and not norm_after_rotary:
            x = rms_norm(x.reshape(tokens, count * head_dim // norm.numel(), norm.numel()), norm, epsilon)
        x = _clamped(x.reshape(tokens, count, head_dim), clip)
        low, high, rest = torch.split(x.float(), [rotary // 2, rotary // 2, head_dim - rotary], dim=-1)
        x = torch.cat((low * c - high * s, high * c + low * s, rest), dim=-1).to(qkv.dtype)
        rotated.append(rms_norm(x, norm, epsilon) if norm is not None and norm_after_rotary else x)
    store(keys.flatten(0, 1), slot_mapping, rotated[1], scale.key)
    store(values.flatten(0, 1), slot_mapping, _clamped(value, clip), scale.value)
    return rotated[0]


def _clamped(x: torch.Tensor, clip: float) -> torch.Tensor:
    return x.clamp(-clip, clip) if clip else x
