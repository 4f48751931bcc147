"""A tiny Llama 4, as transformers' configuration calls its sizes."""

from typing import Any

LLAMA4_SIZES: dict[str, Any] = {
    "intermediate_size_mlp": 128,
    "num_local_experts": 6,
    "head_dim": 16,
    "attention_chunk_size": 6,
    "no_rope_layers": [1, 0, 1],
    "floor_scale": 5,
    "attn_scale": 0.5,
    "interleave_moe_layer_step": 2,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}
"""Of three layers. Chunks are no multiple of a page of tests, and shorter than most sequences."""
