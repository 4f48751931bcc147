"""A model's config as GGUF metadata, both ways, as its family describes it."""

from collections.abc import Mapping
from typing import Any

from ktqueue.core.errors import CheckpointError
from ktqueue.core.short_repr import short_repr
from ktqueue.families.family import Family, GgufLayout, MetadataField
from ktqueue.loading.gguf.gemma import gemma_config, gemma_metadata, plain_rope
from ktqueue.loading.gguf.gemma4 import gemma4_config, gemma4_metadata
from ktqueue.loading.gguf.header import ModelMetadata
from ktqueue.loading.gguf.laguna import laguna_config, laguna_metadata
from ktqueue.loading.gguf.latent import SIGMOID, growth_config, growth_metadata, latent_config, latent_metadata
from ktqueue.loading.gguf.linear import linear_config, linear_metadata
from ktqueue.loading.gguf.llama4 import check_llama4, llama4_config
from ktqueue.loading.gguf.mimo import mimo_config, mimo_metadata
from ktqueue.loading.gguf.rope import rope_from_metadata, rope_of_config, rope_to_metadata
from ktqueue.loading.gguf.step import step_config, step_metadata

MAX_LAYERS = 4096
_MULTI_TOKEN_LAYERS = "nextn_predict_layers"
_WINDOW_PATTERN = "attention.sliding_window_pattern"
_SLIDING = "sliding_attention"


def config_from_metadata(family: Family, values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Build a transformers config from GGUF metadata, without vocabulary size, token ids and tied embeddings.

    Raises CheckpointError that names the missing or invalid key.
    """
    layout = family.layout
    metadata = ModelMetadata(layout.architecture, values, source)
    config: dict[str, Any] = {"architectures": [family.class_name], "model_type": family.model_type, **layout.implied}
    is_period = layout.window_period and isinstance(metadata.get(_WINDOW_PATTERN), int)
    never_differ = {**layout.stated, **({_WINDOW_PATTERN: layout.window_period} if is_period else {})}
    for name, value in never_differ.items():
        if (stated := metadata.get(name, value)) != value:
            raise metadata.error(name, f"must be {value!r}, got {short_repr(stated)}")
    for entry in layout.fields:
        if entry.key not in metadata:
            if entry.required:
                raise metadata.error(entry.key, "is missing")
            if entry.absent is not None:
                config[entry.config] = entry.absent
            continue
        value = _field_value(entry, metadata)
        config[entry.config] = None if value == entry.none else value
    if (layers := config["num_hidden_layers"]) > MAX_LAYERS:
        raise metadata.error("block_count", f"must be at most {MAX_LAYERS}, got {layers}")
    if family.heads_differ:
        return config | gemma4_config(metadata, config)
    config["num_hidden_layers"] -= multi_token_layers(metadata)
    if family.window_heads > 1:
        return config | mimo_config(metadata, config)
    if layout.heads_listed:
        return config | laguna_config(metadata, config)
    if layout.limits:
        return config | step_config(metadata, config)
    if layout.windows_listed:
        slides = metadata.flags(_WINDOW_PATTERN, config["num_hidden_layers"])
        config["layer_types"] = [_SLIDING if value else "full_attention" for value in slides]
    if family.latent:
        config |= latent_config(family, metadata, config)
    if family.linear:
        config |= linear_config(layout, metadata, config)
    if family.chunked:
        config |= llama4_config(metadata, config)
    rope = rope_from_metadata(
        metadata, latent=family.latent, lists=bool(layout.rope_lists), yarn_scale=layout.yarn_scale
    )
    if not family.latent:
        part = _rotary_part(family, metadata, config)
        if part < 1 or family.partly_rotated:  # whose configs may have another default
            rope["partial_rotary_factor"] = part
    config["rope_parameters"] = {**rope, **layout.rope}
    if family.growing:
        config |= growth_config(family, metadata, config)
    if layout.gemma:
        config |= gemma_config(layout.gemma, metadata, config)
    return config


def multi_token_layers(metadata: ModelMetadata) -> int:
    """Return how many of a file's last layers predict further tokens. They are not part of the model that we serve.

    Raises CheckpointError.
    """
    layers = metadata.count(_MULTI_TOKEN_LAYERS)
    if layers and layers >= metadata.count("block_count"):
        raise metadata.error(_MULTI_TOKEN_LAYERS, f"is {layers}, which is not below {metadata.key('block_count')}")
    return layers


def _field_value(entry: MetadataField, metadata: ModelMetadata) -> int | float | bool:
    if entry.kind is bool:
        return metadata.flag(entry.key)
    if entry.least == 0:
        return metadata.count(entry.key)
    return metadata.checked(entry.key, metadata.get(entry.key), entry.kind)


def _rotary_part(family: Family, metadata: ModelMetadata, config: Mapping[str, Any]) -> float:
    """Return the part of a head that rotary embeddings turn: 1, or less in the families that have such a config."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    head_width = config.get("head_dim") or width // heads
    if not head_width:
        raise metadata.error("embedding_length", f"must be at least the {heads} heads, got {width}")
    rotary_width = metadata.count("rope.dimension_count") or head_width
    partial = family.partly_rotated and rotary_width < head_width and rotary_width % 2 == 0
    if rotary_width != head_width and not partial:
        problem = f"must be the width of a head, {head_width}, got {rotary_width}"
        raise metadata.error("rope.dimension_count", problem, limit=head_width, value=rotary_width)
    return float(rotary_width / head_width)


def with_multi_token_layers(layout: GgufLayout, metadata: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return metadata of a model that has `count` layers behind its own that predict further tokens."""
    layers = f"{layout.architecture}.block_count"
    return {**metadata, layers: metadata[layers] + count, f"{layout.architecture}.{_MULTI_TOKEN_LAYERS}": count}


def metadata_from_config(family: Family, config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Build GGUF metadata from a transformers config. Raises CheckpointError for what GGUF cannot express."""
    layout = family.layout
    for key, value in layout.implied.items():
        if config.get(key, value) != value:
            raise CheckpointError(f"{source}: {key} is {config[key]!r}; GGUF's {layout.architecture} implies {value!r}")
    metadata: dict[str, Any] = {}
    if layout.gemma:
        metadata = gemma_metadata(layout.gemma, layout.architecture, config, source)
        config = plain_rope(layout.gemma, config)
    elif not (family.heads_differ or family.window_heads > 1 or layout.heads_listed or layout.limits):
        _check_windows(layout, config, source)
    if config.get("use_sliding_window"):
        raise CheckpointError(
            f"{source}: use_sliding_window is true, which GGUF's {layout.architecture} cannot express"
        )
    for entry in layout.fields:
        names = (entry.config, *entry.aliases)
        value = next((config[name] for name in names if config.get(name) is not None), entry.none)
        if value is None and entry.required:
            raise CheckpointError(f"{source}: config key {entry.config} is missing")
        if value is not None:
            metadata[f"{layout.architecture}.{entry.key}"] = entry.kind(value)
    metadata |= {f"{layout.architecture}.{key}": value for key, value in layout.stated.items()}
    if family.heads_differ:
        return {**metadata, **gemma4_metadata(layout.architecture, config, source)}
    if layout.sigmoid:
        metadata[f"{layout.architecture}.expert_gating_func"] = SIGMOID
    if family.window_heads > 1:
        return {**metadata, **mimo_metadata(layout.architecture, config, source)}
    if layout.heads_listed:
        return {**metadata, **laguna_metadata(layout.architecture, config, source)}
    if layout.limits:
        return {**metadata, **step_metadata(layout.architecture, config, source)}
    if family.chunked:
        check_llama4(layout.architecture, config, source)
    rope = rope_to_metadata(
        layout.architecture,
        config,
        source,
        latent=family.latent,
        factors=layout.rope_factors,
        lists=bool(layout.rope_lists),
        yarn_scale=layout.yarn_scale,
        implied=layout.rope,
    )
    if family.growing:
        rope |= growth_metadata(layout.architecture, config, source)
    if family.latent:
        return {**metadata, **latent_metadata(family, config, source), **rope}
    if (head_dim := config.get("head_dim")) is not None:
        metadata[f"{layout.architecture}.attention.value_length"] = int(head_dim)
    if layout.windows_listed:
        if len(kinds := config.get("layer_types") or ()) != config["num_hidden_layers"]:
            raise CheckpointError(f"{source}: config key layer_types must name the kind of each layer")
        metadata[f"{layout.architecture}.{_WINDOW_PATTERN}"] = [kind == _SLIDING for kind in kinds]
    if shared := metadata.get(f"{layout.architecture}.expert_shared_count"):  # llama.cpp needs it for ERNIE
        width = metadata[f"{layout.architecture}.expert_feed_forward_length"]
        metadata[f"{layout.architecture}.expert_shared_feed_forward_length"] = shared * width
    if family.linear:
        metadata |= linear_metadata(layout, config, source)
    dimensions = head_dim or config["hidden_size"] // config["num_attention_heads"]
    part = rope_of_config(config).get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1
    rotary_width = config.get("rotary_dim") or dimensions * part
    metadata[f"{layout.architecture}.rope.dimension_count"] = int(rotary_width)
    return {**metadata, **rope}


def _check_windows(layout: GgufLayout, config: Mapping[str, Any], source: str) -> None:
    """Check that the layers with a sliding window are those that GGUF implies. Raises CheckpointError."""
    kinds = config.get("layer_types") or ()
    if layout.windows_listed:
        return
    period = layout.window_period
    wanted = [period > 0 and i % period != period - 1 for i in range(len(kinds))]
    if [kind == _SLIDING for kind in kinds] != wanted:
        raise CheckpointError(f"{source}: GGUF's {layout.architecture} cannot express layer_types {[*kinds]}")
