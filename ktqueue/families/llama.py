"""Llama, and Mistral's families, whose first ones have the same layers."""

from dataclasses import replace

from ktqueue.families.deepseek import V3_LAYOUT
from ktqueue.families.family import Family, GgufLayout, MetadataField
from ktqueue.families.parts import (
    DENSE,
    EXPERTS,
    HEAD_DIM,
    LAYER,
    MLP,
    ROUTED,
    SILU,
    UNBIASED,
    WIDTH,
    below,
    expert_count,
)

_MLP = ("gate_proj", "up_proj", "down_proj")
_PARTS4 = ("feed_forward", "feed_forward.experts", "feed_forward.shared_expert")
_SIZES4 = (
    MetadataField("intermediate_size", "expert_feed_forward_length"),
    MetadataField("intermediate_size_mlp", "feed_forward_length"),
    MetadataField("interleave_moe_layer_step", "interleave_moe_layer_step"),
)

LLAMA = (
    Family(
        "Llama 2, 3", "llama", "LlamaForCausalLM",
        GgufLayout(
            "llama", DENSE, (*LAYER, *MLP),
            implied={**UNBIASED, "mlp_bias": False}, permuted=True, rope_factors=True,
        ),
        text=True,
    ),
    Family(
        "Llama 4, its text", "llama4_text", "Llama4ForCausalLM",
        GgufLayout(
            "llama4", (*ROUTED, expert_count("num_local_experts"), *_SIZES4, HEAD_DIM),
            (*LAYER, "feed_forward.router", *(name for part in _PARTS4 for name in below(part, *_MLP))),
            implied={
                **UNBIASED, "attention_chunk_size": 8192, "attn_temperature_tuning": True, "floor_scale": 8192,
                "attn_scale": 0.1,
            },
            rope_factors=True,
        ),
        interleaved=True, norm_after_rotary=True, chunked=True, transposed_experts=True, text=True,
    ),
    Family("Code World Model", "cwm", "CwmForCausalLM"),
    Family("Ministral", "ministral", "MinistralForCausalLM"),
    Family("SmolLM3", "smollm3", "SmolLM3ForCausalLM"),
    Family("Mistral", "mistral", "MistralForCausalLM", text=True),
    Family(
        "Ministral 3, Devstral 2", "ministral3", "Ministral3ForCausalLM",
        GgufLayout(
            "mistral3", DENSE, (*LAYER, *MLP), implied={**SILU, "sliding_window": None},
            permuted=True, yarn_scale=True,
        ),
        growing=True, text=True,
    ),
    Family(
        "Mixtral", "mixtral", "MixtralForCausalLM",
        GgufLayout(
            "llama", (*ROUTED, expert_count("num_local_experts"), WIDTH, HEAD_DIM), (*LAYER, *EXPERTS),
            implied={**SILU, "sliding_window": None}, permuted=True,
        ),
    ),
    Family(
        "Mistral 4, its text", "mistral4", "Mistral4ForCausalLM",
        replace(V3_LAYOUT, architecture="mistral4", tensors=(), sigmoid=False, next_tokens=False, two_parts=True),
        latent=True, group_score=2, growing=True, text=True,
    ),
)  # fmt: skip
