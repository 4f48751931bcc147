"""Laguna in GGUF files: metadata keys, as llama.cpp's conversion/laguna.py and its model laguna have them.

Layers with a window may have other query heads than the others. They rotate whole heads by plain angles, the others a
part of each head, with YaRN.
"""

import math
from collections.abc import Mapping
from typing import Any

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.checkpoint import CheckpointTensor
from ktqueue.loading.gguf.header import ModelMetadata
from ktqueue.loading.gguf.rope import rope_from_metadata, rope_to_metadata

_FULL, _SLIDING = "full_attention", "sliding_attention"
_HEADS, _PATTERN = "attention.head_count", "attention.sliding_window_pattern"
_WIDTH, _FACTOR = "rope.dimension_count", "rope.scaling.yarn_attn_factor"
_PERIOD = 4  # of layers, the first of which has no window, if the file does not say otherwise


def laguna_config(metadata: ModelMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config keys that only Laguna has. `config` holds the keys that were read before. Raises
    CheckpointError."""
    layers, stated = int(config["num_hidden_layers"]), metadata.get(_HEADS)
    heads = stated if isinstance(stated, list) else [stated] * layers
    if len(heads) < layers:
        raise metadata.error(_HEADS, f"has numbers for {len(heads)} of {layers} layers")
    counts = [int(metadata.checked(_HEADS, count, int)) for count in heads[:layers]]
    width, window = metadata.integer("attention.key_length"), metadata.count("attention.sliding_window")
    if isinstance(metadata.get(_PATTERN), list):
        slides = metadata.flags(_PATTERN, layers)
    else:
        period = metadata.count(_PATTERN) or _PERIOD
        slides = [window > 0 and layer % period != 0 for layer in range(layers)]
    rope = _rope(metadata) | {"partial_rotary_factor": metadata.integer(_WIDTH, width) / width}
    part = metadata.integer(f"{_WIDTH}_swa", width) / width
    local = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", rope["rope_theta"])}
    return {
        "num_attention_heads": counts[0],
        "num_attention_heads_per_layer": counts,
        "head_dim": width,
        "layer_types": [_SLIDING if value else _FULL for value in slides],
        **({"sliding_window": window} if window else {}),
        "rope_parameters": {_FULL: rope, _SLIDING: {**local, "partial_rotary_factor": part}},
    }


def _rope(metadata: ModelMetadata) -> dict[str, Any]:
    """Return the rotary parameters of layers without a window. The factor of YaRN that files have is the one that it
    has anyway, which llama.cpp computes too."""
    usual = 1 + 0.1 * math.log(metadata.number("rope.scaling.factor", 1.0))
    values = dict(metadata.values)
    if math.isclose(metadata.number(_FACTOR, usual), usual, rel_tol=1e-4):
        values.pop(metadata.key(_FACTOR), None)
    return rope_from_metadata(ModelMetadata(metadata.architecture, values, metadata.source), latent=False)


def gate_kind(tensors: Mapping[str, CheckpointTensor], config: Mapping[str, Any]) -> str:
    """Return the config's `gating`, by the rows of the first layer's gate. tensors: by transformers' names."""
    gate = tensors.get("model.layers.0.self_attn.g_proj.weight")
    rows = gate.shape[0] if gate else 0
    return "per-head" if rows == config["num_attention_heads_per_layer"][0] else "per-element"


def laguna_metadata(prefix: str, config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return GGUF metadata for a config of transformers: see `laguna_config`.

    Raises CheckpointError for what GGUF cannot express.
    """
    kinds, ropes, width = config.get("layer_types") or (), config.get("rope_parameters") or {}, int(config["head_dim"])
    layers = int(config["num_hidden_layers"])
    if len(kinds) != layers or _FULL not in ropes:
        raise CheckpointError(f"{source}: config keys layer_types and rope_parameters must name the kind of each layer")
    local = ropes.get(_SLIDING, {"rope_theta": ropes[_FULL]["rope_theta"]})
    if local.get("rope_type", "default") != "default":
        raise CheckpointError(f"{source}: rope type {local['rope_type']!r} of {_SLIDING} cannot be written to GGUF")
    full = {name: value for name, value in ropes[_FULL].items() if name != "partial_rotary_factor"}
    usual = 1 + 0.1 * math.log(full.get("factor") or 1.0)
    if math.isclose(full.get("attention_factor") or usual, usual, rel_tol=1e-4):
        full.pop("attention_factor", None)
    dense = [kind == "dense" for kind in config.get("mlp_layer_types") or ()]
    if dense != sorted(dense, reverse=True):
        raise CheckpointError(f"{source}: GGUF cannot express mlp_layer_types {config['mlp_layer_types']}")
    return {
        f"{prefix}.{_HEADS}": list(
            config.get("num_attention_heads_per_layer") or [config["num_attention_heads"]] * layers
        ),
        f"{prefix}.{_PATTERN}": [kind == _SLIDING for kind in kinds],
        f"{prefix}.attention.sliding_window": int(config.get("sliding_window") or 0),
        f"{prefix}.attention.key_length": width,
        f"{prefix}.attention.value_length": width,
        f"{prefix}.leading_dense_block_count": sum(dense),
        f"{prefix}.{_WIDTH}": int(width * ropes[_FULL].get("partial_rotary_factor", 1.0)),
        f"{prefix}.{_WIDTH}_swa": int(width * local.get("partial_rotary_factor", 1.0)),
        **rope_to_metadata(prefix, {**config, "rope_parameters": full}, source, latent=False, factors=False),
        f"{prefix}.rope.freq_base_swa": float(local["rope_theta"]),
    }
