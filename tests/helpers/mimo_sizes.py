"""Sizes of a tiny MiMo-V2-Flash whose layers differ in their key/value heads, rotary angles and sinks."""

from typing import Any

_PART = {"rope_type": "default", "partial_rotary_factor": 0.334}

MIMO_SIZES: dict[str, Any] = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "v_head_dim": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "rope_parameters": {
        "sliding_attention": {**_PART, "rope_theta": 1e3},
        "full_attention": {**_PART, "rope_theta": 1e4},
    },
}
