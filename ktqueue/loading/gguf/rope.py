"""Rotary position parameters: transformers' `rope_parameters` and the GGUF keys after `{architecture}.rope.`."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.gguf.header import metadata_number
from ktqueue.loading.weight_formats import Floats

FACTORS_TENSOR = "rope_freqs.weight"  # [head_dim / 2]
_ROPE_THETA = 10_000.0  # where the file states none (llama.cpp's default)
_BETAS = {"beta_fast": ("scaling.yarn_beta_fast", 32.0), "beta_slow": ("scaling.yarn_beta_slow", 1.0)}
_FACTORS = ("scaling.attn_factor", "scaling.yarn_attn_factor")  # 1 does nothing
_EXTRAPOLATION = "scaling.yarn_ext_factor"
# The values of that key with which it does nothing, by type; -1: as the reader likes, which is one of the others
# (llama.cpp).
_HARMLESS = {"none": (-1.0, 0.0, 1.0), "linear": (-1.0, 0.0), "yarn": (-1.0, 1.0)}
_LOG_MULTIPLIER = "scaling.yarn_log_multiplier"  # of latent attention: 0.1 * mscale_all_dim, and mscale is the same


def rope_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config's rotary parameters, however old its spelling; `rope_type` and `rope_theta` are always there."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    return {
        **rope,
        "rope_type": kind,
        "rope_theta": float(rope.get("rope_theta", config.get("rope_theta", _ROPE_THETA))),
    }


def rope_from_metadata(architecture: str, metadata: Mapping[str, Any], source: str, *, latent: bool) -> dict[str, Any]:
    """`latent`: the model has multi-head latent attention, whose yarn has more parameters. Raises CheckpointError."""
    prefix = f"{architecture}.rope."
    theta = metadata_number(metadata.get(prefix + "freq_base", _ROPE_THETA), float, prefix + "freq_base", source)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = metadata.get(prefix + "scaling.type", "none")
    if kind not in (*_HARMLESS,):  # it may be of any type
        raise CheckpointError(
            f"{source}: {prefix}scaling.type {kind!r} is not supported; known: {', '.join(_HARMLESS)}"
        )
    for name, harmless in (*((name, (1.0,)) for name in _FACTORS), (_EXTRAPOLATION, _HARMLESS[kind])):
        if prefix + name in metadata and metadata[prefix + name] not in harmless:
            raise CheckpointError(f"{source}: {prefix}{name} {metadata[prefix + name]!r} is not supported")
    if kind != "none":
        rope["rope_type"] = kind
        rope["factor"] = metadata_number(
            metadata.get(prefix + "scaling.factor"), float, prefix + "scaling.factor", source
        )
        if kind == "yarn":
            key = prefix + "scaling.original_context_length"
            rope["original_max_position_embeddings"] = metadata_number(metadata.get(key), int, key, source)
            rope |= {
                name: metadata_number(metadata.get(prefix + beta, default), float, prefix + beta, source)
                for name, (beta, default) in _BETAS.items()
            }
            if latent and metadata.get(key := prefix + _LOG_MULTIPLIER):
                # Stored as a float32: six digits are what a config has.
                scale = round(float(metadata_number(metadata[key], float, key, source)) / 0.1, 6)
                rope |= {"mscale": scale, "mscale_all_dim": scale}
    return rope


def rope_to_metadata(
    architecture: str, config: Mapping[str, Any], source: str, *, latent: bool, factors: bool
) -> dict[str, Any]:
    """`factors`: divisors of frequencies go into a tensor of their own. Raises CheckpointError for what GGUF cannot
    say."""
    prefix = f"{architecture}.rope."
    rope = rope_of_config(config)
    kind = rope["rope_type"]
    metadata: dict[str, Any] = {prefix + "freq_base": rope["rope_theta"]}
    if kind in ("linear", "yarn"):
        metadata[prefix + "scaling.type"] = kind
        metadata[prefix + "scaling.factor"] = float(rope["factor"])
        if kind == "yarn":
            original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
            metadata[prefix + "scaling.original_context_length"] = int(original)
            metadata |= _yarn_keys(prefix, rope, source, latent=latent)
    elif kind != "default" and not (kind == "llama3" and factors):
        raise CheckpointError(f"{source}: rope_type {kind!r} cannot be written to GGUF; known: default, linear, yarn")
    return metadata


def _yarn_keys(prefix: str, rope: Mapping[str, Any], source: str, *, latent: bool) -> dict[str, Any]:
    found = {prefix + key: float(rope.get(name) or default) for name, (key, default) in _BETAS.items()}
    if rope.get("attention_factor") is not None:
        raise CheckpointError(f"{source}: rope attention_factor cannot be written to GGUF")
    if not rope.get("truncate", True):
        raise CheckpointError(f"{source}: rope truncate {rope['truncate']!r} cannot be written to GGUF")
    mscale, of_all = rope.get("mscale") or 0.0, rope.get("mscale_all_dim") or 0.0
    if latent and mscale != of_all:
        raise CheckpointError(
            f"{source}: rope mscale {rope.get('mscale')!r} and mscale_all_dim {of_all!r} differ; GGUF has one number"
        )
    if not latent and mscale and of_all:
        raise CheckpointError(f"{source}: rope mscale {mscale!r}, mscale_all_dim {of_all!r} cannot be written to GGUF")
    return found | ({prefix + _LOG_MULTIPLIER: 0.1 * float(of_all)} if latent and of_all else {})


def llama3_factors(rope: Mapping[str, Any], head_dim: int, source: str) -> Floats:
    """The divisors, [head_dim / 2], of `rope_type` llama3. Formula: Meta's Llama 3.1 reference.

    Frequencies with many periods in the original context stay, those with few are divided by `factor`, between the two
    bounds the frequency goes from one to the other in proportion. Raises CheckpointError.
    """
    try:
        factor, low, high, theta, context = (
            float(rope[key])
            for key in (
                "factor",
                "low_freq_factor",
                "high_freq_factor",
                "rope_theta",
                "original_max_position_embeddings",
            )
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: rope_type llama3 lacks a number: {error}") from error
    if not (factor > 0 and theta > 0 and high > low):
        raise CheckpointError(
            f"{source}: rope_type llama3 needs factor > 0, rope_theta > 0 and high_freq_factor > low_freq_factor"
        )
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    periods = context * frequencies / (2 * math.pi)
    kept = np.clip((periods - low) / (high - low), 0.0, 1.0)
    factors: Floats = (1.0 / ((1.0 - kept) / factor + kept)).astype(np.float32)
    return factors


def longrope_parameters(rope: Mapping[str, Any], factors: Floats, positions: int) -> dict[str, Any]:
    """transformers' `rope_parameters` for plain `rope` whose frequencies are divided by `factors`.

    `positions`: the longest context, so that one list of the two that longrope has serves all lengths.
    """
    listed = [float(factor) for factor in factors]
    return {
        **rope,
        "rope_type": "longrope",
        "short_factor": listed,
        "long_factor": listed,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": positions,
    }
