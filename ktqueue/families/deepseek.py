"""DeepSeek-V2 and V3, and families of others with their latent attention and their routers."""

from dataclasses import replace

from ktqueue.families.family import Family, GgufLayout, MetadataField
from ktqueue.families.parts import (
    CORRECTION,
    EXPERT_WIDTH,
    EXPERTS,
    MLP,
    NORMS,
    ROUTED,
    SHARED_EXPERTS,
    UNBIASED,
    WIDTH,
    below,
    expert_count,
)

_V2_LAYOUT = GgufLayout(
    "deepseek2",
    (
        *(entry for entry in ROUTED if entry.config != "num_key_value_heads"),
        expert_count("n_routed_experts"), EXPERT_WIDTH, WIDTH,
        MetadataField("n_shared_experts", "expert_shared_count"),
        MetadataField("routed_scaling_factor", "expert_weights_scale", float, required=False),
        MetadataField("kv_lora_rank", "attention.kv_lora_rank"),
    ),
    (
        *NORMS, *below("self_attn", "q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "o_proj"),
        *below("self_attn", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"), *EXPERTS, *SHARED_EXPERTS, *MLP,
    ),
    implied={**UNBIASED, "mlp_bias": False, "norm_topk_prob": False},
)  # fmt: skip
V3_LAYOUT = replace(
    _V2_LAYOUT, tensors=CORRECTION, implied={**UNBIASED, "rope_interleave": True}, sigmoid=True, next_tokens=True
)
INDEXED_LAYOUT = replace(
    V3_LAYOUT,
    architecture="deepseek32",
    fields=(
        *V3_LAYOUT.fields,
        MetadataField("index_n_heads", "attention.indexer.head_count"),
        MetadataField("index_head_dim", "attention.indexer.key_length"),
        MetadataField("index_topk", "attention.indexer.top_k"),
    ),
    modules=(*V3_LAYOUT.modules, *below("self_attn.indexer", "wq_b", "wk", "weights_proj", "k_norm")),
    implied={**UNBIASED, "mlp_bias": False},
    names="glm-dsa",  # the library does not know deepseek32, whose names are the same
    two_parts=True,
)

DEEPSEEK = (
    Family("DeepSeek-V2, V2-Lite", "deepseek_v2", "DeepseekV2ForCausalLM", _V2_LAYOUT, latent=True, group_score=1),
    Family(
        "DeepSeek-V3, R1, Kimi-K2 and the text of K2.5", "deepseek_v3", "DeepseekV3ForCausalLM", V3_LAYOUT,
        latent=True, group_score=2, text=True, aliases={"kimi_k2": {}},
    ),
    Family(
        "DeepSeek-V3.2", "deepseek_v32", "DeepseekV32ForCausalLM", INDEXED_LAYOUT,
        latent=True, group_score=2, indexed=True,
    ),
    Family("A.X K1", "axk1", "AXK1ForCausalLM", latent=True, group_score=2),
    Family("Youtu", "youtu", "YoutuForCausalLM", latent=True),  # without experts
)  # fmt: skip
