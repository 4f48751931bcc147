"""Multi-head latent attention and its router in GGUF files (architecture deepseek2): metadata keys and tensors.

Key names and meanings are those of llama.cpp's conversion/deepseek.py and src/models/deepseek2.cpp. Newer files have
the widths of a head under keys with the suffix `_mla`, and the widths of a latent under keys without it. Older files
have the widths of a head under keys without the suffix.

Files written since April 2025 store the matrix that makes keys and values in two parts (`attn_k_b` and `attn_v_b`).
The part for keys is transposed per head, because absorbed attention multiplies it that way. transformers has one
matrix, in which each head's rows for keys come before its rows for values.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.checkpoint import CheckpointTensor, requantise_matrix
from ktqueue.loading.gguf.header import metadata_count, metadata_number
from ktqueue.operators.packed import JoinedMatrix, PackedMatrix

SIGMOID = 2  # value of `expert_gating_func`; 1 or no value means softmax
# Number of expert groups, and how many of them a token may use, by the number of experts. For files of DeepSeek-V2
# (160 experts), V3 and R1 (256) that were written before these keys existed.
_DEFAULT_GROUPS = {160: (8, 3), 256: (8, 4)}

# A config must have these keys: transformers' defaults are those of DeepSeek-V3, which GGUF readers do not know.
_REQUIRED_WITH_SIGMOID = ("n_group", "topk_group", "routed_scaling_factor")

_KEYS_TENSOR = re.compile(r"(blk\.\d+)\.attn_k_b\.weight")


def latent_config(prefix: str, metadata: Mapping[str, Any], config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the config keys that only these families have.

    `config` holds the keys that were read before. Raises CheckpointError.
    """

    def width(name: str) -> int:
        key = f"{prefix}.attention.{name}_mla"
        key = key if key in metadata else f"{prefix}.attention.{name}"
        return int(metadata_number(metadata.get(key), int, key, source))

    if metadata.get(key := f"{prefix}.attention.temperature_scale"):  # Mistral Large 3, of the same architecture
        raise CheckpointError(f"{source}: {key} is not supported")
    key = f"{prefix}.rope.dimension_count"
    rotary_width, key_length = int(metadata_number(metadata.get(key), int, key, source)), width("key_length")
    if rotary_width >= key_length or rotary_width % 2:
        raise CheckpointError(
            f"{source}: {key} {rotary_width} must be even and less than the length of a key, {key_length}"
        )
    experts = int(config["n_routed_experts"])
    groups = metadata_count(metadata, f"{prefix}.expert_group_count", source)
    used_groups = metadata_count(metadata, f"{prefix}.expert_group_used_count", source)
    if not groups:
        groups, used_groups = _DEFAULT_GROUPS.get(experts, (1, 1))
    elif not used_groups:
        raise CheckpointError(f"{source}: metadata key {prefix}.expert_group_used_count is missing")
    sigmoid = metadata.get(f"{prefix}.expert_gating_func") == SIGMOID
    normalised = bool(metadata.get(f"{prefix}.expert_weights_norm", False))
    latent_keys = {
        "routed_scaling_factor": config.get("routed_scaling_factor", 1.0),
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": metadata_count(metadata, f"{prefix}.attention.q_lora_rank", source) or None,
        "qk_rope_head_dim": rotary_width,
        "qk_nope_head_dim": key_length - rotary_width,
        "v_head_dim": width("value_length"),
        "first_k_dense_replace": metadata_count(metadata, f"{prefix}.leading_dense_block_count", source),
        "n_group": groups,
        "topk_group": used_groups,
        "norm_topk_prob": normalised,
    }
    if sigmoid:
        return latent_keys
    if normalised:  # transformers' router of DeepSeek-V2 never normalises
        raise CheckpointError(f"{source}: {prefix}.expert_weights_norm with softmax scores is not supported")
    return latent_keys | {"topk_method": "greedy" if groups == 1 else "group_limited_greedy"}


def latent_metadata(prefix: str, config: Mapping[str, Any], source: str, *, sigmoid: bool) -> dict[str, Any]:
    """Return GGUF metadata for a config: the inverse of `latent_config`.

    The widths are written in the older meaning, since one matrix makes keys and values. Raises CheckpointError.
    """
    for name in _REQUIRED_WITH_SIGMOID if sigmoid else ():
        if config.get(name) is None:
            raise CheckpointError(f"{source}: config key {name} is missing")
    rotary_width = int(config["qk_rope_head_dim"])
    metadata: dict[str, Any] = {
        f"{prefix}.attention.head_count_kv": int(config["num_attention_heads"]),
        f"{prefix}.attention.key_length": int(config["qk_nope_head_dim"]) + rotary_width,
        f"{prefix}.attention.value_length": int(config["v_head_dim"]),
        f"{prefix}.rope.dimension_count": rotary_width,
        f"{prefix}.leading_dense_block_count": int(config.get("first_k_dense_replace") or 0),
        f"{prefix}.expert_gating_func": SIGMOID if sigmoid else SIGMOID - 1,
        f"{prefix}.expert_weights_norm": sigmoid and bool(config.get("norm_topk_prob", True)),
    }
    if config.get("q_lora_rank"):
        metadata[f"{prefix}.attention.q_lora_rank"] = int(config["q_lora_rank"])
    grouped = sigmoid or config.get("topk_method") == "group_limited_greedy"
    metadata[f"{prefix}.expert_group_count"] = int(config.get("n_group") or 1) if grouped else 1
    metadata[f"{prefix}.expert_group_used_count"] = int(config.get("topk_group") or 1) if grouped else 1
    return metadata


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
