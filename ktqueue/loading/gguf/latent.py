"""Multi-head latent attention and its router in GGUF files: metadata keys and tensors.

Key names and meanings are those of llama.cpp's conversion/deepseek.py, glm.py and mistral3.py, and of deepseek2.cpp,
deepseek32.cpp and glm-dsa.cpp in src/models. Newer files have the widths of a head under keys with the suffix `_mla`,
and the widths of a latent under keys without it. Older files have the widths of a head under keys without the suffix.

Files written since April 2025 store the matrix that makes keys and values in two parts (`attn_k_b` and `attn_v_b`).
The part for keys is transposed per head, because absorbed attention multiplies it that way. transformers has one
matrix, in which each head's rows for keys come before its rows for values. llama.cpp reads the architectures with an
indexer only in two parts, so we write all but deepseek2 so.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ktqueue.core.errors import CheckpointError
from ktqueue.families.family import Family, GgufLayout
from ktqueue.loading.checkpoint import CheckpointTensor, requantise_matrix
from ktqueue.loading.gguf.header import ModelMetadata
from ktqueue.loading.gguf.linear import Change
from ktqueue.loading.weight_formats import Floats
from ktqueue.operators.packed import JoinedMatrix, PackedMatrix

SIGMOID = 2  # value of `expert_gating_func`; 1 or no value means softmax
# Number of expert groups, and how many of them a token may use, by the number of experts. For files of DeepSeek-V2
# (160 experts), V3 and R1 (256) that were written before these keys existed.
_DEFAULT_GROUPS = {160: (8, 3), 256: (8, 4)}
_SHARING_CONTEXT = 1 << 20  # a GLM-5.2, whose layers share choices, by its context length (llama.cpp)
_TYPES = "attention.indexer.types"
_SHARES = ("index_topk_freq", "index_topk_pattern", "index_skip_topk_offset")
_BETA, _ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"
_SCALE, _LENGTH = "attention.temperature_scale", "attention.temperature_length"
_ANY_BETA = 0.1  # Mistral 4's; the first `_ORIGINAL` tokens do not depend on it

# A config must have these keys: transformers' defaults are those of DeepSeek-V3, which GGUF readers do not know.
_REQUIRED_WITH_SIGMOID = ("n_group", "topk_group", "routed_scaling_factor")

_KEYS_TENSOR = re.compile(r"(blk\.\d+)\.attn_k_b\.weight")


def latent_config(family: Family, metadata: ModelMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config keys that only these families have.

    `config` holds the keys that were read before. Raises CheckpointError.
    """

    def width(name: str) -> int:
        newer = f"attention.{name}_mla"
        return metadata.integer(newer if newer in metadata else f"attention.{name}")

    if metadata.get(_SCALE) and not family.growing:  # Mistral Large 3
        raise metadata.error(_SCALE, "is not supported")
    rotary_width, key_length = metadata.integer("rope.dimension_count"), width("key_length")
    if rotary_width >= key_length or rotary_width % 2:
        raise metadata.error(
            "rope.dimension_count", f"{rotary_width} must be even and less than the length of a key, {key_length}"
        )
    experts = int(config["n_routed_experts"])
    groups, used_groups = metadata.count("expert_group_count"), metadata.count("expert_group_used_count")
    if not groups:
        groups, used_groups = (1, 1) if family.layout.two_parts else _DEFAULT_GROUPS.get(experts, (1, 1))
    elif not used_groups:
        raise metadata.error("expert_group_used_count", "is missing")
    normalised = metadata.flag("expert_weights_norm", False)
    latent_keys = {
        "routed_scaling_factor": config.get("routed_scaling_factor", 1.0),
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": metadata.count("attention.q_lora_rank") or None,
        "qk_rope_head_dim": rotary_width,
        "qk_nope_head_dim": key_length - rotary_width,
        "v_head_dim": width("value_length"),
        "first_k_dense_replace": metadata.count("leading_dense_block_count"),
        "n_group": groups,
        "topk_group": used_groups,
        "norm_topk_prob": normalised,
    }
    if family.indexed:
        if (gating := metadata.count("expert_gating_func")) not in (0, SIGMOID):
            raise metadata.error("expert_gating_func", f"{gating} is not supported")
        latent_keys |= _indexer_types(family.layout, metadata, config)
    if family.layout.sigmoid or family.growing:
        return latent_keys
    if normalised:  # transformers' router of DeepSeek-V2 never normalises
        raise metadata.error("expert_weights_norm", "with softmax scores is not supported")
    return latent_keys | {"topk_method": "greedy" if groups == 1 else "group_limited_greedy"}


def _indexer_types(layout: GgufLayout, metadata: ModelMetadata, config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return which layers have an indexer, and which share the choice of the layer before; empty: all have one."""
    layers = int(config["num_hidden_layers"])
    if (listed := metadata.get(_TYPES)) is None:
        if not layout.shared_choices or config["max_position_embeddings"] < _SHARING_CONTEXT:
            return {}
        listed = [layer < 2 or layer % 4 == 2 for layer in range(layers)]
    if not isinstance(listed, list) or len(listed) < layers or not {*listed} <= {0, 1}:  # False is 0, True is 1
        raise metadata.error(_TYPES, f"must be true or false for each of {layers} layers")
    return {"indexer_types": ["full" if value else "shared" for value in listed[:layers]]}


def growth_config(family: Family, metadata: ModelMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the context length and the rotary parameters of a model whose queries grow with their position (Mistral
    4, Ministral 3). `config` has its other rotary parameters.

    For Mistral 4 llama.cpp's converter does not write how much they grow. In the original context they do not, so such
    a file has this context. A file of Ministral 3's architecture without it is a Mistral, whose queries do not grow.
    Raises CheckpointError.
    """
    rope, context = dict(config["rope_parameters"]), int(config["max_position_embeddings"])
    period = metadata.integer(_LENGTH, rope.get(_ORIGINAL, None if family.latent else context))
    if rope.setdefault(_ORIGINAL, period) != period:
        raise metadata.error(_LENGTH, f"must be {rope[_ORIGINAL]}, the original context, got {period}")
    if _SCALE in metadata:
        beta = round(metadata.number(_SCALE), 6)  # the file has a float32; configs have at most six digits
    elif family.latent:
        beta, context = _ANY_BETA, min(context, period)
    else:
        beta = 0.0
    return {"max_position_embeddings": context, "rope_parameters": {**rope, _BETA: beta}}


def latent_metadata(family: Family, config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return GGUF metadata for a config: the inverse of `latent_config`.

    If one matrix makes keys and values, the widths are written in the older meaning. Raises CheckpointError.
    """
    prefix, sigmoid = family.layout.architecture, family.layout.sigmoid
    for name in _REQUIRED_WITH_SIGMOID if sigmoid else ():
        if config.get(name) is None:
            raise CheckpointError(f"{source}: config key {name} is missing")
    rotary_width = int(config["qk_rope_head_dim"])
    widths = int(config["qk_nope_head_dim"]) + rotary_width, int(config["v_head_dim"])
    attention = {
        "head_count_kv": int(config["num_attention_heads"]),
        "key_length": widths[0],
        "value_length": widths[1],
    }
    if family.layout.two_parts:
        latent = int(config["kv_lora_rank"])
        attention = {"head_count_kv": 1, "key_length": latent + rotary_width, "value_length": latent}
        attention |= {"key_length_mla": widths[0], "value_length_mla": widths[1]}
    metadata: dict[str, Any] = {
        **{f"{prefix}.attention.{name}": value for name, value in attention.items()},
        f"{prefix}.rope.dimension_count": rotary_width,
        f"{prefix}.leading_dense_block_count": _dense_layers(config, source),
        f"{prefix}.expert_gating_func": SIGMOID if sigmoid else SIGMOID - 1,
        f"{prefix}.expert_weights_norm": (sigmoid or family.growing) and bool(config.get("norm_topk_prob", True)),
    }
    if config.get("q_lora_rank"):
        metadata[f"{prefix}.attention.q_lora_rank"] = int(config["q_lora_rank"])
    grouped = sigmoid or config.get("topk_method") == "group_limited_greedy"
    metadata[f"{prefix}.expert_group_count"] = int(config.get("n_group") or 1) if grouped else 1
    metadata[f"{prefix}.expert_group_used_count"] = int(config.get("topk_group") or 1) if grouped else 1
    if family.indexed:
        metadata |= _types_metadata(family.layout, config, source)
    return metadata


def growth_metadata(prefix: str, config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return GGUF metadata of the growth of queries. Raises CheckpointError if a number is missing."""
    rope = config.get("rope_parameters") or {}
    for name in (_BETA, _ORIGINAL):
        if rope.get(name) is None:
            raise CheckpointError(f"{source}: rope {name} is missing")
    return {f"{prefix}.{_SCALE}": float(rope[_BETA]), f"{prefix}.{_LENGTH}": int(rope[_ORIGINAL])}


def _types_metadata(layout: GgufLayout, config: Mapping[str, Any], source: str) -> dict[str, list[bool]]:
    key = f"{layout.architecture}.{_TYPES}"
    if (types := config.get("indexer_types")) is not None:
        return {key: [kind == "full" for kind in types]}
    if shares := [name for name in _SHARES if config.get(name) is not None]:
        raise CheckpointError(f"{source}: config key {shares[0]} cannot be written to GGUF without indexer_types")
    return {key: [True] * int(config["num_hidden_layers"])} if layout.shared_choices else {}


def _dense_layers(config: Mapping[str, Any], source: str) -> int:
    """Return how many layers, the first, have no experts. Raises CheckpointError if others have none either."""
    if (kinds := config.get("mlp_layer_types")) is None:
        return int(config.get("first_k_dense_replace") or 0)
    dense = [kind == "dense" for kind in kinds]
    if dense != sorted(dense, reverse=True):
        raise CheckpointError(f"{source}: GGUF cannot express mlp_layer_types {[*kinds]}")
    return sum(dense)


def split_latent_matrix(
    name: str, shape: tuple[int, ...], config: Mapping[str, Any]
) -> list[tuple[str, tuple[int, ...], Change]]:
    """Return name, shape and change of the two parts that a file has of the matrix that makes keys and values."""
    heads, plain, value = (int(config[key]) for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))

    def parts(values: Floats) -> tuple[Floats, Floats]:
        keys, rest = np.split(values.reshape(heads, plain + value, -1), [plain], 1)
        return np.ascontiguousarray(keys.transpose(0, 2, 1)), np.ascontiguousarray(rest)

    return [
        (name.replace("kv_b_proj", "k_b_proj"), (heads, shape[1], plain), lambda values: parts(values)[0]),
        (name.replace("kv_b_proj", "v_b_proj"), (heads, value, shape[1]), lambda values: parts(values)[1]),
    ]


@dataclass(frozen=True, slots=True)
class JoinedTensor(CheckpointTensor):
    """Keys and values of one layer as one tensor, [heads * (plain + value), latent].

    `data` holds the keys, [heads, latent, plain]; `values` is [heads, value, latent]. The tensor is joined whenever it
    is read, as F32.
    """

    values: CheckpointTensor | None = None

    @property
    def nbytes(self) -> int:
        return self.data.size + (self.values.nbytes if self.values else 0)

    @property
    def part_quants(self) -> tuple[str, str] | None:
        return self.quant, self._parts()[1].quant

    def packed_matrix(self) -> PackedMatrix:
        keys, values = (
            requantise_matrix(PackedMatrix(part.quant, math.prod(part.shape[:2]), part.columns, part.data))
            for part in self._parts()
        )
        joined = self.decode(torch.float32).numpy().reshape(-1).view("u1")
        rows, columns = self.shape
        return JoinedMatrix("F32", rows, columns, joined, keys=keys, values=values)

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        keys, values = self._parts()
        return torch.cat([keys.decode(dtype).transpose(1, 2), values.decode(dtype)], 1).reshape(self.shape)

    def _parts(self) -> tuple[CheckpointTensor, CheckpointTensor]:
        assert self.values is not None
        heads, value, latent = self.values.shape
        plain = self.shape[0] // heads - value
        return CheckpointTensor(self.name, self.quant, (heads, latent, plain), self.data), self.values


def join_latent_tensors(path: str, tensors: dict[str, CheckpointTensor]) -> None:
    """Replace each pair of tensors in `tensors`, by GGUF name, by one joined tensor. Raises CheckpointError."""
    for match in [match for name in tensors if (match := _KEYS_TENSOR.fullmatch(name))]:
        keys = tensors.pop(match[0])
        values = tensors.pop(f"{match[1]}.attn_v_b.weight", None)
        if values is None or len(keys.shape) != 3 or len(values.shape) != 3:
            raise CheckpointError(f"{path}: tensor {match[0]!r} and attn_v_b beside it must have three dimensions")
        (heads, latent, plain), (value_heads, value, value_latent) = keys.shape, values.shape
        if (heads, latent) != (value_heads, value_latent):
            raise CheckpointError(f"{path}: tensor {match[0]!r} is {list(keys.shape)}, attn_v_b {list(values.shape)}")
        name = f"{match[1]}.attn_kv_b.weight"
        shape = (heads * (plain + value), latent)
        tensors[name] = JoinedTensor(name, keys.quant, shape, keys.data, values=values)
