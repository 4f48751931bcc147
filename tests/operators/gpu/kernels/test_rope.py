"""Norm, rotation and append: the twin computes what the modules of transformers do, the kernel what the twin does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AttentionInterface,
    HunYuanMoEV1Config,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1Attention
from transformers.models.mixtral.modeling_mixtral import MixtralAttention
from transformers.models.olmoe.modeling_olmoe import OlmoeAttention, OlmoeRotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

from ktqueue.operators.gpu.kernels import rope
from ktqueue.operators.gpu.kernels.rope import qk_norm_rope_append
from ktqueue.operators.kv_cache import CacheScale

from ..interpreted import by_kernel
from .comparing import DTYPES, assert_same, config_sizes


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (Qwen3MoeAttention, Qwen3MoeConfig(**config_sizes(head_dim=16))),
        (OlmoeAttention, OlmoeConfig(**config_sizes(clip_qkv=1.0))),
        (OlmoeAttention, OlmoeConfig(**config_sizes())),
        (MixtralAttention, MixtralConfig(**config_sizes(head_dim=24))),
        (HunYuanMoEV1Attention, HunYuanMoEV1Config(**config_sizes(head_dim=16))),
    ],
    ids=["per head", "whole, clipped", "whole", "none", "after the rotation"],
)
def test_query_key_and_value_are_those_of_transformers(kind: type[nn.Module], config: Any, dtype: torch.dtype) -> None:
    seen: list[torch.Tensor] = []

    def keep(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
        seen[:] = (states[0].transpose(0, 1) for states in (query, key, value))
        return query.transpose(1, 2), None

    AttentionInterface.register("keep", keep)
    config._attn_implementation = "keep"
    attention: Any = kind(config, 0).to(dtype)
    for parameter in attention.parameters():
        parameter.data.normal_()
    rotary = OlmoeRotaryEmbedding(config)  # all of them have the same
    hidden = torch.randn(1, 7, 48).to(dtype)
    positions = torch.tensor([3, 0, 9, 10, 11, 63, 1])
    attention(hidden, rotary(hidden, positions[None]), None)

    half = attention.head_dim // 2
    cosine, sine = (table[0, :, :half].contiguous() for table in rotary(torch.ones(1), torch.arange(64)[None]))
    keys, values = torch.zeros(2, 3, 4, 2, 2 * half, dtype=dtype)
    slots = torch.tensor([0, 5, 4, 11, 7, 6, 2])
    names = [("q_norm", "query_layernorm"), ("k_norm", "key_layernorm")]
    norms = [next((getattr(attention, n).weight.data for n in pair if hasattr(attention, n)), None) for pair in names]
    query = qk_norm_rope_append(
        torch.cat([project(hidden[0]) for project in (attention.q_proj, attention.k_proj, attention.v_proj)], -1).data,
        heads=4,
        kv_heads=2,
        q_norm=norms[0],
        k_norm=norms[1],
        norm_after_rotary=hasattr(attention, "query_layernorm"),
        epsilon=config.rms_norm_eps,
        cosine=cosine,
        sine=sine,
        positions=positions,
        slot_mapping=slots,
        keys=keys,
        values=values,
        clip=getattr(config, "clip_qkv", None) or 0.0,
    )
    # In bf16 transformers rounds the tables, both products and their sum; here only the sum is.
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-1}
    torch.testing.assert_close(query, seen[0].data, **close)
    torch.testing.assert_close(keys.view(12, 2, -1)[slots], seen[1].data, **close)
    assert torch.equal(values.view(12, 2, -1)[slots], seen[2].data)
    assert not values.view(12, 2, -1)[[1, 3, 8, 9, 10]].any()


@pytest.mark.parametrize("scale", [CacheScale(), CacheScale(0.5, 2)])
def test_an_fp8_cache_saturates(qkv: Callable[..., dict[str, Any]], scale: CacheScale) -> None:
    case = qkv(cache=torch.float8_e4m3fn)
    qk_norm_rope_append(**case, scale=scale)
    wide = qkv()
    qk_norm_rope_append(**wide)
    for name, divisor in (("keys", scale.key), ("values", scale.value)):
        assert wide[name].abs().max() > 600
        stored = (wide[name] / divisor).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(case[name].float(), stored.float())


SIZES: dict[str, dict[str, Any]] = {
    "head": {"norm": "head"},
    "whole": {"norm": "whole", "clip": 0.5, "head_dim": 12, "heads": 3, "kv_heads": 3},
    "head, half rotated": {"norm": "head", "rotary": 8, "clip": 0.5},
    "whole, a part rotated": {"norm": "whole", "head_dim": 24, "rotary": 6},
    "head, after the rotation": {"norm": "head", "norm_after_rotary": True},
    "head, not rotated": {"norm": "head", "rotary": 0},
    "head, values of keys": {"norm": "head", "values": False},
    "head, weights in float32": {"norm": "head", "float_norms": True},
    "head, half rotated, values of keys": {"norm": "head", "values": False, "rotary": 8, "clip": 0.5},
    "none": {"norm": "", "head_dim": 10, "heads": 5, "kv_heads": 3},
}
"""Heads, by what their norm is over."""


def assert_equals_twin(
    qkv: Callable[..., dict[str, Any]], sizes: dict[str, Any], dtype: torch.dtype, cache: torch.dtype | None
) -> None:
    """The kernel computes and writes what the twin does, for rows that are strided."""
    ours, twin = (qkv(**sizes, dtype=dtype, cache=cache) for _ in range(2))
    padded = torch.zeros(ours["qkv"].shape[0], ours["qkv"].shape[1] + 3, dtype=dtype)
    padded[:, :-3] = ours["qkv"]
    scale = CacheScale(0.25, 4)  # which only float8 has
    others = {name: x for name, x in ours.items() if name != "qkv"}
    query = by_kernel(qk_norm_rope_append, padded[:, :-3], **others, scale=scale)
    assert_same(query, qk_norm_rope_append(**twin, scale=scale))
    assert twin["values"].float().any()
    assert_same(ours["keys"], twin["keys"])
    assert_same(ours["values"], twin["values"])


@pytest.mark.parametrize(
    ("norm", "dtype", "cache"),
    [
        *((norm, torch.float32, None) for norm in SIZES),
        *((norm, torch.bfloat16, torch.float8_e4m3fn) for norm in SIZES),
        ("head", torch.float32, torch.float8_e4m3fn),
        ("head", torch.bfloat16, None),
    ],
)
def test_the_kernel_equals_its_twin(
    qkv: Callable[..., dict[str, Any]], norm: str, dtype: torch.dtype, cache: torch.dtype | None
) -> None:
    assert_equals_twin(qkv, SIZES[norm], dtype, cache)


# 129 tokens are many on a GPU. Their number only chooses how many heads a program has, so here 9 are many.
@pytest.mark.parametrize("norm", SIZES)
def test_many_tokens_have_several_heads_in_a_program(
    qkv: Callable[..., dict[str, Any]], norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rope, "_FEW_TOKENS", 8)
    assert_equals_twin(qkv, {**SIZES[norm], "tokens": 9}, torch.bfloat16, torch.float8_e4m3fn)
