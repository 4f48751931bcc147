"""Llama, and Mistral's families, whose first ones have the same layers."""

from dataclasses import replace

from ktqueue.families.deepseek import V3_LAYOUT
from ktqueue.families.family import Family, GgufLayout
from ktqueue.families.parts import DENSE, EXPERTS, HEAD_DIM, LAYER, MLP, ROUTED, SILU, UNBIASED, WIDTH, expert_count

LLAMA = (
    Family(
        "Llama 2, 3", "llama", "LlamaForCausalLM",
        GgufLayout(
            "llama", DENSE, (*LAYER, *MLP),
            implied={**UNBIASED, "mlp_bias": False}, permuted=True, rope_factors=True,
        ),
        text=True,
    ),
    Family("Mistral", "mistral", "MistralForCausalLM", text=True),
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
