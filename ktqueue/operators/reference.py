"""Plain torch twins of the operators: what they must compute, written to be read. Oracle of the tests, and the
attention of every case that the compiled kernels do not cover."""

from collections.abc import Callable

import torch

from ktqueue.operators.packed import Bytes, ExpertWeights, PackedExperts

Dequantize = Callable[[str, Bytes, int], torch.Tensor]
"""(quant, data, count) -> [count] weights."""


def expert_matrix(packed: PackedExperts, expert: int, dequantize: Dequantize) -> torch.Tensor:
    """One expert's matrix as [rows, columns]."""
    weights = dequantize(packed.quant, packed.data[expert], packed.rows * packed.columns)
    return weights.view(packed.rows, packed.columns)


def experts(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    weights: ExpertWeights,
    dequantize: Dequantize,
) -> torch.Tensor:
    """[tokens, hidden] through the chosen experts, in the dtype of `hidden_states`.

    out[t] = sum over slots s of top_k_weights[t, s] * down(silu(gate x) * (up x)) of expert top_k_index[t, s].
    """
    out = torch.zeros_like(hidden_states)
    for expert in torch.unique(top_k_index).tolist():
        gate, up, down = (
            expert_matrix(part, expert, dequantize).to(hidden_states.dtype)
            for part in (weights.gate, weights.up, weights.down)
        )
        tokens, slots = torch.where(top_k_index == expert)
        x = hidden_states[tokens]
        mid = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
        out.index_add_(0, tokens, (mid @ down.T) * top_k_weights[tokens, slots, None].to(x.dtype))
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
) -> torch.Tensor:
    """Causal attention over pages that already hold the step's keys and values.

    query [heads, tokens, head_dim]; keys, values [pages, page_size, kv_heads, head_dim] ->
    [tokens, heads, head_dim]. A token at position p sees keys max(0, p + 1 - sliding_window) .. p of its row.
    """
    heads, tokens, head_dim = query.shape
    page_size, kv_heads = keys.shape[1:3]
    out = query.new_zeros(tokens, heads, head_dim)
    starts, contexts = query_starts.tolist(), context_lengths.tolist()
    for row, context in enumerate(contexts):
        begin, end = starts[row], starts[row + 1]
        pages = page_table[row, : -(-context // page_size)].long()
        # [context, kv_heads, head_dim] -> [heads, context, head_dim]
        k, v = (
            cache[pages].flatten(0, 1)[:context].transpose(0, 1).repeat_interleave(heads // kv_heads, dim=0)
            for cache in (keys, values)
        )
        position = torch.arange(context - (end - begin), context, device=query.device)[:, None]
        at = torch.arange(context, device=query.device)[None, :]
        hidden = at > position
        if sliding_window is not None:
            hidden |= at <= position - sliding_window
        scores = (query[:, begin:end] @ k.transpose(1, 2)) * scaling  # [heads, chunk, context]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(
            dim=-1, dtype=torch.promote_types(query.dtype, torch.float32)
        )
        out[begin:end] = (weights.to(v.dtype) @ v).transpose(0, 1)
    return out
