"""A tiny model of DeepSeek's kind, as transformers' configurations call its sizes."""

from typing import Any

LATENT_SIZES: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
"""Of deepseek_v2 and deepseek_v3. Layers from the second on are routed; queries have no low rank."""
