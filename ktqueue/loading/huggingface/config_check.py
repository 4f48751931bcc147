"""Checks a Hugging Face config before a model is built from it.

It refuses values that would fail later or give wrong results. An error names the key. Knows no tensors and no
transformers.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ktqueue.core.errors import CheckpointError
from ktqueue.core.short_repr import MAX_CHARACTERS, short_repr
from ktqueue.families.family import Family
from ktqueue.families.table import family_of_type

LINEAR_ATTENTION = "linear_attention"
"""The kind of the layers that keep a state instead of keys and values."""
CHUNKED_ATTENTION = "chunked_attention"
"""The kind of the layers that attend within chunks of `attention_chunk_size` tokens."""
MOST_LINEAR_DIM, MOST_TAPS = 512, 8  # as in csrc/kernels/kernel_table.h

_COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "global_head_dim",
    "num_global_key_value_heads",
    "top_k_experts",
    "rotary_dim",
    "max_position_embeddings",
    "decoder_sparse_step",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "index_topk",
    "index_head_dim",
    "index_n_heads",
    "attention_chunk_size",
    "floor_scale",
)
_ANY_COUNTS = (  # may be 0
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "n_shared_experts",
    "shared_expert_intermediate_size",
)
_WIDTHS = (
    "intermediate_size",
    "intermediate_size_mlp",
    "moe_intermediate_size",
)  # may be 0; some families have a list with one per layer
_MOST = (1 << 31) - 1
_MOST_OF = {"num_hidden_layers": 1 << 12, "num_labels": 1 << 16}
"""transformers makes lists of so many elements before it checks anything."""
_FACTOR, _SHARE = (1e-6, 1e6), (0.0, 1.0)
_NUMBERS = {  # the least and the largest value; models have others only in damaged files
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"), (1e-30, 1.0)),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq"), (1.0, 1e18)),
    **dict.fromkeys(("routed_scaling_factor", "router_scaling_factor", "route_scale", "logit_scale"), _FACTOR),
    **dict.fromkeys(("attention_multiplier", "residual_multiplier", "embedding_multiplier", "logits_scaling"), _FACTOR),
    **dict.fromkeys(("clip_qkv", "query_pre_attn_scalar", "final_logit_softcapping", "attn_scale"), _FACTOR),
    **dict.fromkeys(("factor", "attention_factor", "beta_fast", "beta_slow"), _FACTOR),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "short_mscale", "long_mscale"), _FACTOR),
    "original_max_position_embeddings": (1, _MOST),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "router_jitter_noise", "input_jitter_noise"), _SHARE),
}
_OR_ZERO = ("alpha", "mscale", "mscale_all_dim", "attn_logit_softcapping", "llama_4_scaling_beta")
"""Numbers within _FACTOR that may also be 0, for none."""
_KINDS = ("full_attention", "sliding_attention")
"""The kinds of layers that our attention computes. Others attend to other keys, or keep other state between steps."""
_NEEDED = {
    **dict.fromkeys(("linear", "dynamic"), ("factor",)),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("original_max_position_embeddings",),
}
"""Numbers that types of rotary embeddings need. Each is missing or stated, but never null."""
_CAUSAL = {"is_causal": True, "use_bidirectional_attention": False}
"""Values that every model must have, because transformers' masks depend on them."""
DERIVED_KEY = "num_key_value_heads"
"""A key that GPTBigCode's config derives from another key. Its model uses the derived value, even if a file has it."""
_HEADS, _LAYER_HEADS = ("head_dim", "num_key_value_heads"), "num_attention_heads_per_layer"
_TYPES = ("dtype", "torch_dtype")
_IGNORED = ("sliding_window", "layer_types", "rope_interleave", DERIVED_KEY)


def check_values(values: Mapping[str, Any], source: str, spellings: Mapping[str, str] | None = None) -> None:
    """Check the numbers of a config file one by one, by their names in the file. None means transformers' default.

    spellings: the keys of a model type for our names of them, where they differ. Raises CheckpointError that names a
    value that no model can have.
    """
    for name in (*_COUNTS, *(own for name, own in (spellings or {}).items() if name in _COUNTS)):
        _check_count(values.get(name), name, 1, source)
    for name, most in _MOST_OF.items():
        _check_count(values.get(name), name, 1, source, most)
    for name in _ANY_COUNTS:
        _check_count(values.get(name), name, 0, source)
    for name in _WIDTHS:
        stated = values.get(name)
        for width in stated if isinstance(stated, list) else (stated,):
            _check_count(width, name, 0, source)
    for layer in _layer_values(values, source):
        for name in (*_HEADS, "num_attention_heads"):
            _check_count(layer.get(name, 1), name, 1, source, may_be_null=False)
    for layers in _KINDS:
        for rope in rope_parameters(values):
            if not isinstance(rope.get(layers), dict | None):
                raise _refusal(source, f"rope_parameters.{layers}", "an object", rope[layers])
    for group in (values, *rope_parameters(values)):
        needed = _NEEDED.get(kind, ()) if isinstance(kind := group.get("rope_type"), str) else ()
        for name, limits in _NUMBERS.items():
            for number in _of_layers(group, name):
                _check_number(number, name, limits, source, may_be_null=name not in needed or name not in group)
        for name in _OR_ZERO:
            _check_number(group.get(name) or None, name, _FACTOR, source)
        for name in ("short_factor", "long_factor"):
            for divisor in factors if isinstance(factors := group.get(name), list) else ():
                _check_number(divisor, name, _FACTOR, source)


def ignored_keys(values: Mapping[str, Any], config_class: type) -> set[str]:
    """Return the keys of a config file that our operators would use although the model's own code does not.

    transformers keeps all keys of a file, also those that the config class does not define.
    """
    return {name for name in _IGNORED if name in values and not hasattr(config_class, name)}


def stated_values(values: Mapping[str, Any], config_class: type) -> dict[str, Any]:
    """Return the values of a config file without those that state nothing.

    These are null or {} for a key that the config class does not define, and the type of the weights, which the tensors
    have. Nulls stay where a default would give wrong angles or masks. rope_scaling is the old name of rope_parameters.
    """
    known = {name for name in values if hasattr(config_class, name)} - {"rope_scaling"} | {"rope_theta", *_CAUSAL}
    stating = {name: value for name, value in values.items() if value not in (None, {}) or name in known}
    return {name: value for name, value in stating.items() if name not in _TYPES}


def check_nulls(config: Any, source: str) -> None:
    """Check that a transformers config has numbers where no model can be built without. Raises CheckpointError."""
    for name in (*_HEADS, "n_shared_experts"):
        _check_count(vars(config).get(name, 1), name, 1 if name in _HEADS else 0, source, may_be_null=False)
    for rope in rope_parameters(vars(config)):
        _check_number(rope.get("rope_theta", 1), "rope_theta", _NUMBERS["rope_theta"], source, may_be_null=False)


def check_rope(values: Mapping[str, Any], source: str, *, by_kind: bool = False) -> None:
    """Check that every kind of layers has rotary parameters, if one has its own. Raises CheckpointError.

    values: of a config file, or of a config. by_kind: the kinds have their own in any case.
    """
    rope, kinds = values.get("rope_parameters"), values.get("layer_types")
    if not isinstance(rope, dict) or not isinstance(kinds, list) or not (by_kind or {*_KINDS} & rope.keys()):
        return
    for kind in _KINDS:
        if kind in kinds and not isinstance(rope.get(kind), dict):
            raise _refusal(source, f"rope_parameters.{kind}", "an object", rope.get(kind))


def several_models(model_type: object, text_type: object, source: str) -> CheckpointError:
    """Return the error for a model with encoders whose text model is not known to compute the same alone."""
    return CheckpointError(
        f"{source}: a {model_type} consists of several models; its text model, a {text_type}, is not served from such "
        "a folder"
    )


def check_config(config: Any, source: str) -> None:
    """Check how the numbers of a transformers config fit together. Raises CheckpointError."""
    default = None if config.has_no_defaults_at_init else type(config)()
    if any(isinstance(rope, dict) for rope in (getattr(default, "rope_parameters", None) or {}).values()):
        check_rope(vars(config), source, by_kind=True)
        for rope in list(rope_parameters(vars(config)))[1:]:
            _check_number(rope.get("rope_theta"), "rope_theta", _NUMBERS["rope_theta"], source, may_be_null=False)
    if getattr(config, "num_hidden_layers", None) is None and (text := getattr(config, "text_config", None)):
        raise several_models(config.model_type, text.model_type, source)
    family = family_of_type(config.model_type)
    differing = {*(getattr(config, "per_layer_attributes", None) or ())}  # the config has no single value for them
    known = {*_HEADS} if family.heads_differ else {"num_attention_heads"} if family.queries_differ else set()
    if unknown := differing - known:
        raise CheckpointError(
            f"{source}: a {config.model_type} whose layers differ in {', '.join(sorted(unknown))} is not supported"
        )
    if getattr(config, "enable_moe_block", False):
        _check_experts_beside(config, source)
    for name, causal in _CAUSAL.items():
        stated = getattr(config, name, causal)
        if bool(stated) is not causal and not (family.heads_differ and stated == "vision"):  # text has no images
            raise _refusal(source, name, f"{causal}, for attention to be causal", stated)
    heads = getattr(config, "num_attention_heads", 1)
    _check_count(
        heads, config.attribute_map.get("num_attention_heads", "num_attention_heads"), 1, source, may_be_null=False
    )
    by_layer: list[Any] = [kv_heads for kv_heads, _ in heads_by_layer(config)]
    for kv_heads in by_layer or [getattr(config, "num_key_value_heads", None)]:
        if kv_heads and not family.latent and heads % kv_heads:
            raise _refusal(source, "num_attention_heads", f"a multiple of num_key_value_heads, {kv_heads}", heads)
    for layer_heads in query_heads(config):
        if not (isinstance(layer_heads, int) and layer_heads > 0) or layer_heads % config.num_key_value_heads:
            limit = f"multiples of num_key_value_heads, {config.num_key_value_heads}"
            raise _refusal(source, _LAYER_HEADS, limit, layer_heads)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    chosen = getattr(config, "num_experts_per_tok", experts)  # some families use another name
    if experts and not (isinstance(chosen, int) and 1 <= chosen <= experts):
        raise _refusal(source, "num_experts_per_tok", f"from 1 to {experts}, the number of experts", chosen)
    _check_window(config, family, source)
    _check_lists(config, source)
    if family.linear:
        _check_linear(config, source)
    if family.group_score:
        _check_groups(config, family.group_score, source)
    if family.growing:
        _check_growth(config, source)
    if family.indexed:
        _check_indexer(config, source)


def _check_lists(config: Any, source: str) -> None:
    """Check that longrope has a divisor for each pair of columns of a head that it rotates."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        pairs = (int(head_dim * rope.get("partial_rotary_factor", 1.0)) + 1) // 2
        for name in ("short_factor", "long_factor"):
            if not isinstance(stated := rope.get(name), list) or len(stated) != pairs:
                raise _refusal(source, name, f"a list of {pairs} numbers", stated)


def heads_by_layer(config: Any) -> list[tuple[int, int]]:
    """Return the number and the size of the key/value heads of each layer; empty if the config has one for all."""
    if (times := family_of_type(config.model_type).window_heads) > 1:
        counts = {"full_attention": config.num_key_value_heads, "sliding_attention": times * config.num_key_value_heads}
        return [(counts[kind], config.head_dim) for kind in config.layer_types]
    if not getattr(config, "per_layer_attributes", None):
        return []
    layers = [config.per_layer_config[i] for i in range(config.num_hidden_layers)]
    return [(layer.num_key_value_heads, layer.head_dim) for layer in layers]


def query_heads(config: Any) -> list[Any]:
    """Return the number of query heads of each layer; empty if the config has one for all."""
    if "num_attention_heads" in (getattr(config, "per_layer_attributes", None) or ()):
        return [config.per_layer_config[i].num_attention_heads for i in range(config.num_hidden_layers)]
    return getattr(config, _LAYER_HEADS, None) or []


def _check_window(config: Any, family: Family, source: str) -> None:
    """Check the sliding window of the layers that use one.

    These are the layers that layer_types names, or all layers if there is no layer_types.
    """
    window, kinds = vars(config).get("sliding_window"), getattr(config, "layer_types", None)
    known: tuple[str, ...] = _KINDS
    if family.linear:
        known = (*_KINDS, LINEAR_ATTENTION)
    elif family.indexed:
        known = ("deepseek_sparse_attention",)
    elif family.chunked:
        known = ("full_attention", CHUNKED_ATTENTION)
        if CHUNKED_ATTENTION in (kinds or ()) and config.attention_chunk_size is None:
            raise _refusal(source, "attention_chunk_size", "at least 1", None)
    if unknown := [kind for kind in kinds or () if kind not in known]:
        if LINEAR_ATTENTION in unknown:  # transformers' name for layers of Mamba too
            raise CheckpointError(
                f"{source}: a {config.model_type} has layers that keep a state instead of keys and values, which is "
                "not supported"
            )
        raise _refusal(source, "layer_types", " or ".join(known), unknown[0])
    used = "sliding_attention" in kinds if kinds else window is not None
    if used and not (isinstance(window, int) and window >= 1):
        raise _refusal(source, "sliding_window", "at least 1", window)


def _check_linear(config: Any, source: str) -> None:
    """Check the sizes of linear attention, which its kernels limit."""
    for name in ("linear_key_head_dim", "linear_value_head_dim"):
        if (dim := getattr(config, name)) % 8 or dim > MOST_LINEAR_DIM:
            raise _refusal(source, name, f"a multiple of 8, at most {MOST_LINEAR_DIM}", dim)
    if (taps := config.linear_conv_kernel_dim) > MOST_TAPS:
        raise _refusal(source, "linear_conv_kernel_dim", f"at most {MOST_TAPS}", taps)
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if values % keys:
        raise _refusal(source, "linear_num_value_heads", f"a multiple of linear_num_key_heads, {keys}", values)
    if config.hidden_act != "silu":
        raise _refusal(source, "hidden_act", "silu, which the convolution uses too", config.hidden_act)


def _check_experts_beside(config: Any, source: str) -> None:
    """Check the experts of a Gemma 4, which are beside a dense MLP."""
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        if not getattr(config, name):
            raise _refusal(source, name, "at least 1 with enable_moe_block", getattr(config, name))
    if config.top_k_experts > config.num_experts:
        limit = f"from 1 to {config.num_experts}, the number of experts"
        raise _refusal(source, "top_k_experts", limit, config.top_k_experts)


def _check_growth(config: Any, source: str) -> None:
    """Check what queries need that grow, and the routers of Mistral 4."""
    for name, least in (("llama_4_scaling_beta", 0), ("original_max_position_embeddings", 1)):
        if not isinstance(stated := config.rope_parameters.get(name), int | float) or stated < least:
            raise _refusal(source, name, f"a number from {least}", stated)
    if getattr(config, "n_group", 1) != 1:  # its scores are those of a softmax, but its groups are not DeepSeek-V2's
        raise _refusal(source, "n_group", "1", config.n_group)


def _check_indexer(config: Any, source: str) -> None:
    """Check the indexer of sparse attention."""
    if config.index_head_dim < (rotary := config.qk_rope_head_dim):
        raise _refusal(source, "index_head_dim", f"at least qk_rope_head_dim, {rotary}", config.index_head_dim)
    if (kinds := getattr(config, "indexer_types", None)) and kinds[0] != "full":  # nothing could be shared
        raise _refusal(source, "indexer_types", "full in the first layer", kinds[0])


def _check_groups(config: Any, group_score: int, source: str) -> None:
    """Check the expert groups of a model, whose router would otherwise fail in the first step.

    group_score: the score of a group is the sum of its best so many experts.
    """
    method = config.topk_method if group_score == 1 else "group_limited_greedy"  # routers of sums have only this
    if method not in ("greedy", "group_limited_greedy"):
        raise _refusal(source, "topk_method", "greedy or group_limited_greedy", method)
    if method == "greedy":
        return
    name = "n_routed_experts" if hasattr(config, "n_routed_experts") else "num_experts"
    experts, chosen, groups, used = getattr(config, name), config.num_experts_per_tok, config.n_group, config.topk_group
    _check_count(experts, name, 1, source, may_be_null=False)
    if not groups or groups < 1 or experts % groups:
        raise _refusal(source, "n_group", f"a divisor of {name}, {experts}", groups)
    if experts < groups * group_score:
        raise _refusal(source, "n_group", f"below {experts}, since a group needs at least two experts", groups)
    if not used or not 1 <= used <= groups:
        raise _refusal(source, "topk_group", f"from 1 to n_group, {groups}", used)
    if chosen > (most := experts // groups * used):
        raise _refusal(source, "num_experts_per_tok", f"at most {most}, the experts of topk_group groups", chosen)


def _of_layers(group: Mapping[str, Any], name: str) -> list[Any]:
    """Return a value, or those of each layer, where a family has such lists."""
    stated = group.get(name)
    has_lists = name == "rope_theta" and family_of_type(group.get("model_type")).queries_differ
    return stated if has_lists and isinstance(stated, list) else [stated]


def _layer_values(values: Mapping[str, Any], source: str) -> Iterator[Mapping[str, Any]]:
    """Yield the values of a config file that single layers have."""
    by_layer = values.get("per_layer_config") or {}
    for group in (by_layer, *(by_layer.values() if isinstance(by_layer, dict) else ())):
        if not isinstance(group, dict):
            raise _refusal(source, "per_layer_config", "an object with one for each layer", group)
    yield from by_layer.values()


def _check_count(
    value: Any, name: str, least: int, source: str, most: int = _MOST, *, may_be_null: bool = True
) -> None:
    if not ((value is None and may_be_null) or (type(value) is int and least <= value <= most)):
        raise _refusal(source, name, f"a whole number from {least} to {most}", value)


def _check_number(value: Any, name: str, limits: tuple[float, float], source: str, *, may_be_null: bool = True) -> None:
    least, most = limits
    if not ((value is None and may_be_null) or (type(value) in (int, float) and least <= value <= most)):
        raise _refusal(source, name, f"a number from {least:g} to {most:g}", value)


def rope_parameters(values: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield all groups of rotary parameters: one for all layers, or one for each kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := values.get(name), dict):
            yield rope
            yield from (layer_rope for layer_rope in rope.values() if isinstance(layer_rope, dict))


def _refusal(source: str, name: str, limit: str, value: Any) -> CheckpointError:
    shown = short_repr(value)
    plain = value[:MAX_CHARACTERS] if isinstance(value, str) else value if isinstance(value, int | float) else shown
    return CheckpointError(f"{source}: {name} must be {limit}, got {shown}", param=name, limit=limit, value=plain)
