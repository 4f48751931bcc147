"""Sizes of a tiny Laguna whose layers differ in their query heads and rotary angles."""

from typing import Any

LAGUNA_SIZES: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_attention_heads_per_layer": [4, 6, 4],
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "moe_routed_scaling_factor": 1.5,
    "sliding_window": 8,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 1.0},
        "full_attention": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "partial_rotary_factor": 0.5,
        },
    },
}
