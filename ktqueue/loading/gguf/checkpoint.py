"""Opens a GGUF model, one file or all parts of a split one: the config from metadata, tensors by transformers name."""

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ktqueue.core.errors import CheckpointError
from ktqueue.core.short_repr import short_repr
from ktqueue.families.family import GgufLayout
from ktqueue.families.parts import QKV
from ktqueue.loading.checkpoint import Checkpoint, CheckpointTensor, check_packed
from ktqueue.loading.gguf.families import family_of_metadata
from ktqueue.loading.gguf.gemma import adapt_gemma_tensors
from ktqueue.loading.gguf.gemma4 import adapt_gemma4_tensors
from ktqueue.loading.gguf.header import DEFAULT_ALIGNMENT, GgufHeader, ModelMetadata, read_header
from ktqueue.loading.gguf.laguna import gate_kind
from ktqueue.loading.gguf.latent import join_latent_tensors
from ktqueue.loading.gguf.layouts import split_fused_tensors, take_single_experts
from ktqueue.loading.gguf.library import ROW_VECTORS, gguf_names, split_expert_name, type_name
from ktqueue.loading.gguf.linear import adapt_linear_tensors
from ktqueue.loading.gguf.metadata import MAX_LAYERS, config_from_metadata, multi_token_layers
from ktqueue.loading.gguf.rope import (
    FACTORS_TENSOR,
    LIST_TENSORS,
    longrope_parameters,
    parameters_of_lists,
    scale_of_lists,
)
from ktqueue.loading.gguf.step import adapt_step_tensors
from ktqueue.loading.single_experts import stack_experts
from ktqueue.loading.weight_formats import Bytes, Floats, tensor_bytes
from ktqueue.operators.packed import ExpertWeights

_SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_BLOCK = re.compile(r"blk\.(\d+)\.")


def part_paths(path: Path) -> list[Path]:
    """Return the files of a GGUF model in order, from the name of any of them."""
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count = match["stem"], int(match["count"])
    return [path.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]


def read_parts(path: Path) -> list[GgufHeader]:
    """Read the headers of all parts of a GGUF model, in order. The metadata is in the first part.

    Raises CheckpointError.
    """
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        header = read_header(path)
        count = header.metadata.get("split.count", 0)
        if isinstance(count, int) and count > 1:
            raise CheckpointError(
                f"{path}: one of {count} parts, but its name does not end in -00001-of-{count:05d}.gguf"
            )
        return [header]
    count = int(match["count"])
    parts = []
    for number, part in enumerate(part_paths(path), 1):
        if not part.exists():
            raise CheckpointError(f"{part}: part {number} of {count} is missing")
        header = read_header(part)
        if header.metadata.get("split.no", number - 1) != number - 1:
            raise CheckpointError(
                f"{part}: the header says part {short_repr(header.metadata['split.no'])}, counted from 0"
            )
        parts.append(header)
    if not parts:
        raise CheckpointError(f"{path}: the file name says that the model has 0 parts")
    stated_count = parts[0].metadata.get("split.tensors.count")
    found_count = sum(len(part.tensors) for part in parts)
    if stated_count is not None and stated_count != found_count:
        raise CheckpointError(
            f"{path}: the parts hold {found_count} tensors, but the header says {short_repr(stated_count)}"
        )
    return parts


def open_gguf(path: Path, *, next_tokens: bool = False) -> Checkpoint:
    """Open a GGUF model. `next_tokens`: see open_folder.

    Raises CheckpointError that names the file, key or tensor at fault.
    """
    parts = read_parts(path)
    tensors, files = _file_tensors(path, parts), [part.data for part in parts]
    return build_checkpoint(str(path), parts[0].metadata, tensors, files, next_tokens=next_tokens)


def build_checkpoint(
    path: str,
    metadata: dict[str, Any],
    tensors: dict[str, CheckpointTensor],
    files: Iterable[Bytes] = (),
    *,
    next_tokens: bool = False,
) -> Checkpoint:
    """Build a checkpoint from GGUF metadata and tensors by GGUF name.

    `tensors` is changed. `files` are the file maps that the tensors view. `next_tokens`: see open_folder. Raises
    CheckpointError, whose messages begin with `path`.
    """
    family = family_of_metadata(metadata, path)
    layout, config = family.layout, config_from_metadata(family, metadata, path)
    stated = ModelMetadata(layout.architecture, metadata, path)
    own, further = config["num_hidden_layers"], multi_token_layers(stated)
    wanted = range(own, own + further) if next_tokens else range(own)
    _keep_layers(tensors, wanted, all_layers=own + further)
    if layout.rope_factors and (factors := tensors.pop(FACTORS_TENSOR, None)):
        config["rope_parameters"] = _rope_with_factors(path, config, factors)
    if layout.rope_lists:
        _read_rope_lists(layout, config, stated, tensors)
    if family.latent:
        join_latent_tensors(path, tensors)
    if family.linear:  # whose attn_qkv is another matrix
        adapt_linear_tensors(path, tensors, config)
    if layout.gemma:
        adapt_gemma_tensors(tensors)
    if layout.limits:
        adapt_step_tensors(path, tensors, config)
    if family.heads_differ:
        adapt_gemma4_tensors(path, tensors, config)
    fused = family.linear or family.heads_differ or QKV in layout.modules
    split_fused_tensors(path, tensors, config, attention=not fused, window_heads=family.window_heads)
    _check_layers(path, wanted, tensors)
    single = take_single_experts(path, tensors)
    dense, stacks = _rename_tensors(path, layout, config, tensors, wanted)
    if not next_tokens:
        _finish_config(path, config, metadata, dense)
    config |= {key: name in dense for key, name in layout.by_tensor.items()}
    if layout.heads_listed:
        config["gating"] = gate_kind(dense, config)
    experts = {name: _experts(path, name, tensors) for name, tensors in stacks.items()}
    if layout.mlp_kinds:
        routed = [f"model.layers.{i}.mlp.experts" in experts for i in range(own)]
        config["mlp_layer_types"] = ["sparse" if has_experts else "dense" for has_experts in routed]
    experts |= {name: stack_experts(path, name, parts) for name, parts in single.items()}
    return Checkpoint(path, config, dense, experts, files)


def _file_tensors(path: Path, parts: list[GgufHeader]) -> dict[str, CheckpointTensor]:
    tensors: dict[str, CheckpointTensor] = {}
    for part in parts:
        q2_0 = _q2_0_layout(part)
        for info in part.tensors:
            if info.name in tensors:
                raise CheckpointError(f"{path}: tensor {info.name!r} is in two parts")
            quant = type_name(info.type_id)
            quant = q2_0 if quant == "Q2_0" else quant
            tensors[info.name] = CheckpointTensor.from_file(
                part.path, info.name, quant, info.shape, info.offset, part.data
            )
        alignment = part.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        places = [(info.offset, info.offset + tensors[info.name].nbytes, info.name) for info in part.tensors]
        check_packed(part.path, places, min((begin for begin, _, _ in places), default=0), alignment)
    return tensors


def _q2_0_layout(part: GgufHeader) -> str:
    """Return the format of the Q2_0 tensors of a file: llama.cpp's, or a fork's, which has the same type number.

    It is the fork's if the space of each tensor is that of the fork, with padding or without. So a truncated file of
    llama.cpp is refused, not read as the other. Raises CheckpointError if the tensors fit neither.
    """
    alignment = part.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    ends = [*sorted(info.offset for info in part.tensors), part.data.size]
    tensors = [info for info in part.tensors if type_name(info.type_id) == "Q2_0"]
    if not tensors or any(info.shape[-1] % 128 or info.offset >= part.data.size for info in tensors):
        return "Q2_0"
    spaces = [ends[bisect_right(ends, info.offset)] - info.offset for info in tensors]
    sizes = [tensor_bytes("Q2_0_128", info.shape) for info in tensors]
    if all(space in (size, size + -size % alignment) for space, size in zip(spaces, sizes, strict=True)):
        return "Q2_0_128"
    for info, space in zip(tensors, spaces, strict=True):
        if space < tensor_bytes("Q2_0", info.shape) and info.offset + space < part.data.size:
            raise CheckpointError(
                f"{part.path}: the size of tensor {info.name!r} fits no layout of Q2_0 for all of them"
            )
    return "Q2_0"


def _rope_with_factors(path: str, config: dict[str, Any], factors_tensor: CheckpointTensor) -> dict[str, Any]:
    rope, head_dim = config["rope_parameters"], config.get("head_dim")
    head_dim = head_dim or config["hidden_size"] // config["num_attention_heads"]
    if rope["rope_type"] != "default":
        raise CheckpointError(
            f"{path}: tensor {factors_tensor.name!r} and rope.scaling.type {rope['rope_type']!r} cannot be combined"
        )
    factors = _factors(path, factors_tensor, head_dim)
    return longrope_parameters(rope, factors, config["max_position_embeddings"])


def _factors(path: str, tensor: CheckpointTensor, columns: int) -> Floats:
    """Return the factors of the rotary frequencies of `columns` columns. Raises CheckpointError."""
    factors: Floats = tensor.decode(torch.float32).numpy()
    if factors.shape != (columns // 2,) or not (np.isfinite(factors) & (factors > 0)).all():
        raise CheckpointError(f"{path}: tensor {tensor.name!r} must hold {columns // 2} positive numbers")
    return factors


def _read_rope_lists(
    layout: GgufLayout, config: dict[str, Any], metadata: ModelMetadata, tensors: dict[str, CheckpointTensor]
) -> None:
    """Take the two lists of longrope from `tensors` into the config. Raises CheckpointError."""
    found = {parameter: tensors.pop(name) for parameter, name in LIST_TENSORS.items() if name in tensors}
    scale = scale_of_lists(metadata)
    if not found and scale == 1:
        return
    if missing := [name for parameter, name in LIST_TENSORS.items() if parameter not in found]:
        raise CheckpointError(f"{metadata.source}: tensor {missing[0]!r} is missing")
    rope = config["rope_parameters"]
    width = rope.get("partial_rotary_factor", 1) * config["hidden_size"] // config["num_attention_heads"]
    lists = {parameter: _factors(metadata.source, tensor, int(width)) for parameter, tensor in found.items()}
    rope = parameters_of_lists(metadata, rope, lists)
    config["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    config["rope_parameters"] = {**rope, **dict.fromkeys(layout.rope_lists, scale)}


def _keep_layers(tensors: dict[str, CheckpointTensor], wanted: range, *, all_layers: int) -> None:
    """Drop the tensors of a file's layers that are not `wanted`, and those outside of layers if the first is not."""
    others = {*range(min(all_layers, MAX_LAYERS))} - {*wanted}
    for name in [*tensors] if others else []:
        layer = _BLOCK.match(name)
        if (int(layer[1]) in others) if layer and len(layer[1]) < 8 else wanted.start > 0:
            del tensors[name]


def _check_layers(path: str, wanted: range, tensors: dict[str, CheckpointTensor]) -> None:
    """Check that block_count agrees with the tensors: a wrong number would build a skeleton of any size."""
    found = {int(match[1]) for name in tensors if (match := _BLOCK.match(name)) and len(match[1]) < 8}
    if wanted.stop > MAX_LAYERS or found != {*wanted}:
        raise CheckpointError(f"{path}: block_count is {wanted.stop}, but there are tensors of {len(found)} layers")


def _rename_tensors(
    path: str, layout: GgufLayout, config: dict[str, Any], stored: dict[str, CheckpointTensor], layers: range
) -> tuple[dict[str, CheckpointTensor], dict[str, dict[str, CheckpointTensor]]]:
    names = gguf_names(layout, layers)
    dense: dict[str, CheckpointTensor] = {}
    stacks: dict[str, dict[str, CheckpointTensor]] = {}
    for stored_name, tensor in stored.items():
        name = names.get(stored_name)
        if name is None:
            raise CheckpointError(
                f"{path}: tensor {stored_name!r} is unknown in the architecture {layout.architecture}"
            )
        if split := split_expert_name(name):
            module, part = split
            stacks.setdefault(module, {})[part] = tensor
        else:
            dense[name] = _adapt_tensor(path, tensor, name, layout, config)
    return dense, stacks


def _adapt_tensor(
    path: str, tensor: CheckpointTensor, name: str, layout: GgufLayout, config: dict[str, Any]
) -> CheckpointTensor:
    """Adapt what GGUF stores differently from transformers.

    That is the rotary order of q and k, and matrices of one row, which GGUF stores as vectors.
    """
    shape, heads = tensor.shape, 0
    if name.endswith(ROW_VECTORS) and len(shape) == 1:
        shape = (1, *shape)
    if layout.permuted and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config["num_attention_heads" if name.endswith("q_proj.weight") else "num_key_value_heads"]
        if shape[0] % (2 * heads):
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} has {shape[0]} rows, which are not {heads} heads of even size"
            )
    return replace(tensor, shape=shape, heads=heads)


def _experts(path: str, module: str, parts: dict[str, CheckpointTensor]) -> ExpertWeights:
    matrices = ("gate", "up", "down")
    if missing := {*matrices} - set(parts):
        raise CheckpointError(f"{path}: {module} has no {' and no '.join(sorted(missing))} weights")
    biases = [parts[f"{part}_bias"] for part in matrices if f"{part}_bias" in parts]
    if len(biases) not in (0, len(matrices)):
        raise CheckpointError(f"{path}: {module} has {len(biases)} of {len(matrices)} biases")
    for tensor, dimensions in (*((parts[part], 3) for part in matrices), *((bias, 2) for bias in biases)):
        if len(tensor.shape) != dimensions:
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} has the shape {list(tensor.shape)}, {dimensions} dimensions expected"
            )
    return ExpertWeights(*(parts[part].packed_experts(parts.get(f"{part}_bias")) for part in matrices))


def _finish_config(
    path: str, config: dict[str, Any], metadata: dict[str, Any], dense: dict[str, CheckpointTensor]
) -> None:
    embedding = dense.get("model.embed_tokens.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{path}: tensor 'token_embd.weight' is missing or not a matrix")
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "lm_head.weight" not in dense
    for kind, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        config[f"{kind}_token_id"] = (
            token_id if isinstance(token_id, int) and 0 <= token_id < embedding.shape[0] else None
        )
