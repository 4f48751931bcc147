"""The small operators of a decoder layer, each one launch: a Triton kernel for CUDA tensors, a torch twin for others.

They compute what the modules of transformers compute one by one, and round where those round; where a sum or a
rotation is several roundings there, it is one here (float32 inside). No host sync, capturable in CUDA graphs. They know
no model.
"""

from dataclasses import dataclass
from typing import get_args

import torch

from ktqueue.operators import reference
from ktqueue.operators.native import ActivationName

FP8_MAX = 448.0
"""The largest number of float8_e4m3fn: what is written to a cache of that type saturates there."""
FEW_ROWS = 4
"""Up to here a matrix is read faster by our kernel; beyond, tensor cores (torch's kernels) are needed to keep up."""
SIGMOID_SUM_FLOOR = 1e-20
"""Added to a sum of sigmoids before it divides them (transformers' DeepseekV3MoE): all may be 0."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Where tokens go: `ids` and `cpu_ids` [tokens, experts_per_token] int64, `weights` float32 of the same shape.

    ids: -1 for tokens that only pad. cpu_ids: as ids, and -1 where the GPU has the expert.
    """

    ids: torch.Tensor
    cpu_ids: torch.Tensor
    weights: torch.Tensor


def add_rms_norm(
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    *,
    added: torch.Tensor | None = None,
    partials: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    copy: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual [tokens, hidden] += added + sum(partials) + sigmoid(shared_gate) * shared, IN PLACE; then its RMSNorm.

    weight [hidden]; added, shared [tokens, hidden]; shared_gate [tokens, 1] (a gate's logit; with `shared` only; none:
    the whole of it is added): any float dtype. partials [tokens, slots, hidden] float32. Returns [tokens, hidden] in
    the dtype of `residual`, and writes it to `copy` [tokens, hidden] of any float dtype too. The sum is float32 and
    rounded once; the norm is of the rounded sum: rounded, then times weight (transformers' LlamaRMSNorm and its twins).
    `added` and `copy` may lie in pinned host memory. All must be contiguous. Raises ValueError for shapes that do not
    fit.
    """
    shape = residual.shape
    fits = weight.shape == shape[1:] and all(x is None or x.shape == shape for x in (added, shared, copy))
    fits &= partials is None or (partials.shape[::2] == shape and partials.dtype == torch.float32)
    fits &= shared_gate is None or (shared is not None and shared_gate.numel() == shape[0])
    _check(fits, "add_rms_norm", residual=residual, weight=weight, added=added, partials=partials, copy=copy)
    if residual.is_cuda:
        from ktqueue.operators.gpu.kernels import norm as triton_norm

        return triton_norm.add_rms_norm(
            residual,
            weight,
            epsilon,
            added=added,
            partials=partials,
            shared=shared,
            shared_gate=shared_gate,
            copy=copy,
        )
    total = residual.float()
    if added is not None:
        total = total + added.float()
    if partials is not None:
        total = total + partials.sum(1)
    if shared is not None:
        gate = 1.0 if shared_gate is None else shared_gate.float().sigmoid().view(-1, 1)
        total = total + gate * shared.float()
    residual.copy_(total)
    normed = _rms_norm(residual, weight, epsilon)
    if copy is not None:
        copy.copy_(normed)
    return normed


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
) -> torch.Tensor:
    """The query of one layer [tokens, heads, head_dim], normed and turned; its keys and values go to the cache.

    qkv [tokens, (heads + 2 * kv_heads) * head_dim]: query, key and value of a token one after the other, rows may be
    strided. q_norm, k_norm: RMSNorm weights: None, [head_dim] for each head alone (Qwen3), or [heads * head_dim] and
    [kv_heads * head_dim] over the whole projection (OLMoE). clip: query, key and value are clamped to +-clip after the
    norms (OLMoE's clip_qkv); 0: not. cosine, sine [positions, head_dim / 2] float32, taken at `positions` [tokens]
    int64; element i turns with element i + head_dim / 2. keys, values [pages, page_size, kv_heads, head_dim]: one
    layer's cache, written at `slot_mapping` [tokens] int64 in its own dtype; float8_e4m3fn saturates at +-448.
    Norms are rounded as transformers rounds them; the rotation is float32 and rounded once.
    Raises ValueError for shapes that do not fit.
    """
    tokens, width = qkv.shape
    head_dim = keys.shape[-1]
    parts = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    fits = width == sum(parts) and qkv.stride(1) == 1 and head_dim % 2 == 0
    fits &= keys.shape == values.shape and keys.shape[2] == kv_heads and keys.is_contiguous() and values.is_contiguous()
    fits &= cosine.shape == sine.shape and cosine.shape[1] * 2 == head_dim
    fits &= cosine.dtype == sine.dtype == torch.float32 and cosine.is_contiguous() and sine.is_contiguous()
    fits &= positions.shape == slot_mapping.shape == (tokens,)
    sizes = [None if norm is None else norm.numel() for norm in (q_norm, k_norm)]
    fits &= sizes in ([None, None], [head_dim, head_dim], parts[:2])
    _check(fits, "qk_norm_rope_append", qkv=qkv, q_norm=q_norm, k_norm=k_norm, cosine=cosine, keys=keys, values=values)
    if qkv.is_cuda:
        from ktqueue.operators.gpu.kernels import rope as triton_rope

        return triton_rope.qk_norm_rope_append(
            qkv,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            q_norm=q_norm,
            k_norm=k_norm,
            epsilon=epsilon,
            cosine=cosine,
            sine=sine,
            positions=positions,
            slot_mapping=slot_mapping,
            keys=keys,
            values=values,
            clip=clip,
        )
    c, s = cosine[positions, None], sine[positions, None]  # [tokens, 1, head_dim / 2]
    turned = []
    query, key, value = torch.split(qkv, parts, dim=-1)
    for x, count, norm in ((query, heads, q_norm), (key, kv_heads, k_norm)):
        if norm is not None:
            x = _rms_norm(x.reshape(tokens, count * head_dim // norm.numel(), norm.numel()), norm, epsilon)
        x = _clipped(x.reshape(tokens, count, head_dim), clip)
        low, high = x.float().chunk(2, dim=-1)
        turned.append(torch.cat((low * c - high * s, high * c + low * s), dim=-1).to(qkv.dtype))
    _append(keys, slot_mapping, turned[1])
    _append(values, slot_mapping, _clipped(value.reshape(tokens, kv_heads, head_dim), clip))
    return turned[0]


def route(
    logits: torch.Tensor,
    experts_per_token: int,
    *,
    renormalise: bool,
    on_gpu: torch.Tensor | None = None,
    live_tokens: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    copies: tuple[torch.Tensor, torch.Tensor] | None = None,
    choice: torch.Tensor | None = None,
    sigmoid: bool = False,
    scale: float = 1.0,
) -> Routing:
    """The experts of each token and their weights, highest first: softmax over all experts, of which the top stay.

    choice [tokens, experts] float32: what is highest there instead is taken; those taken still come by their weights,
    highest first. sigmoid: weights are those of the logits, not the softmax. scale: all weights are multiplied by it in
    the end.
    logits [tokens, experts], any float dtype, rows may be strided; the softmax is float32. Among equal logits the
    lowest id comes first. renormalise: weights add up to 1 (Mixtral, norm_topk_prob), or are all 0 where sigmoids are;
    else they are the softmax's.
    on_gpu [experts] int64: >= 0 where the GPU has the expert. live_tokens [1] int32: tokens from there on only pad: ids
    -1 and weights 0. counts [experts] int32: += uses by the other tokens. copies: a second place for cpu_ids and
    weights, of their dtypes and shape; it may be pinned host memory.
    A row with NaN or +infinity, or of -infinity alone, gets ids 0, 1, ... and weights of NaN.
    Raises ValueError for shapes that do not fit.
    """
    tokens, experts = logits.shape
    shape = (tokens, experts_per_token)
    fits = 0 < experts_per_token <= experts and logits.stride(1) == 1
    fits &= on_gpu is None or (on_gpu.shape == (experts,) and on_gpu.dtype == torch.int64)
    fits &= live_tokens is None or (live_tokens.numel() == 1 and live_tokens.dtype == torch.int32)
    fits &= counts is None or (counts.shape == (experts,) and counts.dtype == torch.int32)
    fits &= choice is None or (choice.shape == logits.shape and choice.dtype == torch.float32)
    fits &= copies is None or [(x.shape, x.dtype) for x in copies] == [(shape, torch.int64), (shape, torch.float32)]
    _check(fits, f"route to {experts_per_token}", logits=logits, on_gpu=on_gpu, live_tokens=live_tokens, counts=counts)
    if logits.is_cuda:
        from ktqueue.operators.gpu.kernels import router as triton_router

        return Routing(
            *triton_router.route(
                logits,
                experts_per_token,
                renormalise=renormalise,
                on_gpu=on_gpu,
                live_tokens=live_tokens,
                counts=counts,
                copies=copies,
                choice=choice,
                sigmoid=sigmoid,
                scale=scale,
            )
        )
    order = torch.sort((logits if choice is None else choice).float(), dim=-1, descending=True, stable=True)
    ids = order.indices[:, :experts_per_token].contiguous()
    if choice is not None:
        ids = ids.sort(-1).values
        ids = ids.gather(1, torch.sort(logits.float().gather(1, ids), dim=-1, descending=True, stable=True).indices)
    scores = logits.float().sigmoid() if sigmoid else logits.float().softmax(-1)
    weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + (SIGMOID_SUM_FLOOR if sigmoid else 0.0))
    weights = weights * scale
    unsound = logits.amax(-1, keepdim=True).isfinite().logical_not()  # a NaN comes through
    ids = torch.where(unsound, torch.arange(experts_per_token, device=ids.device), ids)
    weights = weights.masked_fill(unsound, float("nan"))
    if live_tokens is not None:
        padding = torch.arange(tokens, device=ids.device)[:, None] >= live_tokens
        ids, weights = ids.masked_fill(padding, -1), weights.masked_fill(padding, 0)
    cpu_ids = ids if on_gpu is None else torch.where(on_gpu[ids] >= 0, -1, ids)
    if counts is not None:
        counts += torch.bincount(ids[ids >= 0], minlength=experts)
    if copies is not None:
        copies[0].copy_(cpu_ids)
        copies[1].copy_(weights)
    return Routing(ids, cpu_ids, weights)


def gated(
    activation: ActivationName, gate_up: torch.Tensor, *, alpha: float = 1.702, limit: float = 7.0
) -> torch.Tensor:
    """activation(gate) * up of a dense MLP: gate_up [tokens, 2 * intermediate] -> [tokens, intermediate], its dtype.

    gate is the first half of a row, up the second. alpha, limit: of swiglu_clamped. Raises ValueError for an activation
    that is not one of ActivationName.
    """
    fits = activation in get_args(ActivationName) and gate_up.shape[1] % 2 == 0
    _check(fits, f"gated by {activation}", gate_up=gate_up)
    if gate_up.is_cuda:
        from ktqueue.operators.gpu.kernels import norm as triton_norm

        return triton_norm.gated(activation, gate_up, alpha, limit)
    gate, up = gate_up.chunk(2, dim=-1)
    return reference.activate(activation, gate, up, alpha, limit)


def few_rows_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [tokens, columns] times weight [outputs, columns] transposed, plus bias [outputs] -> [tokens, outputs].

    What torch.nn.functional.linear computes, and so it is called for all but 1 to FEW_ROWS tokens of 16 bits on CUDA,
    where one row leaves it at a part of what memory can give. Sums are float32. Rows of x may be strided. dtype: of the
    result: that of x, or float32, which keeps the sums as they are; then there is no bias.
    """
    few = 1 <= x.shape[0] <= FEW_ROWS and x.dtype == weight.dtype != torch.float32
    if few and x.is_cuda and x.stride(1) == 1 and weight.is_contiguous():
        from ktqueue.operators.gpu.kernels import linear as triton_linear

        return triton_linear.few_rows_linear(x, weight, bias, dtype)
    if dtype in (None, x.dtype):
        return torch.nn.functional.linear(x, weight, bias)
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=dtype)
    return torch.nn.functional.linear(x.float(), weight.float())


def _check(fits: bool, name: str, **tensors: torch.Tensor | None) -> None:
    if not fits:
        shapes = ", ".join(f"{key} {list(x.shape)} {x.dtype}" for key, x in tensors.items() if x is not None)
        raise ValueError(f"{name} does not take {shapes}")


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Over the last dimension: float32 inside, rounded, then times weight, in the dtype of x."""
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    return (weight * (x.float() * scale).to(x.dtype)).to(x.dtype)


def _clipped(x: torch.Tensor, clip: float) -> torch.Tensor:
    return x.clamp(-clip, clip) if clip else x


def _append(cache: torch.Tensor, slot_mapping: torch.Tensor, states: torch.Tensor) -> None:
    """states [tokens, kv_heads, head_dim] into cache [pages, page_size, kv_heads, head_dim]."""
    if cache.dtype == torch.float8_e4m3fn:  # older torch makes NaN of what is too large; none has its index_copy_
        states = states.float().clamp(-FP8_MAX, FP8_MAX).to(cache.dtype).view(torch.uint8)
        cache = cache.view(torch.uint8)
    cache.view(-1, *states.shape[1:]).index_copy_(0, slot_mapping, states.to(cache.dtype))
