"""Rotary frequencies that are divided one by one, as Llama 3.1 has them.

transformers computes the divisors from four parameters (`rope_type` llama3); a GGUF file holds them as a tensor, which
transformers can express as `longrope` with one list for all lengths. Knows no files.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.weight_formats import Floats

TENSOR = "rope_freqs.weight"  # [head_dim / 2]


def factors_of(rope: Mapping[str, Any], head_dim: int, source: str) -> Floats:
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


def with_factors(rope: Mapping[str, Any], factors: Floats, positions: int) -> dict[str, Any]:
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
