"""The sizes of multi-head latent attention, and what its operators on every device share. Knows no weights."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Angles = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""What transformers' rotary modules give: a complex tensor [1, tokens, rotary / 2], or cosines and sines [1, tokens,
rotary] each, the angles twice."""


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Of one layer's attention, in numbers. `plain`, `rotary`, `value`: of each head, of a query's or key's part
    without and with a position, and of a value. `latent`: of a token's latent. `interleaved`: rotary pairs lie side by
    side, not half the columns apart. `low_rank`: queries are made in two products with a norm between, over so many
    numbers; 0: in one. `epsilon`: of the norms of latents and of queries."""

    heads: int
    plain: int
    rotary: int
    value: int
    latent: int
    scaling: float
    interleaved: bool
    low_rank: int
    epsilon: float

    @property
    def key(self) -> int:
        """Columns of a key in the cache."""
        return self.latent + self.rotary


def latent_shape(module: nn.Module) -> LatentShape:
    """Of transformers' DeepseekV2Attention or DeepseekV3Attention. Raises ValueError for any other module."""
    one: Any = module
    if not hasattr(module, "kv_a_proj_with_mqa"):
        raise ValueError("it makes no latents")
    return LatentShape(
        heads=one.num_heads,
        plain=one.qk_nope_head_dim,
        rotary=one.qk_rope_head_dim,
        value=one.v_head_dim,
        latent=one.kv_lora_rank,
        scaling=one.scaling,
        interleaved=getattr(one.config, "rope_interleave", True),
        low_rank=one.q_lora_rank or 0,
        epsilon=float(one.kv_a_layernorm.variance_epsilon),
    )


def absorbed(up: torch.Tensor, shape: LatentShape) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrix that makes keys and values of latents, [heads * (plain + value), latent], as views that are applied to
    queries [heads, plain, latent] and to results [heads, latent, value]. Raises ValueError for another size."""
    if up.shape != (wanted := (shape.heads * (shape.plain + shape.value), shape.latent)):
        raise ValueError(f"kv_b_proj.weight must be {list(wanted)}, got {list(up.shape)}")
    keys, values = torch.split(up.view(shape.heads, -1, shape.latent), [shape.plain, shape.value], 1)
    return keys, values.transpose(1, 2)


def cosines_and_sines(given: Angles) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, rotary / 2] each."""
    if isinstance(given, torch.Tensor):
        return given[0].real, given[0].imag
    half = given[0].shape[-1] // 2
    return given[0][0, :, :half], given[1][0, :, :half]


def turn(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """x [..., rotary] turned by its position. Pairs come out half the columns apart, in queries and keys alike, so that
    their products are the same whichever way they lay."""
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The root mean square norm, computed in float32 as transformers does."""
    return weight * functional.rms_norm(x.float(), x.shape[-1:], None, epsilon).to(x.dtype)


def absorb(
    query: torch.Tensor, key_up: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, shape: LatentShape
) -> torch.Tensor:
    """query [tokens, heads * (plain + rotary)] -> [tokens, heads, latent + rotary], as the cache's keys are."""
    each = query.view(len(query), shape.heads, shape.plain + shape.rotary)
    plain, turning = torch.split(each, [shape.plain, shape.rotary], -1)
    latent = torch.bmm(plain.transpose(0, 1), key_up).transpose(0, 1)
    turned = turn(turning, cosine[:, None], sine[:, None], interleaved=shape.interleaved)
    return torch.cat([latent, turned], -1)


def make_key(
    down: torch.Tensor, norm: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, shape: LatentShape
) -> torch.Tensor:
    """down [tokens, latent + rotary], what the first matrix made of a token -> its key in the cache, same shape."""
    latent, key = torch.split(down, [shape.latent, shape.rotary], -1)
    return torch.cat(
        [rms_norm(latent, norm, shape.epsilon), turn(key, cosine, sine, interleaved=shape.interleaved)], -1
    )


def values_of(attended: torch.Tensor, value_up: torch.Tensor) -> torch.Tensor:
    """attended [tokens, heads, latent] -> [tokens, heads * value]."""
    return torch.bmm(attended.transpose(0, 1), value_up).transpose(0, 1).flatten(1)
