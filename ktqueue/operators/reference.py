"""Plain torch twins of the operators, written to be read. Tests compare the kernels with them. Cases that the compiled
kernels do not cover use this attention."""

from collections.abc import Callable

import torch

from ktqueue.operators.kv_cache import UNSCALED, CacheScale
from ktqueue.operators.packed import Bytes, ExpertWeights, PackedExperts

Dequantize = Callable[[str, Bytes, int], torch.Tensor]
"""(quant, data, count) -> [count] weights."""


def expert_matrix(packed: PackedExperts, expert: int, dequantize: Dequantize) -> torch.Tensor:
    """Return one expert's matrix as [rows, columns]."""
    weights = dequantize(packed.quant, packed.data[expert], packed.rows * packed.columns)
    return weights.view(packed.rows, packed.columns)


def quantize_activations(x: torch.Tensor) -> torch.Tensor:
    """Round x [tokens, columns] to int8 with a scale per 32 columns: round(x / scale) * scale, scale = max |x| / 127.

    Computed in float32 like the kernels, so that ties round alike. Returned in the dtype of `x`.
    """
    columns = x.shape[-1]
    padded = torch.nn.functional.pad(x.float(), (0, -columns % 32)).reshape(*x.shape[:-1], -1, 32)
    largest = padded.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest >= 1e-30, 127 / largest, 0)
    rounded: torch.Tensor = (padded * inverse).round().to(x.dtype) * (largest / 127).to(x.dtype)
    return rounded.flatten(-2)[..., :columns]


def activate(name: str, gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Apply the activation, a native.ActivationName, to `gate` and multiply by `up`."""
    if name == "swiglu_clamped":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    functional = torch.nn.functional
    if name == "silu_limited":
        return functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    if name == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh" if name == "gelu_tanh" else "none") * up


def experts(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    weights: ExpertWeights,
    dequantize: Dequantize,
    *,
    activation: str = "silu",
    alpha: float = 0.0,
    limit: float = 0.0,
    rounded: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> torch.Tensor:
    """Run [tokens, hidden] through the chosen experts, in the dtype of `hidden_states`.

    out[t] = sum over slots s of top_k_weights[t, s] * down(activation(gate x) * (up x)) of expert top_k_index[t, s].
    rounded: applied to each input of a matrix, such as quantize_activations.
    """
    out = torch.zeros_like(hidden_states)
    dtype = hidden_states.dtype

    def linear(x: torch.Tensor, part: PackedExperts, expert: int) -> torch.Tensor:
        bias = 0 if part.bias is None else torch.from_numpy(part.bias[expert]).to(dtype)
        return rounded(x) @ expert_matrix(part, expert, dequantize).to(dtype).T + bias

    for expert in torch.unique(top_k_index).tolist():
        tokens, slots = torch.where(top_k_index == expert)
        x = hidden_states[tokens]
        gate, up = linear(x, weights.gate, expert), linear(x, weights.up, expert)
        activated = activate(activation, gate, up, alpha, limit)
        slot_weights = top_k_weights[tokens, slots, None].to(dtype)
        out.index_add_(0, tokens, linear(activated, weights.down, expert) * slot_weights)
    return out


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_starts: torch.Tensor,
    context_lengths: torch.Tensor,
    page_table: torch.Tensor,
    *,
    scaling: float,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
    chunk: int = 0,
    scale: CacheScale = UNSCALED,
) -> torch.Tensor:
    """Attend causally over pages that already hold the step's keys and values.

    query [heads, tokens, head_dim]; keys [pages, page_size, kv_heads, head_dim] and values [..., value_dim] of any
    dtype -> [tokens, heads, value_dim] in the dtype of `query`. A token at position p sees keys max(0, p + 1 -
    sliding_window) .. p of its row. chunk, sinks, cap: see ScoreOptions. scale: of the stored keys and values.
    """
    heads, tokens, _ = query.shape
    page_size, groups = keys.shape[1], heads // keys.shape[2]
    out = query.new_zeros(tokens, heads, values.shape[-1])
    starts, contexts = query_starts.tolist(), context_lengths.tolist()
    for row, context in enumerate(contexts):
        begin, end = starts[row], starts[row + 1]
        pages = page_table[row, : -(-context // page_size)].long()
        # [context, kv_heads, head_dim] -> [heads, context, head_dim]
        k, v = (
            cache[pages].to(query.dtype).flatten(0, 1)[:context].transpose(0, 1).repeat_interleave(groups, dim=0)
            for cache in (keys, values)
        )
        scores = (query[:, begin:end] @ k.transpose(1, 2)) * (scaling * scale.key)  # [heads, chunk, context]
        if cap:
            scores = (scores / cap).tanh() * cap
        if end - begin > 1 or sliding_window is not None or chunk:  # else the only token sees every key
            position = torch.arange(context - (end - begin), context, device=query.device)[:, None]
            key_position = torch.arange(context, device=query.device)[None, :]
            hidden = key_position > position
            if sliding_window is not None:
                hidden |= key_position <= position - sliding_window
            if chunk:
                hidden |= key_position < position // chunk * chunk
            scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(scores)[:, None, None].expand(heads, end - begin, 1)], -1)
        weights = scores.softmax(dim=-1, dtype=torch.promote_types(query.dtype, torch.float32))[..., :context]
        out[begin:end] = (weights.to(v.dtype) @ v).transpose(0, 1) * scale.value
    return out
