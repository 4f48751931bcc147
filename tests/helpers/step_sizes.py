"""Sizes of a tiny Step-3.5 whose layers differ in their query heads, rotary angles and limits."""

from typing import Any

STEP_SIZES: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_sliding_attention_heads": 6,
    "head_dim": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "share_expert_dim": 48,
    "moe_router_scaling_factor": 3.0,
    "sliding_window": 8,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "swiglu_limits": [0.0, 0.0, 0.3],
    "swiglu_limits_shared": [0.4, 0.0, 0.5],
    "rope_theta": [1e4, 1e3, 1e4],
    "partial_rotary_factors": [0.5, 1.0, 0.5],
    "pad_token_id": 0,
}
