"""Sizes of tiny models with latent attention, and rotary parameters of several families."""

from typing import Any

from latent_sizes import LATENT_SIZES

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
GROWING = {**YARN, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5}
LATENT = {**LATENT_SIZES, "routed_scaling_factor": 1.5}
INDEXER = {"index_topk": 12, "index_n_heads": 16, "index_head_dim": 24}  # of few heads, scores would tie at 0
SHARED_CHOICE = {"indexer_types": ["full", "full", "shared"], "mlp_layer_types": ["dense", "sparse", "sparse"]}
SHARED_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7, "factor": 16.0}
LATENT_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {**LATENT, "rope_parameters": SHARED_YARN}),
    "deepseek_v2 with groups": (
        "deepseek_v2",
        {**LATENT, "q_lora_rank": 64, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "q_lora_rank": 64, "n_group": 4, "topk_group": 2, "n_shared_experts": 1}),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {**LATENT, "q_lora_rank": 64, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "pad_token_id": 0},
    ),
    "deepseek_v32": (
        "deepseek_v32",
        {**LATENT, **INDEXER, "q_lora_rank": 64, "n_group": 4, "topk_group": 2, "n_shared_experts": 1},
    ),
    "glm_moe_dsa": ("glm_moe_dsa", {**LATENT, **INDEXER, **SHARED_CHOICE, "q_lora_rank": 64, "n_shared_experts": 1}),
    "mistral4": ("mistral4", {**LATENT, "q_lora_rank": 64, "n_shared_experts": 1, "rope_parameters": GROWING}),
    "axk1": ("axk1", {**LATENT, "q_lora_rank": 64, "n_group": 4, "topk_group": 2, "n_shared_experts": 1}),
    "youtu": ("youtu", {**LATENT, "q_lora_rank": 64}),
    "deepseek_v3 with one group": ("deepseek_v3", {**LATENT, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
}
