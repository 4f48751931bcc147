"""Gemma 2 and 3 in GGUF files: metadata keys and tensors.

Key names and what they imply are those of llama.cpp's conversion and of its models gemma2 and gemma3. Files store norms
with the 1 that transformers adds. The scale of queries follows from the size of the model.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ktqueue.core.errors import CheckpointError
from ktqueue.families.family import GemmaLayout
from ktqueue.loading.checkpoint import CheckpointTensor
from ktqueue.loading.gguf.header import ModelMetadata

_NORM = re.compile(r"(output_norm|blk\.\d+\.(attn|post_attention|ffn|post_ffw|attn_q|attn_k)_norm)\.weight")
_FULL, _SLIDING = "full_attention", "sliding_attention"
_PATTERN, _LOCAL_THETA = "attention.sliding_window_pattern", "rope.freq_base_swa"
_DEFAULT_LOCAL_THETA, _DEFAULT_THETA = 10_000.0, 1_000_000.0


def gemma_config(version: GemmaLayout, metadata: ModelMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config keys that only Gemma has. `config` holds the keys that were read before, with flat
    rope_parameters. Raises CheckpointError."""
    layers = int(config["num_hidden_layers"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    kinds = _kinds(version, layers)
    if isinstance(metadata.get(_PATTERN), list):
        kinds = [_SLIDING if value else _FULL for value in metadata.flags(_PATTERN, layers)]
    elif period := metadata.count(_PATTERN):
        kinds = _kinds(replace(version, period=period), layers)
    if not config.get("sliding_window"):
        kinds = [_FULL] * layers
    rope = config["rope_parameters"]
    if version.local_rope:
        theta = metadata.number(_LOCAL_THETA, _DEFAULT_LOCAL_THETA)
        rope = {_FULL: rope, _SLIDING: {"rope_type": "default", "rope_theta": theta}}
    return {
        "head_dim": head_dim,
        "query_pre_attn_scalar": _query_scale(version, {**config, "head_dim": head_dim}),
        "layer_types": kinds,
        "rope_parameters": rope,
    }


def gemma_metadata(version: GemmaLayout, prefix: str, config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return GGUF metadata for a config of transformers: see `gemma_config`.

    Raises CheckpointError for what GGUF cannot express.
    """
    implied: dict[str, Any] = {
        "query_pre_attn_scalar": _query_scale(version, config),
        "layer_types": _kinds(version, int(config["num_hidden_layers"])),
        "sliding_window_pattern": version.period,
        "use_bidirectional_attention": False,
    }
    for name, value in implied.items():
        if (stated := config.get(name)) not in (None, value):
            raise CheckpointError(f"{source}: {name} is {stated!r}; GGUF's {prefix} implies {value!r}")
    for name in ("attn_logit_softcapping", "final_logit_softcapping") if version.capped else ():
        if config.get(name, 1.0) is None:
            raise CheckpointError(f"{source}: {name} is None, but GGUF's {prefix} implies a number")
    return {f"{prefix}.{_LOCAL_THETA}": float(_ropes(config)[_SLIDING]["rope_theta"])} if version.local_rope else {}


def plain_rope(version: GemmaLayout, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config of transformers whose rotary parameters are those of the layers without a window."""
    return {**config, "rope_parameters": _ropes(config)[_FULL]} if version.local_rope else config


def _ropes(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the rotary parameters of both kinds of layers of Gemma 3, also from the older spellings of the keys."""
    ropes = config.get("rope_parameters") or {}
    if _FULL in ropes:
        return {kind: ropes[kind] for kind in (_FULL, _SLIDING)}
    full = {"rope_theta": config.get("rope_theta") or _DEFAULT_THETA, **(config.get("rope_scaling") or ropes)}
    return {_FULL: full, _SLIDING: {"rope_theta": config.get("rope_local_base_freq") or _DEFAULT_LOCAL_THETA}}


def adapt_gemma_tensors(tensors: dict[str, CheckpointTensor]) -> None:
    """Change the norms in `tensors`, by GGUF name, to what transformers has: without the 1."""
    for name, tensor in [*tensors.items()]:
        if _NORM.fullmatch(name):
            tensors[name] = tensor.computed(lambda values: values - np.float32(1))


def _kinds(version: GemmaLayout, layers: int) -> list[str]:
    return [_SLIDING if (i + 1) % version.period else _FULL for i in range(layers)]


def _query_scale(version: GemmaLayout, config: Mapping[str, Any]) -> int:
    """Return query_pre_attn_scalar."""
    if config["num_hidden_layers"] == version.largest:
        return int(config["hidden_size"]) // int(config["num_attention_heads"])
    return int(config["head_dim"])
