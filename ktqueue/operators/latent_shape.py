"""The sizes of multi-head latent attention, and the operations that all devices share. Knows no weights."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ktqueue.families.table import family_of_type

Angles = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""The result of transformers' rotary modules: a complex tensor [1, tokens, rotary / 2], or cosines and sines [1,
tokens, rotary] each, in which both halves are equal."""


GROWTH = "llama_4_scaling_beta"
"""The rotary parameter of models whose queries grow with their position."""
INDEX_NORM_EPSILON = 1e-6
"""Of the norm of an indexer's keys in transformers, whatever the config says."""


@dataclass(frozen=True, slots=True)
class IndexerShape:
    """The indexer of sparse attention. key: columns of a query or key; chosen: keys that a token attends to;
    interleaved: like LatentShape's, for the indexer's own queries and keys."""

    heads: int
    key: int
    chosen: int
    interleaved: bool


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The sizes of one layer's attention. plain, rotary: columns of a head's query or key without and with a position;
    value: columns of a head's value; latent: columns of a token's latent; interleaved: rotary pairs are adjacent, not
    half the columns apart; low_rank: the inner size if queries are computed by two matrices with a norm between, else
    0; epsilon: of the norms of latents and queries; indexer: what chooses the keys of a token; None: it sees all.
    growth, period: a query at position p is multiplied by 1 + growth * log(1 + floor(p / period)) (Mistral 4)."""

    heads: int
    plain: int
    rotary: int
    value: int
    latent: int
    scaling: float
    interleaved: bool
    low_rank: int
    epsilon: float
    indexer: IndexerShape | None = None
    growth: float = 0.0
    period: float = 1.0

    @property
    def key(self) -> int:
        """Columns of a key in the cache."""
        return self.latent + self.rotary


def latent_shape(module: nn.Module) -> LatentShape:
    """Read the shape from transformers' DeepseekV2Attention or a copy of it. Raises ValueError for any other
    module."""
    attention: Any = module
    if not hasattr(module, "kv_a_proj_with_mqa"):
        raise ValueError("it makes no latents")
    rope = attention.config.rope_parameters
    return LatentShape(
        heads=attention.num_heads,
        plain=attention.qk_nope_head_dim,
        rotary=attention.qk_rope_head_dim,
        value=attention.v_head_dim,
        latent=attention.kv_lora_rank,
        scaling=attention.scaling,
        interleaved=getattr(attention.config, "rope_interleave", True),
        low_rank=attention.q_lora_rank or 0,
        epsilon=float(attention.kv_a_layernorm.variance_epsilon),
        indexer=_indexer_shape(attention.config) if hasattr(attention, "indexer") else None,
        growth=rope.get(GROWTH) or 0.0,
        period=float(rope.get("original_max_position_embeddings") or 1),
    )


def has_indexer(attention: Any) -> bool:
    """Whether an attention of transformers chooses keys itself. One with an indexer that is None takes the choice of
    the layer before."""
    return getattr(attention, "indexer", None) is not None


def _indexer_shape(config: Any) -> IndexerShape:
    return IndexerShape(
        heads=config.index_n_heads,
        key=config.index_head_dim,
        chosen=config.index_topk,
        interleaved=family_of_type(config.model_type).indexer_interleaved,
    )


def split_up_matrix(up: torch.Tensor, shape: LatentShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Split the matrix that expands latents to keys and values, [heads * (plain + value), latent], into views for
    queries [heads, plain, latent] and for results [heads, latent, value]. Raises ValueError for another size."""
    if up.shape != (wanted := (shape.heads * (shape.plain + shape.value), shape.latent)):
        raise ValueError(f"kv_b_proj.weight must be {list(wanted)}, got {list(up.shape)}")
    keys, values = torch.split(up.view(shape.heads, -1, shape.latent), [shape.plain, shape.value], 1)
    return keys, values.transpose(1, 2)


def grown(query: torch.Tensor, positions: torch.Tensor, shape: LatentShape) -> torch.Tensor:
    """Scale queries [tokens, any] by their positions [tokens]: see LatentShape."""
    if not shape.growth:
        return query
    return query * growth_factors(positions, shape.growth, shape.period)[:, None].to(query.dtype)


def growth_factors(places: torch.Tensor, growth: float, period: float) -> torch.Tensor:
    """Return the factors of queries at `places`, any integers, in their shape and float32: see csrc/model/growth.h."""
    return 1 + growth * torch.log1p(torch.floor(places.float() / period))


def cosines_and_sines(angles: Angles) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines, [tokens, rotary / 2] each."""
    if isinstance(angles, torch.Tensor):
        return angles[0].real, angles[0].imag
    half = angles[0].shape[-1] // 2
    return angles[0][0, :, :half], angles[1][0, :, :half]


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotate x [..., rotary] by its position. The pairs of the result are half the columns apart in queries and keys
    alike, so their products are the same in either layout."""
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Apply the root mean square norm, in float32 as transformers does."""
    return weight * functional.rms_norm(x.float(), x.shape[-1:], None, epsilon).to(x.dtype)


def rotate_query(query: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, shape: LatentShape) -> torch.Tensor:
    """Turn query [tokens, heads * (plain + rotary)] into [tokens, heads, plain + rotary], whose last columns are
    rotated."""
    plain, rotary = _query_parts(query, shape)
    return torch.cat([plain, rotate(rotary, cosine[:, None], sine[:, None], interleaved=shape.interleaved)], -1)


def absorb_query(
    query: torch.Tensor, key_up: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, shape: LatentShape
) -> torch.Tensor:
    """Turn query [tokens, heads * (plain + rotary)] into [tokens, heads, latent + rotary], the form of the cache's
    keys."""
    plain, rotary = _query_parts(query, shape)
    return _absorbed(plain, rotate(rotary, cosine[:, None], sine[:, None], interleaved=shape.interleaved), key_up)


def absorb_rotated(query: torch.Tensor, key_up: torch.Tensor) -> torch.Tensor:
    """Turn the result of rotate_query, [tokens, heads, plain + rotary], into that of absorb_query."""
    plain = key_up.shape[1]
    return _absorbed(query[..., :plain], query[..., plain:], key_up)


def make_key(
    down: torch.Tensor, norm: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, shape: LatentShape
) -> torch.Tensor:
    """Turn the first matrix's result, down [tokens, latent + rotary], into the token's key in the cache, same shape."""
    latent, key = torch.split(down, [shape.latent, shape.rotary], -1)
    return torch.cat(
        [rms_norm(latent, norm, shape.epsilon), rotate(key, cosine, sine, interleaved=shape.interleaved)], -1
    )


def expand_values(attended: torch.Tensor, value_up: torch.Tensor) -> torch.Tensor:
    """Turn attended [tokens, heads, latent] into values [tokens, heads * value]."""
    out = attended.new_empty(*attended.shape[:2], value_up.shape[2])
    torch.bmm(attended.transpose(0, 1), value_up, out=out.transpose(0, 1))  # in the order of `out`, without a copy
    return out.flatten(1)


def _query_parts(query: torch.Tensor, shape: LatentShape) -> tuple[torch.Tensor, ...]:
    """The columns of every head without a position, [tokens, heads, plain], and with one, [tokens, heads, rotary]."""
    return torch.split(query.view(len(query), shape.heads, -1), [shape.plain, shape.rotary], -1)


def _absorbed(plain: torch.Tensor, rotated: torch.Tensor, key_up: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.bmm(plain.transpose(0, 1), key_up).transpose(0, 1), rotated], -1)
