"""Linear attention in GGUF files (architectures qwen3next, qwen35 and qwen35moe): metadata keys and tensors.

Key names and meanings are those of llama.cpp's conversion/qwen.py. Files store exponentials of A_log with the sign of
the exponent, norms with the 1 that transformers adds, and convolutions without their middle dimension. Files of
qwen35 and qwen35moe have value heads in turns: the first of each key head, then the second of each, and so on. They
stay so, and the operators are told.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.checkpoint import CheckpointTensor
from ktqueue.loading.gguf.header import metadata_count, metadata_number
from ktqueue.loading.huggingface.config_check import LINEAR_ATTENTION
from ktqueue.loading.weight_formats import Floats
from ktqueue.operators.linear_attention import TILED, rows_of_parts

TILED_ARCHITECTURES = ("qwen35", "qwen35moe")
_INTERVAL = 4  # every fourth layer has keys and values, if a file does not say
_NORM = re.compile(r"(output_norm|blk\.\d+\.(attn|post_attention|attn_q|attn_k)_norm)\.weight")
_DECAY = re.compile(r"blk\.\d+\.ssm_a")
_CONVOLUTION = re.compile(r"blk\.\d+\.ssm_conv1d\.weight")
_BOTH_SCALARS = re.compile(r"(blk\.\d+)\.ssm_ba\.weight")


def linear_config(prefix: str, metadata: Mapping[str, Any], config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the config keys that only these families have. `config` holds the keys that were read before.

    Raises CheckpointError.
    """
    key, heads = f"{prefix}.ssm.inner_size", int(config["linear_num_value_heads"])
    inner = int(metadata_number(metadata.get(key), int, key, source))
    if inner % heads:
        raise CheckpointError(f"{source}: metadata key {key} {inner} must be a multiple of the {heads} value heads")
    interval = metadata_count(metadata, f"{prefix}.full_attention_interval", source) or _INTERVAL
    layers = int(config["num_hidden_layers"])
    if interval > layers:
        raise CheckpointError(f"{source}: {prefix}.full_attention_interval {interval} is above the {layers} layers")
    kinds = ["full_attention" if (i + 1) % interval == 0 else LINEAR_ATTENTION for i in range(layers)]
    return {"linear_value_head_dim": inner // heads, "layer_types": kinds, TILED: prefix in TILED_ARCHITECTURES}


def linear_metadata(prefix: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return GGUF metadata for a config in which every fourth layer has keys and values: see `linear_config`."""
    return {
        f"{prefix}.ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
        f"{prefix}.full_attention_interval": _INTERVAL,
    }


def adapt_linear_tensors(path: str, tensors: dict[str, CheckpointTensor], config: Mapping[str, Any]) -> None:
    """Change `tensors`, by GGUF name, to what transformers has. Raises CheckpointError that names a wrong tensor."""
    for name, tensor in [*tensors.items()]:
        if _NORM.fullmatch(name):
            tensors[name] = _computed(tensor, lambda values: values - np.float32(1))
        elif _DECAY.fullmatch(name):
            if (tensor.decode(torch.float32) >= 0).any():
                raise CheckpointError(f"{path}: tensor {name!r} must hold numbers below 0")
            tensors[name] = _computed(tensor, lambda values: np.log(-values))
        elif _CONVOLUTION.fullmatch(name):
            if len(tensor.shape) != 2:
                raise CheckpointError(f"{path}: tensor {name!r} must be a matrix, it is {list(tensor.shape)}")
            tensors[name] = replace(tensor, shape=(tensor.shape[0], 1, tensor.shape[1]))
        elif match := _BOTH_SCALARS.fullmatch(name):
            del tensors[name]
            for part, rows in _split_scalars(path, tensor, config).items():
                tensors[f"{match[1]}.ssm_{part}.weight"] = rows


def _computed(tensor: CheckpointTensor, compute: Callable[[Floats], Floats]) -> CheckpointTensor:
    values = compute(tensor.decode(torch.float32).numpy())
    return CheckpointTensor(tensor.name, "F32", tensor.shape, values.reshape(-1).view(np.uint8))


def _split_scalars(path: str, tensor: CheckpointTensor, config: Mapping[str, Any]) -> dict[str, CheckpointTensor]:
    """Split the rates and decays of each key head's value heads into the rates of all, and the decays."""
    keys, values = int(config["linear_num_key_heads"]), int(config["linear_num_value_heads"])
    if len(tensor.shape) != 2 or tensor.shape[0] != 2 * values or values % keys:
        raise CheckpointError(
            f"{path}: tensor {tensor.name!r} is {list(tensor.shape)}, {2 * values} rows for {keys} key heads expected"
        )
    by_row = tensor.data.reshape(tensor.shape[0], -1)
    rows = dict(zip(("beta", "alpha"), rows_of_parts(keys, (values // keys,) * 2), strict=True))
    shape = (values, tensor.shape[1])
    return {part: replace(tensor, shape=shape, stored=by_row[taken].reshape(-1)) for part, taken in rows.items()}
