"""Folders of Ling 2.0 and Ring 2.0, in the words of GLM-4.5, whose layers are the same.

Published folders have one matrix for query, key and value, and names of their own. They state the model type of Ling 1
or 2; the class tells them apart. Source: configuration_bailing_moe_v2.py and modeling_bailing_moe_v2.py of
inclusionAI/Ling-mini-2.0. Knows no files.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.checkpoint import CheckpointTensor

MODEL_TYPE, CLASS = "bailing_moe_v2", "BailingMoeV2ForCausalLM"
_KEYS = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "use_qkv_bias": "attention_bias",
}
_ONLY = {"use_bias": False, "use_rmsnorm": True, "score_function": "sigmoid", "norm_topk_prob": True}
"""Keys that every published folder has with this value. The layers of GLM-4.5 have no others."""
_NAMES = (
    ("model.word_embeddings.", "model.embed_tokens."),
    (".attention.query_layernorm.", ".self_attn.q_norm."),
    (".attention.key_layernorm.", ".self_attn.k_norm."),
    (".attention.dense.", ".self_attn.o_proj."),
    (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias"),
    (".final_layernorm.", ".shared_head.norm."),  # of layers that predict further tokens
)
_FUSED = ".attention.query_key_value."


def is_ling(config: Mapping[str, Any]) -> bool:
    """Whether a config file is of Ling 2.0 or Ring 2.0."""
    model_type = config.get("model_type")
    return model_type == MODEL_TYPE or (model_type == "bailing_moe" and config.get("architectures") == [CLASS])


def ling_config(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the config with transformers' keys of GLM-4.5. Raises CheckpointError that names a key at fault."""
    for name, only in _ONLY.items():
        if config.get(name, only) != only:
            raise _refusal(source, name, only, config[name])
    words = {_KEYS[name]: value for name, value in config.items() if name in _KEYS}
    words |= {name: value for name, value in config.items() if name not in _KEYS}
    width, shared = words.get("moe_intermediate_size"), words.get("n_shared_experts")
    stated = words.get("moe_shared_expert_intermediate_size")
    if stated is not None and type(width) is type(shared) is int and stated != width * shared:
        limit = f"num_shared_experts times moe_intermediate_size, {width * shared}"
        raise _refusal(source, "moe_shared_expert_intermediate_size", limit, stated)
    return {**words, "model_type": MODEL_TYPE}


def ling_tensors(
    tensors: Mapping[str, CheckpointTensor], config: Mapping[str, Any], source: str
) -> dict[str, CheckpointTensor]:
    """Return the tensors under transformers' names, with one for each of query, key and value.

    config: see ling_config. Raises CheckpointError for a matrix of all three that has other rows.
    """
    named: dict[str, CheckpointTensor] = {}
    for name, tensor in tensors.items():
        if _FUSED in name:
            named |= _split(name, tensor, config, source)
            continue
        for published, ours in _NAMES:
            name = name.replace(published, ours)
        named[name] = tensor
    return named


def _split(name: str, tensor: CheckpointTensor, config: Mapping[str, Any], source: str) -> dict[str, CheckpointTensor]:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    key_rows = config["num_key_value_heads"] * head_dim
    rows = {"q": heads * head_dim, "k": key_rows, "v": key_rows}
    if (wanted := sum(rows.values())) != tensor.shape[0]:
        raise CheckpointError(f"{source}: tensor {name!r} has {tensor.shape[0]} rows, {wanted} expected")
    parts, first = {}, 0
    for part, count in rows.items():
        parts[name.replace(_FUSED, f".self_attn.{part}_proj.")] = rows_of(tensor, first, count)
        first += count
    return parts


def rows_of(tensor: CheckpointTensor, first: int, count: int) -> CheckpointTensor:
    """Return a part of a matrix or a bias. A matrix that is converted when it is read is converted for each part."""
    size = tensor.nbytes // tensor.shape[0]
    begin, end = first * size, (first + count) * size
    stored = tensor.stored
    part = (lambda: stored()[begin:end]) if callable(stored) else stored[begin:end]
    return replace(tensor, shape=(count, *tensor.shape[1:]), stored=part)


def _refusal(source: str, name: str, limit: Any, value: Any) -> CheckpointError:
    return CheckpointError(f"{source}: {name} must be {limit}, got {value!r}", param=name, limit=limit, value=value)
