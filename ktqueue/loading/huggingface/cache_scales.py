"""The scales of a float8 cache that a quantised folder states for each layer, by the names of its method.

compressed-tensors: `self_attn.k_scale`; ModelOpt: `self_attn.k_proj.k_scale`; Quark: `self_attn.k_proj.output_scale`;
the same with v. An older name for both is `self_attn.kv_scale`. A number x is stored as x / scale.
"""

import math
import re
from collections.abc import Mapping

import torch

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.checkpoint import CheckpointTensor
from ktqueue.operators.kv_cache import CacheScale

_STATED = re.compile(r"(.+)\.self_attn\.(?:(?:attn\.|[kv]_proj\.)?(kv|k|v)_scale|(k|v)_proj\.output_scale)")
_FLOATS = ("F32", "F16", "BF16")


def stated_scales(source: str, tensors: Mapping[str, CheckpointTensor]) -> dict[str, CacheScale]:
    """Return what the tensors state, by the name of the layer's module. A key without a value, or the reverse, states
    nothing. Scales of heads count as their largest.

    source: the beginning of messages. Raises CheckpointError for a scale that is no positive number.
    """
    found: dict[str, dict[str, float]] = {}
    for name, tensor in tensors.items():
        if (match := _STATED.fullmatch(name)) is None:
            continue
        layer, *parts = match.groups()
        largest = float(tensor.decode(torch.float32).max()) if tensor.quant in _FLOATS else math.nan
        if not 0 < largest < math.inf:
            raise CheckpointError(f"{source}: tensor {name!r} must be a positive number: it scales keys or values")
        for part in parts[0] or parts[1]:
            found.setdefault(layer, {})[part] = largest
    return {layer: CacheScale(scale["k"], scale["v"]) for layer, scale in found.items() if scale.keys() == {"k", "v"}}
