"""Multi-head latent attention and its router as GGUF metadata (architecture deepseek2), both ways.

Key names and meanings: llama.cpp's conversion/deepseek.py and src/models/deepseek2.cpp. Newer files state the widths of
a head under keys with the suffix `_mla`, and those of a latent without it; older ones the widths of a head without.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.checkpoint import CheckpointTensor
from ktqueue.loading.gguf.header import metadata_count, metadata_number
from ktqueue.operators.packed import PackedMatrix

SIGMOID = 2  # of `expert_gating_func`; 1, and none, is softmax
# Groups of experts and how many of them a token may use, by the number of experts, where a file says nothing: files of
# DeepSeek-V2 (160), V3 and R1 (256) from before there were keys for them.
_UNSAID_GROUPS = {160: (8, 3), 256: (8, 4)}

# Of a config: transformers' defaults of these are those of DeepSeek-V3, where a GGUF file that lacks them has none.
_STATED_WITH_SIGMOID = ("n_group", "topk_group", "routed_scaling_factor")

_KEYS_TENSOR = re.compile(r"(blk\.\d+)\.attn_k_b\.weight")


def latent_config(prefix: str, metadata: Mapping[str, Any], config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Of a config what only these families have; `config`: what was read before. Raises CheckpointError."""

    def width(name: str) -> int:
        key = f"{prefix}.attention.{name}_mla"
        key = key if key in metadata else f"{prefix}.attention.{name}"
        return int(metadata_number(metadata.get(key), int, key, source))

    if metadata.get(key := f"{prefix}.attention.temperature_scale"):  # Mistral Large 3, of the same architecture
        raise CheckpointError(f"{source}: {key} is not supported")
    key = f"{prefix}.rope.dimension_count"
    rotary, whole = int(metadata_number(metadata.get(key), int, key, source)), width("key_length")
    if rotary >= whole or rotary % 2:
        raise CheckpointError(f"{source}: {key} {rotary} must be even and less than a key's length, {whole}")
    experts = int(config["n_routed_experts"])
    groups = metadata_count(metadata, f"{prefix}.expert_group_count", source)
    used = metadata_count(metadata, f"{prefix}.expert_group_used_count", source)
    if not groups:
        groups, used = _UNSAID_GROUPS.get(experts, (1, 1))
    elif not used:
        raise CheckpointError(f"{source}: metadata key {prefix}.expert_group_used_count is missing")
    sigmoid = metadata.get(f"{prefix}.expert_gating_func") == SIGMOID
    normalised = bool(metadata.get(f"{prefix}.expert_weights_norm", False))
    found = {
        "routed_scaling_factor": config.get("routed_scaling_factor", 1.0),
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": metadata_count(metadata, f"{prefix}.attention.q_lora_rank", source) or None,
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": whole - rotary,
        "v_head_dim": width("value_length"),
        "first_k_dense_replace": metadata_count(metadata, f"{prefix}.leading_dense_block_count", source),
        "n_group": groups,
        "topk_group": used,
        "norm_topk_prob": normalised,
    }
    if sigmoid:
        return found
    if normalised:  # transformers' router of DeepSeek-V2 never does
        raise CheckpointError(f"{source}: {prefix}.expert_weights_norm with softmax scores is not supported")
    return found | {"topk_method": "greedy" if groups == 1 else "group_limited_greedy"}


def latent_metadata(prefix: str, config: Mapping[str, Any], source: str, *, sigmoid: bool) -> dict[str, Any]:
    """The inverse of `latent_config`, with the older meaning of widths: keys and values are made by one matrix.

    Raises CheckpointError.
    """
    for name in _STATED_WITH_SIGMOID if sigmoid else ():
        if config.get(name) is None:
            raise CheckpointError(f"{source}: config key {name} is missing")
    rotary = int(config["qk_rope_head_dim"])
    found: dict[str, Any] = {
        f"{prefix}.attention.head_count_kv": int(config["num_attention_heads"]),
        f"{prefix}.attention.key_length": int(config["qk_nope_head_dim"]) + rotary,
        f"{prefix}.attention.value_length": int(config["v_head_dim"]),
        f"{prefix}.rope.dimension_count": rotary,
        f"{prefix}.leading_dense_block_count": int(config.get("first_k_dense_replace") or 0),
        f"{prefix}.expert_gating_func": SIGMOID if sigmoid else SIGMOID - 1,
        f"{prefix}.expert_weights_norm": sigmoid and bool(config.get("norm_topk_prob", True)),
    }
    if config.get("q_lora_rank"):
        found[f"{prefix}.attention.q_lora_rank"] = int(config["q_lora_rank"])
    grouped = sigmoid or config.get("topk_method") == "group_limited_greedy"
    found[f"{prefix}.expert_group_count"] = int(config.get("n_group") or 1) if grouped else 1
    found[f"{prefix}.expert_group_used_count"] = int(config.get("topk_group") or 1) if grouped else 1
    return found


@dataclass(frozen=True, slots=True)
class JoinedTensor(CheckpointTensor):
    """[heads * (plain + value), latent] of `data`, which is the keys' [heads, latent, plain], and `values` [heads,
    value, latent]. It is joined anew whenever it is asked for, and packed as F32."""

    values: CheckpointTensor | None = None

    @property
    def nbytes(self) -> int:
        return self.data.size + (self.values.nbytes if self.values else 0)

    def packed(self) -> PackedMatrix:
        rows, columns = self.shape
        return PackedMatrix("F32", rows, columns, self.tensor(torch.float32).numpy().reshape(-1).view("u1"))

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        assert self.values is not None
        heads, value, latent = self.values.shape
        plain = self.shape[0] // heads - value
        keys = CheckpointTensor(self.name, self.quant, (heads, latent, plain), self.data).tensor(dtype)
        return torch.cat([keys.transpose(1, 2), self.values.tensor(dtype)], 1).reshape(self.shape)


def join_latent_tensors(path: str, stored: dict[str, CheckpointTensor]) -> None:
    """Put one tensor in the place of each such pair of `stored`, by GGUF name. Raises CheckpointError."""
    for match in [match for name in stored if (match := _KEYS_TENSOR.fullmatch(name))]:
        keys = stored.pop(match[0])
        values = stored.pop(f"{match[1]}.attn_v_b.weight", None)
        if values is None or len(keys.shape) != 3 or len(values.shape) != 3:
            raise CheckpointError(f"{path}: tensor {match[0]!r} and attn_v_b beside it must have three dimensions")
        (heads, latent, plain), (others, value, columns) = keys.shape, values.shape
        if (heads, latent) != (others, columns):
            raise CheckpointError(f"{path}: tensor {match[0]!r} is {list(keys.shape)}, attn_v_b {list(values.shape)}")
        name = f"{match[1]}.attn_kv_b.weight"
        shape = (heads * (plain + value), latent)
        stored[name] = JoinedTensor(name, keys.quant, shape, keys.data, values=values)
