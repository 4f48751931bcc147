"""MiMo-V2 in GGUF files: metadata keys, as llama.cpp's conversion/mimo.py and its model mimo2 have them.

Layers with a window have twice the key/value heads, and a rotary base of their own. Values are shorter than keys.
"""

from collections.abc import Mapping
from typing import Any

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.gguf.header import ModelMetadata

_FULL, _SLIDING = "full_attention", "sliding_attention"
_PATTERN, _KV_HEADS = "attention.sliding_window_pattern", "attention.head_count_kv"


def mimo_config(metadata: ModelMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config keys that only MiMo-V2 has. `config` holds the keys that were read before, with the number of
    the model's own layers. Raises CheckpointError."""
    layers, heads, listed = int(config["num_hidden_layers"]), metadata.get(_KV_HEADS), metadata.get(_PATTERN)
    if not isinstance(listed, list) or len(listed) < layers or not {*listed} <= {0, 1}:  # False is 0, True is 1
        raise metadata.error(_PATTERN, f"must be 0 or 1 for each of {layers} layers")
    slides = [bool(value) for value in listed[:layers]]
    if not isinstance(heads, list) or len(heads) < layers:
        raise metadata.error(_KV_HEADS, f"must have a number for each of {layers} layers")
    counts = [int(metadata.checked(_KV_HEADS, count, int)) for count in heads[:layers]]
    base = next((count for count, is_sliding in zip(counts, slides, strict=True) if not is_sliding), counts[0] // 2)
    if counts != [base * (2 if is_sliding else 1) for is_sliding in slides]:
        raise metadata.error(_KV_HEADS, f"must be {base}, and twice that in layers with a window, got {counts}")
    width = metadata.integer("attention.key_length")
    part = metadata.integer("rope.dimension_count", width) / width
    theta = metadata.number("rope.freq_base", 10_000.0)
    bases = {_FULL: theta, _SLIDING: metadata.number("rope.freq_base_swa", theta)}
    return {
        "num_key_value_heads": base,
        "head_dim": width,
        "v_head_dim": metadata.integer("attention.value_length", width),
        "layer_types": [_SLIDING if is_sliding else _FULL for is_sliding in slides],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": part}
            for kind, base in bases.items()
        },
    }


def mimo_metadata(prefix: str, config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return GGUF metadata for a config of transformers: see `mimo_config`.

    Raises CheckpointError for what GGUF cannot express.
    """
    kinds, ropes = config.get("layer_types") or (), config.get("rope_parameters") or {}
    if len(kinds) != config["num_hidden_layers"]:
        raise CheckpointError(f"{source}: config key layer_types must name the kind of each layer")
    found = {kind: ropes[kind] for kind in (_FULL, _SLIDING) if kind in ropes}
    types = {rope.get("rope_type", "default") for rope in found.values()}
    parts = {rope.get("partial_rotary_factor") for rope in found.values()}
    if len(found) != 2 or types != {"default"} or len(parts) != 1:
        raise CheckpointError(f"{source}: rope_parameters {ropes} cannot be written to GGUF's {prefix}")
    base, width = int(config["num_key_value_heads"]), int(config["head_dim"])
    return {
        f"{prefix}.{_PATTERN}": [kind == _SLIDING for kind in kinds],
        f"{prefix}.{_KV_HEADS}": [base * (2 if kind == _SLIDING else 1) for kind in kinds],
        f"{prefix}.attention.key_length": width,
        f"{prefix}.attention.value_length": int(config["v_head_dim"]),
        f"{prefix}.rope.dimension_count": int(width * (parts.pop() or 1)),
        f"{prefix}.rope.freq_base": float(found[_FULL]["rope_theta"]),
        f"{prefix}.rope.freq_base_swa": float(found[_SLIDING]["rope_theta"]),
    }
