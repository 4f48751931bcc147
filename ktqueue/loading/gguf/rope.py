"""Rotary position parameters: transformers' `rope_parameters`, and GGUF keys that begin with `{architecture}.rope.`.

Some models divide each rotary frequency by a factor of its own. transformers computes the factors from four parameters
(`rope_type` llama3). A GGUF file holds them as a tensor, which transformers can express as `longrope` with one list for
all lengths. Models with longrope have two tensors, and the factor of cosines and sines as metadata.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from ktqueue.core.errors import CheckpointError
from ktqueue.core.short_repr import short_repr
from ktqueue.loading.gguf.header import ModelMetadata
from ktqueue.loading.weight_formats import Floats

FACTORS_TENSOR = "rope_freqs.weight"  # [head_dim / 2]
LIST_TENSORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}  # [rotary / 2]
_ROPE_THETA = 10_000.0  # if the file has none (llama.cpp's default)
_BETAS = {"beta_fast": ("rope.scaling.yarn_beta_fast", 32.0), "beta_slow": ("rope.scaling.yarn_beta_slow", 1.0)}
_ATTENTION_FACTOR, _ORIGINAL = "rope.scaling.attn_factor", "rope.scaling.original_context_length"
_FACTOR = "rope.scaling.factor"
_FACTORS = (_ATTENTION_FACTOR, "rope.scaling.yarn_attn_factor")  # 1 has no effect
_EXTRAPOLATION = "rope.scaling.yarn_ext_factor"
# Values of that key that have no effect, by scaling type. -1 lets the reader choose one of the others (llama.cpp).
_HARMLESS = {"none": (-1.0, 0.0, 1.0), "linear": (-1.0, 0.0), "yarn": (-1.0, 1.0)}
# Of latent attention: 0.1 * mscale_all_dim, and mscale is equal to it. Of Ministral 3: mscale_all_dim, and mscale is 1.
_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"


def rope_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's rotary parameters, also from the older spellings of the keys.

    The result always has `rope_type` and `rope_theta`. Type `dynamic` is the default one up to max_position_embeddings,
    with Hunyuan's `alpha` of a larger theta (transformers' modeling_hunyuan_v1_moe.py).
    """
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or _ROPE_THETA)
    if rope_type == "dynamic":
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        alpha = float(rope.get("alpha") or 1.0)
        return {"rope_type": "default", "rope_theta": theta * alpha ** (head_dim / (head_dim - 2))}
    return {**rope, "rope_type": rope_type, "rope_theta": theta}


def rope_from_metadata(
    metadata: ModelMetadata, *, latent: bool, lists: bool = False, yarn_scale: bool = False
) -> dict[str, Any]:
    """Return `rope_parameters` from GGUF metadata. Raises CheckpointError.

    `latent`: the model has multi-head latent attention, whose yarn has more parameters. `lists`: see
    parameters_of_lists, which gives the metadata of lists a meaning. `yarn_scale`: see GgufLayout.
    """
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base", _ROPE_THETA)}
    is_scaled = metadata.get(_FACTOR, 0) not in (0, 1)
    scaling_type = metadata.get("rope.scaling.type", "linear" if is_scaled else "none")  # as in llama.cpp
    if scaling_type not in (*_HARMLESS,):  # a tuple: the value may be of an unhashable type
        raise metadata.error(
            "rope.scaling.type", f"{short_repr(scaling_type)} is not supported; known: {', '.join(_HARMLESS)}"
        )
    factors = _FACTORS[1:] if lists else _FACTORS
    for name, no_effect in (*((name, (1.0,)) for name in factors), (_EXTRAPOLATION, _HARMLESS[scaling_type])):
        if name in metadata and (stated := metadata.get(name)) not in no_effect:
            raise metadata.error(name, f"{short_repr(stated)} is not supported")
    if scaling_type != "none":
        rope["rope_type"] = scaling_type
        rope["factor"] = metadata.number(_FACTOR)
        if scaling_type == "yarn":
            rope["original_max_position_embeddings"] = metadata.integer(_ORIGINAL)
            rope |= {name: metadata.number(beta, default) for name, (beta, default) in _BETAS.items()}
            if (latent or yarn_scale) and metadata.get(_LOG_MULTIPLIER):
                # The file has a float32; configs have at most six digits.
                scale = round(metadata.number(_LOG_MULTIPLIER) / (0.1 if latent else 1), 6)
                rope |= {"mscale": scale if latent else 1.0, "mscale_all_dim": scale}
    return rope


def rope_to_metadata(
    architecture: str,
    config: Mapping[str, Any],
    source: str,
    *,
    latent: bool,
    factors: bool,
    lists: bool = False,
    yarn_scale: bool = False,
    implied: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return rotary parameters as GGUF metadata. Raises CheckpointError for parameters that GGUF cannot express.

    `factors`: the factors of `rope_type` llama3 are written as a tensor, so that type is accepted. `lists`: so are the
    two lists of longrope. `yarn_scale`: see GgufLayout. `implied`: parameters that the architecture fixes.
    """
    prefix = f"{architecture}."
    rope = rope_of_config(config)
    rope_type = rope["rope_type"]
    for name, value in implied.items():
        if rope.get(name, value) != value:
            raise CheckpointError(f"{source}: rope {name} is {rope[name]!r}; GGUF's {architecture} implies {value!r}")
    rope = {name: value for name, value in rope.items() if name not in implied}
    metadata: dict[str, Any] = {prefix + "rope.freq_base": rope["rope_theta"]}
    if rope_type in ("linear", "yarn"):
        metadata[prefix + "rope.scaling.type"] = rope_type
        metadata[prefix + _FACTOR] = float(rope["factor"])
        if rope_type == "yarn":
            original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
            metadata[prefix + _ORIGINAL] = int(original)
            metadata |= _yarn_keys(prefix, rope, source, latent=latent, yarn_scale=yarn_scale)
    elif rope_type == "longrope" and lists:
        metadata[prefix + _ORIGINAL] = _original_length(rope, config, source)
        metadata[prefix + _ATTENTION_FACTOR] = _attention_factor(rope, config, source)
    elif rope_type != "default" and not (rope_type == "llama3" and factors):
        raise CheckpointError(
            f"{source}: rope_type {rope_type!r} cannot be written to GGUF; known: default, linear, yarn"
        )
    return metadata


def _original_length(rope: Mapping[str, Any], config: Mapping[str, Any], source: str) -> int:
    stated = rope.get(name := "original_max_position_embeddings") or config.get(name)
    if not stated:
        raise CheckpointError(f"{source}: longrope needs {name}")
    return int(stated)


def _attention_factor(rope: Mapping[str, Any], config: Mapping[str, Any], source: str) -> float:
    """Return the factor of cosines and sines with longrope. Formula: transformers' modeling_rope_utils.py. Phi-3.5-MoE
    states it. Raises CheckpointError if it depends on the length, for which GGUF has no place."""
    if "short_mscale" in rope or "long_mscale" in rope:
        short, long = rope.get("short_mscale"), rope.get("long_mscale")
        if short != long or not short:
            raise CheckpointError(
                f"{source}: rope short_mscale {short!r} and long_mscale {long!r} must be equal, because GGUF has one "
                "number for both"
            )
        return float(short)
    if stated := rope.get("attention_factor"):
        return float(stated)
    original = _original_length(rope, config, source)
    factor = float(rope.get("factor") or config["max_position_embeddings"] / original)
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def scale_of_lists(metadata: ModelMetadata) -> float:
    """Return the factor of cosines and sines of a file with two lists. Raises CheckpointError."""
    return metadata.number(_ATTENTION_FACTOR, 1.0)


def parameters_of_lists(
    metadata: ModelMetadata, rope: Mapping[str, Any], lists: Mapping[str, Floats]
) -> dict[str, Any]:
    """Return `rope_parameters` of longrope, without a scale, from plain `rope` and the two tensors of LIST_TENSORS, by
    parameter. Raises CheckpointError.
    """
    if rope["rope_type"] != "default":
        raise CheckpointError(
            f"{metadata.source}: tensor {LIST_TENSORS['long_factor']!r} and rope.scaling.type {rope['rope_type']!r} "
            "cannot be combined"
        )
    original, context = metadata.integer(_ORIGINAL), metadata.integer("context_length")
    return {
        **rope,
        "rope_type": "longrope",
        **{name: [float(factor) for factor in factors] for name, factors in lists.items()},
        "original_max_position_embeddings": original,
        "factor": context / original,
    }


def _yarn_keys(prefix: str, rope: Mapping[str, Any], source: str, *, latent: bool, yarn_scale: bool) -> dict[str, Any]:
    metadata = {prefix + key: float(rope.get(name) or default) for name, (key, default) in _BETAS.items()}
    if rope.get("attention_factor") is not None:
        raise CheckpointError(f"{source}: rope attention_factor cannot be written to GGUF")
    if not rope.get("truncate", True):
        raise CheckpointError(f"{source}: rope truncate {rope['truncate']!r} cannot be written to GGUF")
    mscale, mscale_all_dim = rope.get("mscale") or 0.0, rope.get("mscale_all_dim") or 0.0
    if latent and mscale != mscale_all_dim:
        raise CheckpointError(
            f"{source}: rope mscale {rope.get('mscale')!r} and mscale_all_dim {mscale_all_dim!r} differ, but GGUF has "
            "one number for both"
        )
    if yarn_scale and mscale == 1 and mscale_all_dim:
        return metadata | {prefix + _LOG_MULTIPLIER: float(mscale_all_dim)}
    if not latent and mscale and mscale_all_dim:
        raise CheckpointError(
            f"{source}: rope mscale {mscale!r}, mscale_all_dim {mscale_all_dim!r} cannot be written to GGUF"
        )
    return metadata | ({prefix + _LOG_MULTIPLIER: 0.1 * float(mscale_all_dim)} if latent and mscale_all_dim else {})


def llama3_factors(rope: Mapping[str, Any], head_dim: int, source: str) -> Floats:
    """Return the factors, [head_dim / 2], of `rope_type` llama3. Formula: Meta's Llama 3.1 reference.

    Frequencies with many periods in the original context are kept, those with few are divided by `factor`. Between the
    two bounds, which may be equal (Llama 4), the frequency is interpolated linearly. Raises CheckpointError.
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
        raise CheckpointError(f"{source}: rope_type llama3: a number is missing: {error}") from error
    if not (factor > 0 and theta > 0 and high >= low):
        raise CheckpointError(
            f"{source}: rope_type llama3 needs factor > 0, rope_theta > 0 and high_freq_factor >= low_freq_factor"
        )
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    periods = context * frequencies / (2 * math.pi)
    kept = np.clip((periods - low) / (high - low), 0.0, 1.0) if high > low else (periods >= low).astype(np.float64)
    factors: Floats = (1.0 / ((1.0 - kept) / factor + kept)).astype(np.float32)
    return factors


def longrope_parameters(rope: Mapping[str, Any], factors: Floats, positions: int) -> dict[str, Any]:
    """Return `rope_parameters` that divide the frequencies of plain `rope` by `factors`.

    `positions` is the longest context, so that the short list of longrope serves all lengths.
    """
    factor_list = [float(factor) for factor in factors]
    return {
        **rope,
        "rope_type": "longrope",
        "short_factor": factor_list,
        "long_factor": factor_list,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": positions,
    }
