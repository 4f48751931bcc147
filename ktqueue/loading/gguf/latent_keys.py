"""Multi-head latent attention and its router as GGUF metadata (architecture deepseek2), both ways.

Key names and meanings: llama.cpp's conversion/deepseek.py and src/models/deepseek2.cpp. Newer files state the widths of
a head under keys with the suffix `_mla`, and those of a latent without it; older ones the widths of a head without.
"""

from collections.abc import Mapping
from typing import Any

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.gguf.metadata_numbers import count, number

SIGMOID = 2  # of `expert_gating_func`; 1, and none, is softmax
# Groups of experts and how many of them a token may use, by the number of experts, where a file says nothing: files of
# DeepSeek-V2 (160), V3 and R1 (256) from before there were keys for them.
_UNSAID_GROUPS = {160: (8, 3), 256: (8, 4)}

# Of a config: transformers' defaults of these are those of DeepSeek-V3, where a GGUF file that lacks them has none.
_STATED_WITH_SIGMOID = ("n_group", "topk_group", "routed_scaling_factor")


def latent_config(prefix: str, metadata: Mapping[str, Any], config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Of a config what only these families have; `config`: what was read before. Raises CheckpointError."""

    def width(name: str) -> int:
        key = f"{prefix}.attention.{name}_mla"
        key = key if key in metadata else f"{prefix}.attention.{name}"
        return int(number(metadata.get(key), int, key, source))

    if metadata.get(key := f"{prefix}.attention.temperature_scale"):  # Mistral Large 3, of the same architecture
        raise CheckpointError(f"{source}: {key} is not supported")
    key = f"{prefix}.rope.dimension_count"
    rotary, whole = int(number(metadata.get(key), int, key, source)), width("key_length")
    if rotary >= whole or rotary % 2:
        raise CheckpointError(f"{source}: {key} {rotary} must be even and less than a key's length, {whole}")
    experts = int(config["n_routed_experts"])
    groups = count(metadata, f"{prefix}.expert_group_count", source)
    used = count(metadata, f"{prefix}.expert_group_used_count", source)
    if not groups:
        groups, used = _UNSAID_GROUPS.get(experts, (1, 1))
    elif not used:
        raise CheckpointError(f"{source}: metadata key {prefix}.expert_group_used_count is missing")
    sigmoid = metadata.get(f"{prefix}.expert_gating_func") == SIGMOID
    normalised = bool(metadata.get(f"{prefix}.expert_weights_norm", False))
    found = {
        "routed_scaling_factor": config.get("routed_scaling_factor", 1.0),
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": count(metadata, f"{prefix}.attention.q_lora_rank", source) or None,
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": whole - rotary,
        "v_head_dim": width("value_length"),
        "first_k_dense_replace": count(metadata, f"{prefix}.leading_dense_block_count", source),
        "n_group": groups,
        "topk_group": used,
        "norm_topk_prob": normalised,
    }
    if sigmoid:
        return found
    if normalised:  # transformers' router of DeepSeek-V2 never does
        raise CheckpointError(f"{source}: {prefix}.expert_weights_norm with softmax scores is not supported")
    return found | {"topk_method": "greedy" if groups == 1 else "group_limited_greedy"}


def latent_metadata(prefix: str, config: Mapping[str, Any], source: str, *, sigmoid: bool) -> dict[str, Any]:
    """The inverse of `latent_config`, with the older meaning of widths: keys and values are made by one matrix.

    Raises CheckpointError.
    """
    for name in _STATED_WITH_SIGMOID if sigmoid else ():
        if config.get(name) is None:
            raise CheckpointError(f"{source}: config key {name} is missing")
    rotary = int(config["qk_rope_head_dim"])
    found: dict[str, Any] = {
        f"{prefix}.attention.head_count_kv": int(config["num_attention_heads"]),
        f"{prefix}.attention.key_length": int(config["qk_nope_head_dim"]) + rotary,
        f"{prefix}.attention.value_length": int(config["v_head_dim"]),
        f"{prefix}.rope.dimension_count": rotary,
        f"{prefix}.leading_dense_block_count": int(config.get("first_k_dense_replace") or 0),
        f"{prefix}.expert_gating_func": SIGMOID if sigmoid else SIGMOID - 1,
        f"{prefix}.expert_weights_norm": sigmoid and bool(config.get("norm_topk_prob", True)),
    }
    if config.get("q_lora_rank"):
        found[f"{prefix}.attention.q_lora_rank"] = int(config["q_lora_rank"])
    grouped = sigmoid or config.get("topk_method") == "group_limited_greedy"
    found[f"{prefix}.expert_group_count"] = int(config.get("n_group") or 1) if grouped else 1
    found[f"{prefix}.expert_group_used_count"] = int(config.get("topk_group") or 1) if grouped else 1
    return found
