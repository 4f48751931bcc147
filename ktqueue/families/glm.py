"""GLM, and families whose layers are GLM-4.5's: Solar-Open and Ling 2.0."""

from dataclasses import replace

from ktqueue.families.deepseek import INDEXED_LAYOUT, V3_LAYOUT
from ktqueue.families.family import Family
from ktqueue.families.parts import SIGMOID_LAYOUT, UNBIASED

_OF_DENSE_LAYERS = {"leading_dense_block_count": 0, "feed_forward_length": 10_240}  # of which Solar-Open has none

GLM = (
    Family(
        "Ling 2.0, Ring 2.0", "bailing_moe_v2", "BailingMoeV2ForCausalLM",
        replace(
            SIGMOID_LAYOUT, architecture="bailingmoe2", names="dots1", fused_attention=True,
            implied={**UNBIASED, "use_qk_norm": True},
        ),
        partly_rotated=True, group_score=2,
    ),
    Family(
        "GLM-4.5, 4.6, 4.7, 4.5-Air", "glm4_moe", "Glm4MoeForCausalLM",
        replace(SIGMOID_LAYOUT, architecture="glm4moe", next_tokens=True, by_tensor={
            "attention_bias": "model.layers.0.self_attn.q_proj.bias",
            "use_qk_norm": "model.layers.0.self_attn.q_norm.weight",
        }),
        partly_rotated=True, group_score=2, text=True,
        aliases={"glm4v_moe_text": {"fixed": {"use_qk_norm": False}}},
    ),
    Family(
        "GLM-4.7-Flash", "glm4_moe_lite", "Glm4MoeLiteForCausalLM", replace(V3_LAYOUT, loaded_as="deepseek_v3"),
        latent=True, group_score=2,
    ),
    Family(
        "GLM-5", "glm_moe_dsa", "GlmMoeDsaForCausalLM",
        replace(INDEXED_LAYOUT, architecture="glm-dsa", shared_choices=True),
        latent=True, group_score=2, indexed=True, indexer_interleaved=True,
    ),
    Family(
        "Solar-Open", "solar_open", "SolarOpenForCausalLM",
        replace(
            SIGMOID_LAYOUT, architecture="glm4moe", implied=UNBIASED, loaded_as="glm4_moe",
            fields=tuple(entry for entry in SIGMOID_LAYOUT.fields if entry.key not in _OF_DENSE_LAYERS),
            stated=_OF_DENSE_LAYERS,
        ),
        partly_rotated=True, group_score=2,
    ),
)  # fmt: skip
