"""Linear attention in GGUF files (architectures qwen3next, qwen35 and qwen35moe): metadata keys and tensors, both ways.

Key names and meanings are those of llama.cpp's conversion/qwen.py. Files store exponentials of A_log with the sign of
the exponent, norms with the 1 that transformers adds, and convolutions without their middle dimension. They split the
projection of Qwen3-Next in two. Files of qwen35 and qwen35moe have value heads in turns: the first of each key head,
then the second of each, and so on. They stay so when they are read, and the operators are told.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ktqueue.core.errors import CheckpointError
from ktqueue.families.family import GgufLayout
from ktqueue.loading.checkpoint import CheckpointTensor
from ktqueue.loading.gguf.header import ModelMetadata
from ktqueue.loading.huggingface.config_check import LINEAR_ATTENTION
from ktqueue.loading.weight_formats import Floats
from ktqueue.operators.linear_attention import TILED, rows_of_parts

CONVOLUTION = "linear_attn.conv1d.weight"
Change = Callable[[Floats], Floats]
_SECTIONS = (11, 11, 10)  # pairs of columns of a head that a position in time, height and width turns, if not stated
_INTERVAL = 4  # every fourth layer has keys and values, if a file does not say
_LIST = "attention.recurrent_layers"
"""Whether each layer has linear attention. Newer files list it, and may state an interval that is not theirs."""
_NORM = re.compile(
    r"(output_norm|blk\.\d+\.((attn|post_attention|attn_q|attn_k|nextn\.shared_head)_norm|nextn\.[eh]norm))\.weight"
)
_DECAY = re.compile(r"blk\.\d+\.ssm_a")
_CONVOLUTION = re.compile(r"blk\.\d+\.ssm_conv1d\.weight")
_BOTH_SCALARS = re.compile(r"(blk\.\d+)\.ssm_ba\.weight")


def linear_config(layout: GgufLayout, metadata: ModelMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config keys that only these families have. `config` holds the keys that were read before.

    Raises CheckpointError.
    """
    inner, heads = metadata.integer("ssm.inner_size"), int(config["linear_num_value_heads"])
    if inner % heads:
        raise metadata.error("ssm.inner_size", f"{inner} must be a multiple of the {heads} value heads")
    layers = int(config["num_hidden_layers"])
    if _LIST in metadata:  # it has precedence, as in llama.cpp
        are_linear = metadata.flags(_LIST, layers)
    else:
        interval = metadata.count("full_attention_interval") or _INTERVAL
        if interval > layers:
            raise metadata.error("full_attention_interval", f"{interval} is above the {layers} layers")
        are_linear = [(i + 1) % interval != 0 for i in range(layers)]
    kinds = [LINEAR_ATTENTION if is_linear else "full_attention" for is_linear in are_linear]
    return {"linear_value_head_dim": inner // heads, "layer_types": kinds, TILED: layout.tiled}


def linear_metadata(layout: GgufLayout, config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the metadata that `linear_config` reads. Raises CheckpointError for what it cannot say."""
    prefix = layout.architecture
    kinds = config.get("layer_types") or [LINEAR_ATTENTION] * (_INTERVAL - 1) + ["full_attention"]
    interval = kinds.index("full_attention") + 1 if "full_attention" in kinds else 0
    if not interval or any((kind != LINEAR_ATTENTION) != ((i + 1) % interval == 0) for i, kind in enumerate(kinds)):
        raise CheckpointError(f"{source}: GGUF's {prefix} cannot express layer_types {[*kinds]}")
    metadata: dict[str, Any] = {
        f"{prefix}.ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
        f"{prefix}.full_attention_interval": interval,
    }
    if layout.tiled:  # llama.cpp needs it, although the positions of text have no sections
        sections = (config.get("rope_parameters") or {}).get("mrope_section") or _SECTIONS
        metadata[f"{prefix}.rope.dimension_sections"] = [*sections, 0, 0, 0, 0][:4]
    return metadata


def file_parts(
    layout: GgufLayout, name: str, shape: tuple[int, ...], config: Mapping[str, Any]
) -> list[tuple[str, tuple[int, ...], Change]]:
    """Return what a file holds of a transformers tensor: parts with their transformers name and shape, and a function
    that computes each from the float32 values. All other tensors are one part, as they are."""
    module, is_linear, leaf = name.rpartition("linear_attn.")
    if not is_linear:
        added = np.float32(1 if name.endswith("norm.weight") else 0)
        return [(name, shape, lambda values: values + added if added else values)]
    keys = int(config["linear_num_key_heads"])
    values_of_key = int(config["linear_num_value_heads"]) // keys
    key_dim, value_dim = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"])
    if leaf == "in_proj_qkvz.weight":
        *mixed, gate = rows_of_parts(keys, (key_dim, key_dim, *(values_of_key * value_dim,) * 2))
        rows = {"in_proj_qkv.weight": np.concatenate(mixed), "in_proj_z.weight": gate}
        return [(f"{module}linear_attn.{part}", (len(taken), shape[1]), _take(taken)) for part, taken in rows.items()]

    def in_turns(values: Floats, width: int, first: int = 0) -> Floats:
        """Order the value heads along the first axis, of which each has `width` numbers, from the index `first` on."""
        if not layout.tiled:
            return values
        heads = values[first:].reshape(keys, values_of_key, width, -1).swapaxes(0, 1)
        return np.concatenate([values[:first], heads.reshape(values[first:].shape)])

    changes: dict[str, Change] = {
        "A_log": lambda values: in_turns(-np.exp(values), 1),
        "dt_bias": lambda values: in_turns(values, 1),
        "in_proj_a.weight": lambda values: in_turns(values, 1),
        "in_proj_b.weight": lambda values: in_turns(values, 1),
        "in_proj_z.weight": lambda values: in_turns(values, value_dim),
        "in_proj_qkv.weight": lambda values: in_turns(values, value_dim, 2 * keys * key_dim),
        "conv1d.weight": lambda values: in_turns(values.reshape(len(values), -1), value_dim, 2 * keys * key_dim),
        "out_proj.weight": lambda values: np.ascontiguousarray(in_turns(values.T, value_dim).T),
    }
    return [
        (name, (shape[0], shape[-1]) if leaf == "conv1d.weight" else shape, changes.get(leaf, lambda values: values))
    ]


def column_order(layout: GgufLayout, name: str, columns: int, config: Mapping[str, Any]) -> npt.NDArray[np.int64]:
    """Return which of a tensor's columns is each column of the file: see `file_parts`."""
    order = np.arange(columns)
    if not name.endswith("linear_attn.out_proj.weight"):
        return order
    ((_, _, change),) = file_parts(layout, name, (1, columns), config)
    stored: npt.NDArray[np.int64] = change(order[None].astype(np.float32))[0].astype(np.int64)
    return stored


def _take(rows: npt.NDArray[np.int64]) -> Change:
    return lambda values: values[rows]


def adapt_linear_tensors(path: str, tensors: dict[str, CheckpointTensor], config: Mapping[str, Any]) -> None:
    """Change `tensors`, by GGUF name, to what transformers has. Raises CheckpointError that names a wrong tensor."""
    for name, tensor in [*tensors.items()]:
        if _NORM.fullmatch(name):
            tensors[name] = tensor.computed(lambda values: values - np.float32(1))
        elif _DECAY.fullmatch(name):
            if (tensor.decode(torch.float32) >= 0).any():
                raise CheckpointError(f"{path}: tensor {name!r} must hold numbers below 0")
            tensors[name] = tensor.computed(lambda values: np.log(-values))
        elif _CONVOLUTION.fullmatch(name):
            if len(tensor.shape) != 2:
                raise CheckpointError(f"{path}: tensor {name!r} must be a matrix, it is {list(tensor.shape)}")
            tensors[name] = replace(tensor, shape=(tensor.shape[0], 1, tensor.shape[1]))
        elif match := _BOTH_SCALARS.fullmatch(name):
            del tensors[name]
            for part, rows in _split_scalars(path, tensor, config).items():
                tensors[f"{match[1]}.ssm_{part}.weight"] = rows


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
