"""Gemma 4 in GGUF files: metadata keys and tensors, as llama.cpp's conversion and its model gemma4 have them.

Layers without a window have heads of another number and size than the others. Their rotary frequencies are those of a
whole head divided by factors: 1 for the pairs that are rotated, and 1e30 for the others.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.checkpoint import CheckpointTensor
from ktqueue.loading.gguf.header import ModelMetadata
from ktqueue.loading.gguf.rope import FACTORS_TENSOR
from ktqueue.loading.weight_formats import Floats

_FULL, _SLIDING = "full_attention", "sliding_attention"
_PATTERN, _KV_HEADS = "attention.sliding_window_pattern", "attention.head_count_kv"
_NOT_ROTATED = 1e30
_PARTS = {  # of the smaller models, by the GGUF key and the key of the config
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input", "embeddings for each layer"),
    "attention.shared_kv_layers": ("num_kv_shared_layers", "layers that share keys and values"),
}


def gemma4_config(metadata: ModelMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config keys that only Gemma 4 has, except those that follow from tensors. `config` holds the keys that
    were read before. Raises CheckpointError."""
    layers = int(config["num_hidden_layers"])
    for key, (name, what) in _PARTS.items():
        if count := metadata.count(key):
            raise CheckpointError(
                f"{metadata.source}: a Gemma 4 with {what} is served from its folder only ({name} {count})"
            )
    slides = metadata.flags(_PATTERN, layers)
    if slides[-1]:  # transformers does not build such a model
        raise metadata.error(_PATTERN, "must be false for the last layer")
    widths = {kind: _head_dim(metadata, kind) for kind in (_FULL, _SLIDING)}
    stated = metadata.get(_KV_HEADS)
    counts = stated if isinstance(stated, list) else [stated] * layers
    if len(counts) < layers:
        raise metadata.error(_KV_HEADS, f"has numbers for {len(counts)} of {layers} layers")
    kv_heads = [int(metadata.checked(_KV_HEADS, count, int)) for count in counts[:layers]]
    kinds = [_SLIDING if value else _FULL for value in slides]
    theta = metadata.number("rope.freq_base", 10_000.0)
    local = metadata.number("rope.freq_base_swa", theta)
    return {
        "head_dim": widths[_SLIDING],
        "num_key_value_heads": kv_heads[0],
        "per_layer_config": {
            str(i): {"head_dim": widths[kinds[i]], "num_key_value_heads": kv_heads[i]} for i in range(layers)
        },
        "layer_types": kinds,
        "enable_moe_block": bool(config.get("num_experts")),
        "rope_parameters": {
            _FULL: {"rope_type": "proportional", "rope_theta": theta},
            _SLIDING: {"rope_type": "default", "rope_theta": local},
        },
        **{name: 0 for name, _ in _PARTS.values()},
    }


def _head_dim(metadata: ModelMetadata, kind: str) -> int:
    """Return the width of a head of layers of a kind. Raises CheckpointError if keys, values or rotation differ."""
    ending = "_swa" if kind == _SLIDING else ""
    names = (f"attention.key_length{ending}", f"attention.value_length{ending}", f"rope.dimension_count{ending}")
    width = metadata.integer(names[0])
    for name in names[1:]:
        if (other := metadata.count(name)) not in (0, width):
            raise metadata.error(name, f"must be {width}, got {other}")
    return width


def adapt_gemma4_tensors(path: str, tensors: dict[str, CheckpointTensor], config: dict[str, Any]) -> None:
    """Remove the rotary factors from `tensors`, by GGUF name, and complete `config` with what follows from tensors.

    Raises CheckpointError.
    """
    kinds = config["layer_types"]
    full = [i for i, kind in enumerate(kinds) if kind == _FULL]
    config["attention_k_eq_v"] = not any(f"blk.{i}.attn_v.weight" in tensors for i in full)
    stored = tensors.pop(FACTORS_TENSOR, None)
    if stored is None:
        raise CheckpointError(f"{path}: tensor {FACTORS_TENSOR!r} is missing")
    factors = stored.decode(torch.float32).numpy().reshape(-1)
    width = config["per_layer_config"][str(full[0])]["head_dim"]
    rotated = int((factors == 1).sum())
    if len(factors) != width // 2 or not np.array_equal(factors, rotary_factors(width, rotated)):
        raise CheckpointError(
            f"{path}: tensor {FACTORS_TENSOR!r} must hold {width // 2} numbers: first 1, then {_NOT_ROTATED:g}"
        )
    config["rope_parameters"][_FULL]["partial_rotary_factor"] = 2 * rotated / width


def rotary_factors(head_dim: int, rotated: int) -> Floats:
    """Return the divisors of the rotary frequencies of a head, [head_dim / 2], of which `rotated` are 1."""
    factors = np.full(head_dim // 2, _NOT_ROTATED, np.float32)
    factors[:rotated] = 1
    return factors


def gemma4_metadata(prefix: str, config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return GGUF metadata for a config of transformers: see `gemma4_config`.

    Raises CheckpointError for what GGUF cannot express.
    """
    heads = _heads(config, source)
    kinds, ropes = config["layer_types"], config.get("rope_parameters")
    if not isinstance(ropes, Mapping) or _FULL not in ropes:
        raise CheckpointError(f"{source}: config key rope_parameters must have those of {_FULL}")
    for name, what in _PARTS.values():
        if config.get(name):
            raise CheckpointError(f"{source}: a Gemma 4 with {what} is not written to GGUF ({name} is {config[name]})")
    types = {kind: ropes[kind].get("rope_type") for kind in {*kinds}}
    if types.get(_FULL) != "proportional" or types.get(_SLIDING, "default") != "default":
        raise CheckpointError(f"{source}: rope types {types} cannot be written to GGUF's {prefix}")
    if ropes[_FULL].get("factor", 1.0) != 1.0:
        raise CheckpointError(f"{source}: rope factor {ropes[_FULL]['factor']!r} cannot be written to GGUF's {prefix}")
    metadata: dict[str, Any] = {
        f"{prefix}.{_PATTERN}": [kind == _SLIDING for kind in kinds],
        f"{prefix}.{_KV_HEADS}": [kv_heads for kv_heads, _ in heads],
        f"{prefix}.rope.freq_base": float(ropes[_FULL]["rope_theta"]),
        f"{prefix}.rope.freq_base_swa": float(ropes.get(_SLIDING, ropes[_FULL])["rope_theta"]),
        **{f"{prefix}.{key}": 0 for key in _PARTS},
    }
    for kind, ending in ((_FULL, ""), (_SLIDING, "_swa")):
        widths = {width for (_, width), found in zip(heads, kinds, strict=True) if found == kind}
        widths = widths or {config["head_dim"]}
        if len(widths) != 1:
            raise CheckpointError(f"{source}: layers of {kind} have heads of {sorted(widths)}, GGUF has one width")
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            metadata[f"{prefix}.{key}{ending}"] = next(iter(widths))
    return metadata


def gemma4_factors(config: Mapping[str, Any], source: str) -> Floats:
    """Return the rotary factors of the layers without a window, [head_dim / 2]. Raises CheckpointError."""
    heads = _heads(config, source)
    width = heads[config["layer_types"].index(_FULL)][1]
    part = config["rope_parameters"][_FULL].get("partial_rotary_factor", 1.0)
    return rotary_factors(width, int(part * width // 2))


def _heads(config: Mapping[str, Any], source: str) -> list[tuple[int, int]]:
    """Return the number and the size of the key/value heads of each layer, as transformers derives them."""
    kinds = config.get("layer_types") or ()
    if len(kinds) != config["num_hidden_layers"] or _FULL not in kinds:
        raise CheckpointError(f"{source}: config key layer_types must name the kind of each layer")
    if (by_layer := config.get("per_layer_config")) is None:
        full: dict[str, Any] = {"head_dim": config.get("global_head_dim", 512)}
        if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
            full["num_key_value_heads"] = config["num_global_key_value_heads"]
        by_layer = {str(i): full for i, kind in enumerate(kinds) if kind == _FULL}
    layers = [{**config, **by_layer.get(str(i), {})} for i in range(len(kinds))]
    return [(int(layer["num_key_value_heads"]), int(layer["head_dim"])) for layer in layers]
