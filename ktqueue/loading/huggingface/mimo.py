"""Configs of MiMo-V2 as they are published, in the words of transformers, which reads few of their keys.

Source: config.json and modeling_mimo_v2_flash.py of XiaomiMiMo/MiMo-V2-Flash. Knows no files.
"""

from collections.abc import Mapping
from typing import Any

from ktqueue.core.errors import CheckpointError

MODEL_TYPE = "mimo_v2_flash"
MODEL_TYPES = (MODEL_TYPE, "mimo_v2")
_KINDS = {"hybrid_layer_pattern": ("layer_types", ("full_attention", "sliding_attention")),
          "moe_layer_freq": ("mlp_layer_types", ("dense", "sparse"))}  # fmt: skip
"""Lists with 0 or 1 for each layer, what transformers calls them, and its words for 0 and 1."""
_EQUAL = {
    "swa_num_attention_heads": "num_attention_heads",
    "swa_head_dim": "head_dim",
    "swa_v_head_dim": "v_head_dim",
    "sliding_window_size": "sliding_window",
}
"""Keys that must have the value of another one."""
_ONLY = {
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_shared_experts": None,
    "attention_projection_layout": "split",
}
_MAY_BE_NULL = ("n_group", "topk_group")
_PART, _WINDOW_BASE = 0.334, 10_000.0  # of a head that is rotated; of the angles in layers with a window


def mimo_config(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the config with transformers' keys.

    Raises CheckpointError that names a key whose value transformers' layers do not have.
    """
    for name, only in _ONLY.items():
        if config.get(name, only) != only:
            raise _refusal(source, name, repr(only), config[name])
    for name, other in _EQUAL.items():
        if name in config and other in config and config[name] != config[other]:
            raise _refusal(source, name, f"{other}, {config[other]}", config[name])
    kv_heads, window_heads = config.get("num_key_value_heads"), config.get("swa_num_key_value_heads")
    if type(kv_heads) is int and window_heads not in (None, 2 * kv_heads):
        raise _refusal(source, "swa_num_key_value_heads", f"twice num_key_value_heads, {2 * kv_heads}", window_heads)
    words = {**config, "model_type": MODEL_TYPE}
    for name, (ours, kinds) in _KINDS.items():
        if (stated := words.pop(name, None)) is not None and ours not in words:
            if not isinstance(stated, list) or any(value not in (0, 1) for value in stated):
                raise _refusal(source, name, "0 or 1 for each layer", stated)
            words[ours] = [kinds[value] for value in stated]
    if "layernorm_epsilon" in words:
        words.setdefault("rms_norm_eps", words["layernorm_epsilon"])
    if words.get("rope_parameters") is None and "rope_theta" in words:
        words["rope_parameters"] = rope_by_kind(words["rope_theta"], words.get("swa_rope_theta", _WINDOW_BASE), words)
    return {name: value for name, value in words.items() if value is not None or name not in _MAY_BE_NULL}


def rope_by_kind(base: float, window_base: float, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return rotary parameters of both kinds of layers: with the bases of each, and the part and the scaling of
    `config`."""
    scaling = dict(config.get("rope_scaling") or {})
    kind = scaling.pop("type", None) or scaling.get("rope_type") or "default"
    both = {**scaling, "rope_type": kind, "partial_rotary_factor": config.get("partial_rotary_factor", _PART)}
    return {"full_attention": {**both, "rope_theta": base}, "sliding_attention": {**both, "rope_theta": window_base}}


def _refusal(source: str, name: str, limit: str, value: Any) -> CheckpointError:
    return CheckpointError(f"{source}: {name} must be {limit}, got {value!r}", param=name, limit=limit, value=value)
