"""Step-3.5 in GGUF files: metadata keys and tensors, as llama.cpp's conversion/step3.py and its model step35 have them.

Layers with a window have other query heads than the others, and rotate twice as many columns of each head. Factors of
the rotary frequencies are those of layers without a window. Norms are stored with the 1 that is added to their weights.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.checkpoint import CheckpointTensor
from ktqueue.loading.gguf.gemma import adapt_gemma_tensors
from ktqueue.loading.gguf.header import ModelMetadata
from ktqueue.loading.gguf.rope import FACTORS_TENSOR, longrope_parameters, rope_from_metadata, rope_to_metadata

_FULL, _SLIDING = "full_attention", "sliding_attention"
_HEADS, _KV_HEADS, _PATTERN = "attention.head_count", "attention.head_count_kv", "attention.sliding_window_pattern"
_LIMITS = {"swiglu_limits": "swiglu_clamp_exp", "swiglu_limits_shared": "swiglu_clamp_shexp"}


def step_config(metadata: ModelMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config keys that only Step-3.5 has, but for rotary factors. `config` holds the keys that were read
    before. Raises CheckpointError."""
    layers = int(config["num_hidden_layers"])
    slides = metadata.flags(_PATTERN, layers)
    heads = {is_sliding: _count(metadata, _HEADS, slides, is_sliding) for is_sliding in (False, True)}
    kv_heads = {_count(metadata, _KV_HEADS, slides, is_sliding) for is_sliding in (False, True)} - {0}
    if len(kv_heads) != 1:
        raise metadata.error(_KV_HEADS, f"must be the same in all layers, got {sorted(kv_heads)}")
    width = metadata.integer("attention.key_length")
    part = metadata.integer("rope.dimension_count", width) / width
    full = rope_from_metadata(metadata, latent=False)
    local = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", full["rope_theta"])}
    return {
        "num_attention_heads": heads[False] or heads[True],
        "num_sliding_attention_heads": heads[True] or heads[False],
        "num_key_value_heads": kv_heads.pop(),
        "head_dim": width,
        "layer_types": [_SLIDING if value else _FULL for value in slides],
        "rope_parameters": {
            _FULL: {**full, "partial_rotary_factor": part / 2},
            _SLIDING: {**local, "partial_rotary_factor": part},
        },
        **{name: _limits(metadata, key, layers) for name, key in _LIMITS.items()},
    }


def _count(metadata: ModelMetadata, key: str, slides: list[bool], is_sliding: bool) -> int:
    """Return the number of heads of the layers with a window, or of the others; 0: there are none of them. Raises
    CheckpointError if they differ."""
    stated = metadata.get(key)
    listed = stated if isinstance(stated, list) else [stated] * len(slides)
    if len(listed) < len(slides):
        raise metadata.error(key, f"has numbers for {len(listed)} of {len(slides)} layers")
    found = {
        int(metadata.checked(key, count, int)) for count, has in zip(listed, slides, strict=False) if has is is_sliding
    }
    if len(found) > 1:
        raise metadata.error(key, f"must be the same in all layers of a kind, got {sorted(found)}")
    return found.pop() if found else 0


def _limits(metadata: ModelMetadata, key: str, layers: int) -> list[float]:
    stated = metadata.get(key, 0.0)
    limits = stated if isinstance(stated, list) else [stated] * layers
    if len(limits) < layers or any(not isinstance(limit, int | float) or limit < 0 for limit in limits):
        raise metadata.error(key, f"must have a number from 0 for each of {layers} layers")
    return [float(limit) for limit in limits[:layers]]


def adapt_step_tensors(path: str, tensors: dict[str, CheckpointTensor], config: dict[str, Any]) -> None:
    """Take the 1 from the norms in `tensors`, by GGUF name, and the rotary factors into `config`. Raises
    CheckpointError."""
    adapt_gemma_tensors(tensors)
    if (stored := tensors.pop(FACTORS_TENSOR, None)) is None:
        return
    rope, width = config["rope_parameters"][_FULL], config["head_dim"]
    factors = stored.decode(torch.float32).numpy().reshape(-1)
    rotated = int(rope["partial_rotary_factor"] * width) // 2
    if len(factors) < rotated or not (factors > 0).all() or rope["rope_type"] != "default":
        raise CheckpointError(
            f"{path}: tensor {FACTORS_TENSOR!r} must hold {rotated} positive numbers, without a scaling"
        )
    positions = config["max_position_embeddings"]
    config["rope_parameters"][_FULL] = longrope_parameters(rope, factors[:rotated], positions)


def step_metadata(prefix: str, config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return GGUF metadata for a config of transformers: see `step_config`.

    Raises CheckpointError for what GGUF cannot express.
    """
    kinds, ropes, width = config.get("layer_types") or (), config.get("rope_parameters") or {}, int(config["head_dim"])
    layers, kv_heads = int(config["num_hidden_layers"]), int(config["num_key_value_heads"])
    if len(kinds) != layers or not {_FULL, _SLIDING} <= ropes.keys():
        raise CheckpointError(f"{source}: config keys layer_types and rope_parameters must name the kind of each layer")
    parts = [ropes[kind].get("partial_rotary_factor", 1.0) for kind in (_FULL, _SLIDING)]
    if ropes[_SLIDING].get("rope_type", "default") != "default" or parts[1] != 2 * parts[0]:
        raise CheckpointError(f"{source}: rope_parameters {ropes} cannot be written to GGUF's {prefix}")
    heads = {_FULL: config["num_attention_heads"], _SLIDING: config["num_sliding_attention_heads"]}
    limits = {key: config.get(name) or [0.0] * layers for name, key in _LIMITS.items()}
    full = {name: value for name, value in ropes[_FULL].items() if name != "partial_rotary_factor"}
    return {
        f"{prefix}.{_HEADS}": [int(heads[kind]) for kind in kinds],
        f"{prefix}.{_KV_HEADS}": [kv_heads] * layers,
        f"{prefix}.{_PATTERN}": [kind == _SLIDING for kind in kinds],
        f"{prefix}.attention.key_length": width,
        f"{prefix}.attention.value_length": width,
        f"{prefix}.rope.dimension_count": int(width * parts[1]),
        **rope_to_metadata(prefix, {**config, "rope_parameters": full}, source, latent=False, factors=False),
        f"{prefix}.rope.freq_base_swa": float(ropes[_SLIDING]["rope_theta"]),
        **{f"{prefix}.{key}": [float(limit or 0) for limit in values] for key, values in limits.items()},
    }
