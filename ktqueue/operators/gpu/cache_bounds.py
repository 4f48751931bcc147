"""How large keys and values can become, by a model's weights alone, and the scales of a float8 cache that follow.

A norm returns at most the root of its columns, times its factors. By the inequality of Cauchy and Schwarz, no text
makes larger keys and values, so with these scales a cache never saturates, but for the rounding of activations. All
workers find the same scales, because they are powers of two and do not depend on texts. See docs/adr/0070.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from ktqueue.operators import native
from ktqueue.operators.decoder_facts import DecoderFacts
from ktqueue.operators.decoder_weights import norm_weights
from ktqueue.operators.kv_cache import UNSCALED, CacheScale
from ktqueue.operators.latent_shape import LatentShape
from ktqueue.operators.layer_facts import LayerFacts
from ktqueue.operators.packed import ModuleWeights

_MOST = torch.finfo(torch.float8_e4m3fn).max
_ROOM = 5
"""Powers of two by which the bound may stay below the largest number of float8, so that most scales are 1."""
_WEIGHTS_AT_ONCE = 1 << 22


class CacheBound(NamedTuple):
    """The largest absolute key and value of a layer. layer: the name of its module."""

    layer: str
    key: float
    value: float


def cache_bounds(facts: DecoderFacts, weights: ModuleWeights) -> list[CacheBound]:
    """Return the bounds of each layer with keys and values. Rotary tables may multiply keys further. In a layer with
    latents, both bounds are those of its keys."""
    bounds = []
    for layer in facts.layers:
        if layer.linear is not None:
            continue
        if facts.latent is not None:
            key = value = _latent_bound(layer, facts, facts.latent, weights)
        else:
            key, value = _key_bound(layer, facts, weights), _value_bound(layer, facts, weights)
        bounds.append(CacheBound(layer.name, key, value))
    return bounds


def cache_scales(
    bounds: Iterable[CacheBound], stated: Mapping[str, CacheScale], *, latent: bool
) -> tuple[CacheScale, ...]:
    """Return the scales of each layer with keys and values, or nothing if all are 1.

    stated: what the checkpoint says, by the name of the layer. It is rounded up to powers of two. latent: layers have
    one tensor of keys and values.
    """
    scales = []
    for layer, key, value in bounds:
        scale = CacheScale(_scale(key), _scale(value))
        if (found := stated.get(layer)) is not None:
            scale = CacheScale(*(2.0 ** math.ceil(math.log2(number)) for number in found))
        scales.append(CacheScale(scale.key, scale.key) if latent else scale)
    return tuple(scales) if {*scales} != {UNSCALED} else ()


def _scale(bound: float) -> float:
    """Return the power of two nearest to 1 with which numbers up to `bound` neither saturate nor become too small."""
    if not 0 < bound < math.inf:
        return 1.0
    lowest = math.ceil(math.log2(bound / _MOST))
    return float(2.0 ** min(max(lowest, 0), lowest + _ROOM))


def _key_bound(layer: LayerFacts, facts: DecoderFacts, weights: ModuleWeights) -> float:
    module = f"{layer.name}.self_attn"
    if layer.unit_norms:
        return math.sqrt(layer.head_dim)
    if facts.qk_norm:
        factors = norm_weights(weights, facts, f"{module}.{facts.qk_norm[1]}")
        bound = math.sqrt(len(factors)) * float(abs(factors).max())
    else:
        bound = _projected(f"{module}.k_proj", layer, facts, weights)
    if facts.clip:
        bound = min(bound, facts.clip)
    # Without a norm over a whole pair, both of its numbers may be that large.
    return bound * math.sqrt(2) if layer.rotary_pairs and (facts.clip or not facts.qk_norm) else bound


def _value_bound(layer: LayerFacts, facts: DecoderFacts, weights: ModuleWeights) -> float:
    if layer.value_norm:
        return math.sqrt(layer.head_dim)
    part = "k_proj" if layer.value_is_key else "v_proj"
    bound = _projected(f"{layer.name}.self_attn.{part}", layer, facts, weights)
    return min(bound, facts.clip) if facts.clip else bound


def _latent_bound(layer: LayerFacts, facts: DecoderFacts, shape: LatentShape, weights: ModuleWeights) -> float:
    module = f"{layer.name}.self_attn"
    factors = weights.vector(f"{module}.kv_a_layernorm.weight")
    rotary = _projected(f"{module}.kv_a_proj_with_mqa", layer, facts, weights, first=shape.latent)
    return max(math.sqrt(len(factors)) * float(abs(factors).max()), rotary * math.sqrt(2))


def _projected(name: str, layer: LayerFacts, facts: DecoderFacts, weights: ModuleWeights, first: int = 0) -> float:
    """Return the bound of what a linear module makes of the layer's norm, in its rows from `first` on."""
    matrix = weights.matrix(f"{name}.weight")
    norm = torch.from_numpy(norm_weights(weights, facts, f"{layer.name}.input_layernorm"))
    factors, *biases = norm.view(-1, matrix.columns)
    row_bytes = matrix.data.size // matrix.rows
    bias = torch.zeros(matrix.rows)
    if weights.has(f"{name}.bias"):
        bias = torch.from_numpy(weights.vector(f"{name}.bias"))
    step, largest = max(1, _WEIGHTS_AT_ONCE // matrix.columns), 0.0
    for begin in range(first, matrix.rows, step):
        end = min(begin + step, matrix.rows)
        data = matrix.data[begin * row_bytes : end * row_bytes]
        decoded = native.dequantize(matrix.quant, data, (end - begin) * matrix.columns)
        rows = torch.from_numpy(decoded).view(-1, matrix.columns)
        always = bias[begin:end] + (rows @ biases[0] if biases else 0)  # what no input changes
        lengths = (rows.square_() @ factors.square()).sqrt()
        largest = max(largest, float((lengths * math.sqrt(matrix.columns) + always.abs()).max()))
    return largest
