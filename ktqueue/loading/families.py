"""Model families that GGUF can carry: their config as GGUF metadata, both ways, and their modules.

A family is one table entry. Knows nothing of tensors' contents and nothing of tokenizers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ktqueue.core.errors import CheckpointError

_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_EXPERTS = ("mlp.gate", "mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj")
_SHARED = tuple(f"mlp.shared_expert{part}" for part in (".gate_proj", ".up_proj", ".down_proj", "_gate"))


@dataclass(frozen=True, slots=True)
class Field:
    """A config key and the GGUF key, after `{architecture}.`, that carries it. `aliases`: other spellings in
    config files. A field that is not `required` is left to transformers' default where the file lacks it."""

    config: str
    key: str
    kind: type = int
    aliases: tuple[str, ...] = ()
    required: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`implied`: config values that the GGUF architecture fixes. `layer_modules`: modules of one layer that hold
    weights, as transformers names them. `permuted`: q and k rows lie in GGUF's own rotary order.
    `rope_factors`: files may hold divisors of the rotary frequencies. Two families may share an architecture: one
    with experts, one without."""

    architecture: str
    model_type: str
    class_name: str
    fields: tuple[Field, ...]
    layer_modules: tuple[str, ...]
    implied: Mapping[str, Any] = field(default_factory=dict)
    permuted: bool = False
    rope_factors: bool = False

    @property
    def has_experts(self) -> bool:
        """Whether its layers route tokens to experts."""
        return any(one.key == _EXPERT_KEY for one in self.fields)


_EXPERT_KEY = "expert_count"
_DENSE = (
    Field("max_position_embeddings", "context_length"),
    Field("hidden_size", "embedding_length"),
    Field("num_hidden_layers", "block_count"),
    Field("num_attention_heads", "attention.head_count"),
    Field("num_key_value_heads", "attention.head_count_kv"),
    Field("rms_norm_eps", "attention.layer_norm_rms_epsilon", float),
)
_COMMON = (*_DENSE, Field("num_experts_per_tok", "expert_used_count"))
_EXPERT_COUNT = Field("num_experts", _EXPERT_KEY, aliases=("num_local_experts",))
_EXPERT_WIDTH = Field("moe_intermediate_size", "expert_feed_forward_length")
_WIDTH = Field("intermediate_size", "feed_forward_length")
_HEAD_DIM = Field("head_dim", "attention.key_length", required=False)

FAMILIES = (
    Family(
        architecture="qwen3moe",
        model_type="qwen3_moe",
        class_name="Qwen3MoeForCausalLM",
        fields=(
            *_COMMON,
            _EXPERT_COUNT,
            _EXPERT_WIDTH,
            _HEAD_DIM,
            Field("intermediate_size", "feed_forward_length", required=False),
        ),
        layer_modules=(*_NORMS, *_ATTENTION, "self_attn.q_norm", "self_attn.k_norm", *_EXPERTS, *_MLP),
        implied={"norm_topk_prob": True, "hidden_act": "silu", "attention_bias": False},
    ),
    Family(
        architecture="qwen2moe",
        model_type="qwen2_moe",
        class_name="Qwen2MoeForCausalLM",
        fields=(
            *_COMMON,
            _EXPERT_COUNT,
            _EXPERT_WIDTH,
            Field("intermediate_size", "feed_forward_length", required=False),
            Field("shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
        ),
        layer_modules=(*_NORMS, *_ATTENTION, *_EXPERTS, *_SHARED, *_MLP),
        implied={"norm_topk_prob": False, "hidden_act": "silu", "qkv_bias": True},
    ),
    Family(
        architecture="llama",
        model_type="mixtral",
        class_name="MixtralForCausalLM",
        fields=(
            *_COMMON,
            Field("num_local_experts", _EXPERT_KEY, aliases=("num_experts",)),
            _WIDTH,
            _HEAD_DIM,
        ),
        layer_modules=(*_NORMS, *_ATTENTION, *_EXPERTS),
        implied={"hidden_act": "silu"},
        permuted=True,
    ),
    Family(
        architecture="olmoe",
        model_type="olmoe",
        class_name="OlmoeForCausalLM",
        fields=(*_COMMON, _EXPERT_COUNT, _WIDTH),
        layer_modules=(*_NORMS, *_ATTENTION, "self_attn.q_norm", "self_attn.k_norm", *_EXPERTS),
        implied={"norm_topk_prob": False, "hidden_act": "silu", "attention_bias": False, "clip_qkv": None},
    ),
    Family(
        architecture="qwen3",
        model_type="qwen3",
        class_name="Qwen3ForCausalLM",
        fields=(*_DENSE, _WIDTH, _HEAD_DIM),
        layer_modules=(*_NORMS, *_ATTENTION, "self_attn.q_norm", "self_attn.k_norm", *_MLP),
        implied={"hidden_act": "silu", "attention_bias": False},
    ),
    Family(
        architecture="qwen2",
        model_type="qwen2",
        class_name="Qwen2ForCausalLM",
        fields=(*_DENSE, _WIDTH),
        layer_modules=(*_NORMS, *_ATTENTION, *_MLP),
        implied={"hidden_act": "silu"},
    ),
    Family(
        architecture="llama",
        model_type="llama",
        class_name="LlamaForCausalLM",
        fields=(*_DENSE, _WIDTH, _HEAD_DIM),
        layer_modules=(*_NORMS, *_ATTENTION, *_MLP),
        implied={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        permuted=True,
        rope_factors=True,
    ),
)
MODEL_MODULES = ("model.embed_tokens", "model.norm", "lm_head")
_ROPE_THETA = 10_000.0  # where the file states none (llama.cpp's default)


def family_of_metadata(metadata: Mapping[str, Any], source: str) -> Family:
    """The family of a GGUF file. Raises CheckpointError where the architecture is missing or not among the known."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(f"{source}: metadata key general.architecture is missing")
    found = [family for family in FAMILIES if family.architecture == architecture]
    if not found:
        known = ", ".join(dict.fromkeys(family.architecture for family in FAMILIES))
        raise CheckpointError(f"{source}: GGUF architecture {architecture!r} is not supported; known: {known}")
    routed = bool(metadata.get(f"{architecture}.{_EXPERT_KEY}"))
    return next((family for family in found if family.has_experts == routed), found[0])


def family_of_model_type(model_type: str, source: str) -> Family:
    """The family of a transformers `model_type`. Raises CheckpointError listing the known ones."""
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    known = ", ".join(family.model_type for family in FAMILIES)
    raise CheckpointError(f"{source}: no GGUF architecture is known for model_type {model_type!r}; known: {known}")


def config_from_metadata(family: Family, metadata: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A transformers config from GGUF metadata, without vocabulary size, token ids and tied embeddings.

    Raises CheckpointError naming the key that is missing or wrong.
    """
    config: dict[str, Any] = {"architectures": [family.class_name], "model_type": family.model_type, **family.implied}
    for one in family.fields:
        key = f"{family.architecture}.{one.key}"
        if key not in metadata:
            if one.required:
                raise CheckpointError(f"{source}: metadata key {key} is missing")
            continue
        config[one.config] = _number(metadata[key], one.kind, key, source)
    config["rope_parameters"] = _rope_from_metadata(family, metadata, source)
    return config


def metadata_from_config(family: Family, config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """GGUF metadata from a transformers config. Raises CheckpointError for what GGUF cannot say."""
    for key, value in family.implied.items():
        if config.get(key, value) != value:
            raise CheckpointError(f"{source}: {key} is {config[key]!r}; GGUF's {family.architecture} implies {value!r}")
    if config.get("use_sliding_window"):
        raise CheckpointError(f"{source}: use_sliding_window is true; GGUF's {family.architecture} cannot say so")
    metadata: dict[str, Any] = {}
    for one in family.fields:
        value = next((config[name] for name in (one.config, *one.aliases) if config.get(name) is not None), None)
        if value is None and one.required:
            raise CheckpointError(f"{source}: config key {one.config} is missing")
        if value is not None:
            metadata[f"{family.architecture}.{one.key}"] = one.kind(value)
    if (head_dim := config.get("head_dim")) is not None:
        metadata[f"{family.architecture}.attention.value_length"] = int(head_dim)
    dimensions = head_dim or config["hidden_size"] // config["num_attention_heads"]
    metadata[f"{family.architecture}.rope.dimension_count"] = int(dimensions)
    return {**metadata, **_rope_to_metadata(family, config, source)}


def rope_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config's rotary parameters, however old its spelling; `rope_type` and `rope_theta` are always there."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    return {
        **rope,
        "rope_type": kind,
        "rope_theta": float(rope.get("rope_theta", config.get("rope_theta", _ROPE_THETA))),
    }


def _number(value: Any, kind: type, key: str, source: str) -> int | float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        good = good and isinstance(value, int) and 0 < value < 1 << 31
    elif good:
        good = 0 < value < 1e30
    if not good:
        raise CheckpointError(f"{source}: metadata key {key} must be a positive number, got {value!r}")
    return int(value) if kind is int else float(value)


def _rope_from_metadata(family: Family, metadata: Mapping[str, Any], source: str) -> dict[str, Any]:
    prefix = f"{family.architecture}.rope."
    theta = _number(metadata.get(prefix + "freq_base", _ROPE_THETA), float, prefix + "freq_base", source)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = metadata.get(prefix + "scaling.type", "none")
    if kind in ("linear", "yarn"):
        rope["rope_type"] = kind
        rope["factor"] = _number(metadata.get(prefix + "scaling.factor"), float, prefix + "scaling.factor", source)
        if kind == "yarn":
            key = prefix + "scaling.original_context_length"
            rope["original_max_position_embeddings"] = _number(metadata.get(key), int, key, source)
    elif kind != "none":
        raise CheckpointError(f"{source}: {prefix}scaling.type {kind!r} is not supported; known: none, linear, yarn")
    return rope


def _rope_to_metadata(family: Family, config: Mapping[str, Any], source: str) -> dict[str, Any]:
    prefix = f"{family.architecture}.rope."
    rope = rope_of_config(config)
    kind = rope["rope_type"]
    metadata: dict[str, Any] = {prefix + "freq_base": rope["rope_theta"]}
    if kind in ("linear", "yarn"):
        metadata[prefix + "scaling.type"] = kind
        metadata[prefix + "scaling.factor"] = float(rope["factor"])
        if kind == "yarn":
            original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
            metadata[prefix + "scaling.original_context_length"] = int(original)
    elif kind != "default" and not (kind == "llama3" and family.rope_factors):
        raise CheckpointError(f"{source}: rope_type {kind!r} cannot be written to GGUF; known: default, linear, yarn")
    return metadata
