"""What a config says, checked before a model is built from it: what would fail later, or compute nonsense, is refused
by the name that the config has for it. Knows no tensors and no transformers."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ktqueue.core.errors import CheckpointError

LATENT_MODEL_TYPES = ("deepseek_v2", "deepseek_v3")
"""Model types whose attention LatentAttention computes."""

_COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "decoder_sparse_step",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_rope_head_dim",
    "v_head_dim",
)
_ANY_COUNTS = (  # 0: there is none
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "n_shared_experts",
    "shared_expert_intermediate_size",
)
_WIDTHS = ("intermediate_size", "moe_intermediate_size")  # some families have one for each layer; 0: as above
_MOST = (1 << 31) - 1
_POSITIVE = ("rms_norm_eps", "clip_qkv")
_POSITIVE_ROPE = (
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
)
_KINDS = ("full_attention", "sliding_attention")
"""Of layers: what attention of ours computes. The others see other keys, or keep another state between steps."""
_CAUSAL = {"is_causal": True, "use_bidirectional_attention": False}
"""Of any model: transformers' masks go by these."""
DERIVED_KEY = "num_key_value_heads"
"""What GPTBigCode's config makes of another key, by which its model goes even where a file has this one too."""
_IGNORED = ("sliding_window", "layer_types", "rope_interleave", DERIVED_KEY)
SUPPORTED = "safetensors in F32, F16 or BF16, and GGUF files"
_METHODS = {
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "exl2": "EXL2",
    "exl3": "EXL3",
    "fbgemm_fp8": "FP8 (FBGEMM)",
    "fp8": "FP8",
    "gptq": "GPTQ",
    "hqq": "HQQ",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4",
    "quanto": "Quanto",
    "torchao": "torchao",
}
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")


def check_values(values: Mapping[str, Any], source: str) -> None:
    """The numbers of a config file one by one, under the names that it has for them; None is left to transformers.

    Raises CheckpointError naming one that no model can have.
    """
    for name in _COUNTS:
        _check_count(values.get(name), name, 1, source)
    for name in _ANY_COUNTS:
        _check_count(values.get(name), name, 0, source)
    for name in _WIDTHS:
        stated = values.get(name)
        for width in stated if isinstance(stated, list) else (stated,):
            _check_count(width, name, 0, source)
    for name in _POSITIVE:
        _check_positive(values.get(name), name, source)
    for rope in _rope_parameters(values):
        for name in _POSITIVE_ROPE:
            _check_positive(rope.get(name), name, source)


def ignored_keys(values: Mapping[str, Any], config_class: type) -> set[str]:
    """Keys of a config file that our operators would heed and its own model does not: transformers keeps whatever a
    file says, also where the config class has no such field."""
    return {name for name in _IGNORED if name in values and not hasattr(config_class, name)}


def check_config(config: Any, source: str) -> None:
    """What the numbers of a transformers config have to do with each other. Raises CheckpointError."""
    if getattr(config, "num_hidden_layers", None) is None and (text := getattr(config, "text_config", None)):
        raise CheckpointError(
            f"{source}: a {config.model_type} is made of several models, which is not supported; its {text.model_type} "
            f"alone may be"
        )
    if apart := getattr(config, "per_layer_attributes", None):  # which the config as a whole then does not tell
        raise CheckpointError(
            f"{source}: a {config.model_type} whose layers differ in {', '.join(sorted(apart))} is not supported"
        )
    for name, causal in _CAUSAL.items():
        if bool(stated := getattr(config, name, causal)) is not causal:
            raise _refusal(source, name, f"{causal}, for attention to be causal", stated)
    heads, kv_heads = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    if heads and kv_heads and config.model_type not in LATENT_MODEL_TYPES and heads % kv_heads:
        raise _refusal(source, "num_attention_heads", f"a multiple of num_key_value_heads, {kv_heads}", heads)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    chosen = getattr(config, "num_experts_per_tok", experts)  # some families have other names for it
    if experts and not (isinstance(chosen, int) and 1 <= chosen <= experts):
        raise _refusal(source, "num_experts_per_tok", f"from 1 to {experts}, the number of experts", chosen)
    _check_window(config, source)
    if config.model_type in LATENT_MODEL_TYPES:
        _check_groups(config, source)


def longest_context(config: Any) -> int:
    """Tokens that a sequence of the model may have, so that what is computed of one does not depend on the others of a
    step. Where rotary embeddings have divisors or scales of their own for long sequences (longrope), transformers takes
    these for all that are computed together with a long one: then only short ones are served.
    """
    most = int(config.max_position_embeddings)
    for rope in _rope_parameters({"rope_parameters": getattr(config, "rope_parameters", None)}):
        differ = any(rope.get(f"short_{what}") != rope.get(f"long_{what}") for what in ("factor", "mscale"))
        if differ and rope.get("rope_type") not in (None, "default"):
            most = min(most, int(rope["original_max_position_embeddings"]))
    return most


def _check_window(config: Any, source: str) -> None:
    """Of attention that looks back only so far: in the layers of layer_types that say so, in all where there are no
    kinds of layers."""
    window, kinds = vars(config).get("sliding_window"), getattr(config, "layer_types", None)
    if unknown := [kind for kind in kinds or () if kind not in _KINDS]:
        raise _refusal(source, "layer_types", " or ".join(_KINDS), unknown[0])
    used = "sliding_attention" in kinds if kinds else window is not None
    if used and not (isinstance(window, int) and window >= 1):
        raise _refusal(source, "sliding_window", "at least 1", window)


def _check_groups(config: Any, source: str) -> None:
    """Of a LATENT model. What its router cannot choose from would be found at the first step."""
    sigmoid = config.model_type == "deepseek_v3"  # its routers know one method
    method = "group_limited_greedy" if sigmoid else config.topk_method
    if method not in ("greedy", "group_limited_greedy"):
        raise _refusal(source, "topk_method", "greedy or group_limited_greedy", method)
    if method == "greedy":
        return
    experts, chosen = config.n_routed_experts, config.num_experts_per_tok
    groups, used = config.n_group or 0, config.topk_group or 0
    if groups < 1 or experts % groups:
        raise _refusal(source, "n_group", f"a divisor of n_routed_experts, {experts}", groups)
    if sigmoid and experts == groups:  # a group's score is the sum of its best two
        raise _refusal(source, "n_group", f"below {experts}, since a group has two experts or more", groups)
    if not 1 <= used <= groups:
        raise _refusal(source, "topk_group", f"from 1 to n_group, {groups}", used)
    if chosen > (most := experts // groups * used):
        raise _refusal(source, "num_experts_per_tok", f"at most {most}, the experts of topk_group groups", chosen)


def _check_count(value: Any, name: str, least: int, source: str) -> None:
    if value is not None and not (type(value) is int and least <= value <= _MOST):
        raise _refusal(source, name, f"a whole number from {least} to {_MOST}", value)


def _check_positive(value: Any, name: str, source: str) -> None:
    if value is not None and not (type(value) in (int, float) and 0 < value < math.inf):
        raise _refusal(source, name, "a number above 0", value)


def _rope_parameters(values: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Wherever they stand: beside all else, in an object of their own, or in one for each kind of layer."""
    yield {"rope_theta": values.get("rope_theta")}
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := values.get(name), dict):
            yield rope
            yield from (one for one in rope.values() if isinstance(one, dict))


def _refusal(source: str, name: str, limit: str, value: Any) -> CheckpointError:
    told = value if isinstance(value, int | float | str) else repr(value)
    return CheckpointError(f"{source}: {name} must be {limit}, got {value!r}", param=name, limit=limit, value=told)


def check_quantization(config: Mapping[str, Any], source: str) -> None:
    """Raises CheckpointError naming the method of a checkpoint that is quantised in another way than GGUF's.

    config: the values of config.json. source: what the message begins with.
    """
    inner = config.get("text_config")
    for values in (config, inner if isinstance(inner, Mapping) else {}):
        for key in _QUANTIZATION_KEYS:
            if stated := values.get(key):
                method = _method(stated)
                raise CheckpointError(
                    f"{source}: {key} says that the weights are quantised with {method}, which is not supported; "
                    f"supported are {SUPPORTED}: look for a GGUF of the model, or for its original in BF16",
                    param=key,
                    limit=SUPPORTED,
                    value=method,
                )


def _method(stated: Any) -> str:
    """Its name, and the bits of a weight where they are stated."""
    if not isinstance(stated, Mapping):
        return repr(stated)
    name = stated.get("quant_method") or stated.get("quant_algo")
    if name is None and (stated.get("load_in_4bit") or stated.get("load_in_8bit")):
        name = "bitsandbytes"
    shown = _METHODS.get(str(name).lower(), str(name)) if name else "an unnamed method"
    bits = stated.get("bits") or stated.get("w_bit") or (4 if stated.get("load_in_4bit") else None)
    bits = bits or (8 if stated.get("load_in_8bit") else None)
    return f"{shown} in {bits} bits" if isinstance(bits, int) else shown
