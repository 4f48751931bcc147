"""Other layouts of the same weights in GGUF files: fused tensors are split, single experts are collected.

llama.cpp's converter fuses matrices with `--fuse-qkv` and `--fuse-gate-up-exps`. Files of Mixtral from before 2024-04
have a tensor for each expert. Knows no families.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.checkpoint import CheckpointTensor

_FUSED_ATTENTION = re.compile(r"(blk\.\d+)\.attn_qkv\.(weight|bias)")
_FUSED_EXPERTS = re.compile(r"(blk\.\d+)\.ffn_gate_up_exps\.(weight|bias)")
_SINGLE_EXPERT = re.compile(r"blk\.(\d{1,7})\.ffn_(gate|up|down)\.(\d{1,7})\.weight")

SingleExperts = dict[str, dict[str, dict[int, CheckpointTensor]]]
"""The matrices of experts by module, part (`gate`, `up` or `down`) and index."""


def split_fused_tensors(
    path: str,
    tensors: dict[str, CheckpointTensor],
    config: Mapping[str, Any],
    *,
    attention: bool = True,
    window_heads: int = 1,
) -> None:
    """Replace each fused tensor in `tensors`, by GGUF name, by views of its parts.

    `attention`: also those of attention. `window_heads`: see Family. Raises CheckpointError.
    """
    for name in [name for name in tensors if "attn_qkv" in name or "gate_up_exps" in name]:
        if attention and (match := _FUSED_ATTENTION.fullmatch(name)):
            layer, ending = match.groups()
            rows = _attention_rows(config, int(layer.removeprefix("blk.")), window_heads)
            parts = _split_rows(path, tensors[name], list(rows.values()), axis=0)
            names = [f"{layer}.attn_{part}.{ending}" for part in rows]
        elif match := _FUSED_EXPERTS.fullmatch(name):
            layer, ending = match.groups()
            stored = tensors[name]
            rows_of_one = stored.shape[1] // 2 if len(stored.shape) > 1 else 0
            parts = _split_rows(path, stored, [rows_of_one, rows_of_one], axis=1)
            names = [f"{layer}.ffn_{part}_exps.{ending}" for part in ("gate", "up")]
        else:
            continue
        del tensors[name]
        if both := tensors.keys() & {*names}:
            raise CheckpointError(f"{path}: tensor {name!r} holds the weights of {sorted(both)[0]!r} once more")
        tensors.update(zip(names, parts, strict=True))


def _attention_rows(config: Mapping[str, Any], layer: int, window_heads: int) -> dict[str, int]:
    """Return how many rows query, key and value have in a layer."""
    heads, kinds = config["num_attention_heads"], config.get("layer_types") or ()
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads, query_heads = config.get("num_key_value_heads", heads), heads
    if kinds[layer : layer + 1] == ["sliding_attention"]:
        kv_heads *= window_heads
        query_heads = config.get("num_sliding_attention_heads", heads)
    if layer < len(listed := config.get("num_attention_heads_per_layer") or ()):
        query_heads = listed[layer]
    return {"q": query_heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * config.get("v_head_dim", head_dim)}


def _split_rows(path: str, tensor: CheckpointTensor, rows: list[int], axis: int) -> list[CheckpointTensor]:
    """Split a tensor along `axis`, that of its rows, into parts of so many rows. A bias has rows and no columns."""
    shape = tensor.shape
    if len(shape) not in (axis + 1, axis + 2) or shape[axis] != sum(rows):
        raise CheckpointError(
            f"{path}: tensor {tensor.name!r} has the shape {list(shape)}, {sum(rows)} expected in dimension {axis}"
        )
    by_row = tensor.data.reshape(*shape[: axis + 1], -1)
    parts, start = [], 0
    for count in rows:
        data = by_row[start : start + count] if axis == 0 else by_row[:, start : start + count]
        # Matrices of experts stay views of the file: their rows are not copied.
        flat = data.reshape(-1) if axis == 0 or len(shape) == axis + 1 else data.reshape(shape[0], -1)
        parts.append(replace(tensor, shape=(*shape[:axis], count, *shape[axis + 1 :]), stored=flat))
        start += count
    return parts


def take_single_experts(path: str, tensors: dict[str, CheckpointTensor]) -> SingleExperts:
    """Remove the experts that are stored one by one from `tensors`, by GGUF name, and return them.

    Raises CheckpointError if a layer also has its experts as stacks.
    """
    experts: SingleExperts = {}
    for name, match in [(name, match) for name in tensors if (match := _SINGLE_EXPERT.fullmatch(name))]:
        layer, part, index = match.groups()
        if f"blk.{layer}.ffn_{part}_exps.weight" in tensors:
            raise CheckpointError(f"{path}: layer {layer} has its experts twice, one by one and as stacks")
        parts = experts.setdefault(f"model.layers.{layer}.mlp.experts", {"gate": {}, "up": {}, "down": {}})
        parts[part][int(index)] = tensors.pop(name)
    return experts
