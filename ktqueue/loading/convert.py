"""Converts a Hugging Face folder to one GGUF file that is enough to serve the model.

The file holds weights, config, tokenizer and chat template. It is written tensor by tensor and expert by expert, so at
most one packed tensor and one float32 matrix are in memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ktqueue.core.errors import CheckpointError
from ktqueue.families.family import Family
from ktqueue.loading.checkpoint import BIAS, DOWN, GATE_UP, Checkpoint, Progress, decode_rows, permute
from ktqueue.loading.gguf.families import family_of_model_type
from ktqueue.loading.gguf.gemma4 import gemma4_factors
from ktqueue.loading.gguf.importance import ImportanceMatrix, read_importance
from ktqueue.loading.gguf.latent import split_latent_matrix
from ktqueue.loading.gguf.library import ROUTERS, ROW_VECTORS, TensorNameMap
from ktqueue.loading.gguf.linear import CONVOLUTION, Change, file_parts
from ktqueue.loading.gguf.metadata import metadata_from_config, with_multi_token_layers
from ktqueue.loading.gguf.mixes import BASES, Mix, fitting_format
from ktqueue.loading.gguf.rope import FACTORS_TENSOR, LIST_TENSORS, llama3_factors, rope_of_config
from ktqueue.loading.gguf.vocabulary import to_metadata
from ktqueue.loading.gguf.writer import GgufWriter, TensorDescription
from ktqueue.loading.huggingface.checkpoint import open_folder
from ktqueue.loading.huggingface.next_tokens import check_complete, layer_count
from ktqueue.loading.load import build_checked_skeleton
from ktqueue.loading.quantize import WRITABLE, quantize
from ktqueue.loading.tokenizer.files import vocabulary_of_folder
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer
from ktqueue.loading.weight_formats import Bytes, Floats
from ktqueue.operators.packed import PackedExperts

_SIZES = (
    *("vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "linear_value_head_dim"),
)
"""Config keys of sizes that are read beside those of the layout's fields."""
_QUERY, _BEHIND_QUERY = "q_proj.weight", ("k_proj.weight", "v_proj.weight")


@dataclass(frozen=True, slots=True)
class _OutputTensor(TensorDescription):
    """One tensor to write. Exactly one of `read`, which returns its values, and `stack` is set."""

    read: Callable[[], Floats] | None = None
    stack: PackedExperts | None = None


def convert(
    source: Path,
    target: Path,
    *,
    experts: str = "",
    dense: str = "f16",
    mix: str = "",
    importance: Path | None = None,
    name: str | None = None,
    next_tokens: bool = True,
    license: str | None = None,  # noqa: A002  (the name of the metadata key)
    progress: Progress | None = None,
) -> str:
    """Convert the model in the folder `source` and write it to `target`.

    `experts` and `dense` are the formats of expert matrices and of other matrices, of WRITABLE. `mix`, one of
    `mixes.BASES`, sets the format of each matrix instead, as llama.cpp does. Norms, biases and routers stay f32. A
    matrix whose rows are not a whole number of blocks gets the format that `fitting_format` names.
    `importance` is a file of llama-imatrix, whose columns weight the errors of quantisation. Raises CheckpointError
    that names what cannot be converted. `target` appears only if no error is raised.
    Layers that predict further tokens are written if `next_tokens` is true. If GGUF has no names for them, a line is
    returned that says what is left out.
    """
    types = {"mix": mix.upper()} if mix else {"experts": experts.upper(), "dense": dense.upper()}
    for role, quant in types.items():
        if quant not in (known := BASES if mix else WRITABLE):
            raise CheckpointError(
                f"cannot write {role} as {quant.lower()}; known: {', '.join(known).lower()}", param=role
            )
    checkpoint = open_folder(source)
    config = checkpoint.config()
    family = family_of_model_type(str(config.get("model_type")), str(source))
    built, _ = build_checked_skeleton(checkpoint, torch.float32)  # a model that cannot be loaded is not written
    config = _with_defaults(config, built, family)
    load_tokenizer(str(source))
    metadata: dict[str, Any] = {"general.name": name or source.name}
    if license:
        metadata["general.license"] = license
    metadata |= metadata_from_config(family, config, str(source))
    metadata[f"{family.layout.architecture}.vocab_size"] = int(config["vocab_size"])
    metadata |= to_metadata(vocabulary_of_folder(source, config["vocab_size"]))
    outputs = list(_output_tensors(checkpoint, family, config, types))
    if family.layout.rope_factors or family.layout.rope_lists:
        outputs = [*_rope_factors(config, str(source)), *outputs]
    if family.heads_differ:
        factors = gemma4_factors(config, str(source))
        outputs = [_OutputTensor(FACTORS_TENSOR, "F32", factors.shape, lambda: factors), *outputs]
    further, count, left_out = _next_token_outputs(checkpoint, family, config, types) if next_tokens else ([], 0, "")
    if count:
        outputs += further
        metadata = with_multi_token_layers(family.layout, metadata, count)
    shapes = {output.name: output.shape for output in outputs}
    if columns := read_importance(importance) if importance else None:
        columns.check(shapes)
    if mix:
        outputs = _mixed(
            outputs, Mix.of_model(types["mix"], _with_layers(config, count), shapes, has_importance=columns is not None)
        )
    file_type = types.get("mix") or types["experts" if family.layout.has_experts else "dense"]
    with GgufWriter(target, family.layout.architecture, file_type) as writer:
        writer.add_metadata(metadata)
        writer.write_all(outputs, lambda output: _packed(str(source), output, columns), progress)
    checkpoint.close()
    return left_out


def _with_defaults(config: dict[str, Any], built: Any, family: Family) -> dict[str, Any]:
    """Return the config of a file with transformers' values of the sizes that it does not state.

    Gemma 3's have few. built: the config of the model's class.
    """
    names = {name: (name,) for name in _SIZES} | {
        entry.config: (entry.config, *entry.aliases) for entry in family.layout.fields if entry.required
    }
    missing = (name for name, spellings in names.items() if all(config.get(each) is None for each in spellings))
    return config | {name: value for name in missing if (value := getattr(built, name, None)) is not None}


def _with_layers(config: dict[str, Any], count: int) -> dict[str, Any]:
    """Return the config with `count` layers more."""
    return {**config, "num_hidden_layers": config["num_hidden_layers"] + count}


def _next_token_outputs(
    model: Checkpoint, family: Family, config: dict[str, Any], types: dict[str, str]
) -> tuple[list[_OutputTensor], int, str]:
    """Return the tensors of the layers that predict further tokens, how many layers, and what is left out and why.

    model: the checkpoint of the model's own layers.
    """
    count = 0
    try:
        checkpoint = open_folder(Path(model.path), next_tokens=True)
        count = layer_count(config, checkpoint.names())
        if not count:
            return [], 0, ""
        if not family.layout.next_tokens:
            raise CheckpointError(
                f"GGUF's {family.layout.architecture} has no place for {'it' if count == 1 else 'them'}"
            )
        check_complete(_shapes(model), _shapes(checkpoint))
        return [*_output_tensors(checkpoint, family, _with_layers(config, count), types)], count, ""
    except CheckpointError as error:
        what = "1 layer that predicts further tokens is" if count == 1 else "layers that predict further tokens are"
        return [], 0, f"{what} left out: {error}"


def _shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    return {name: checkpoint.shape(name) for name in checkpoint.names()}


def _output_tensors(
    checkpoint: Checkpoint, family: Family, config: dict[str, Any], types: dict[str, str]
) -> Iterator[_OutputTensor]:
    layout = family.layout
    names = TensorNameMap(layout, config["num_hidden_layers"])

    def find(name: str) -> str:
        found = names.find(name)
        if found is None:
            raise CheckpointError(
                f"{checkpoint.path}: tensor {name!r} does not exist in the {layout.architecture} architecture"
            )
        return found

    modules = checkpoint.expert_modules()
    fused = {f"{module}.{part}{ending}" for module in modules for part in (GATE_UP, DOWN) for ending in ("", BIAS)}
    for name in checkpoint.names():
        if name in fused or (layout.fused_attention and name.endswith(_BEHIND_QUERY)):
            continue
        if layout.fused_attention and name.endswith(_QUERY):
            yield _fused_attention(checkpoint, name, find(name), types)
            continue
        for part, shape, change in _parts(name, checkpoint.shape(name), family, config):
            in_float32 = len(shape) == 1 or part.endswith((*ROUTERS, *ROW_VECTORS, CONVOLUTION))
            yield _OutputTensor(
                find(part),
                "F32" if in_float32 else fitting_format(types.get("dense", "F16"), shape[-1]),
                shape[1:] if part.endswith(ROW_VECTORS) else shape,
                partial(_values, checkpoint, name, change),
            )
    for module in modules:
        weights = checkpoint.experts(module)
        for part, stack in (("gate", weights.gate), ("up", weights.up), ("down", weights.down)):
            shape = (len(stack.data), stack.rows, stack.columns)
            quant = fitting_format(types.get("experts", "F16"), stack.columns)
            yield _OutputTensor(find(f"{module}.{part}_proj.weight"), quant, shape, stack=stack)
            if stack.bias is not None:
                read = partial(np.copy, stack.bias)
                yield _OutputTensor(find(f"{module}.{part}_proj.bias"), "F32", stack.bias.shape, read)


def _fused_attention(checkpoint: Checkpoint, name: str, query: str, types: dict[str, str]) -> _OutputTensor:
    """Return query, key and value as one tensor. name, query: of the matrix of queries, here and in files."""
    parts = [name, *(name.removesuffix(_QUERY) + part for part in _BEHIND_QUERY)]
    shapes = [checkpoint.shape(part) for part in parts]
    shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def values() -> Floats:
        return np.concatenate([_values(checkpoint, part, None) for part in parts])

    quant = fitting_format(types.get("dense", "F16"), shape[-1])
    return _OutputTensor(query.replace(".attn_q.", ".attn_qkv."), quant, shape, values)


def _rope_factors(config: dict[str, Any], source: str) -> Iterator[_OutputTensor]:
    if (rope := rope_of_config(config))["rope_type"] == "llama3":
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        factors = llama3_factors(rope, head_dim, source)
        yield _OutputTensor(FACTORS_TENSOR, "F32", factors.shape, lambda: factors)
    elif rope["rope_type"] == "longrope":
        for parameter, name in LIST_TENSORS.items():
            divisors = np.array(rope[parameter], dtype=np.float32)
            yield _OutputTensor(name, "F32", divisors.shape, partial(np.copy, divisors))


def _values(checkpoint: Checkpoint, name: str, change: Change | None) -> Floats:
    values: Floats = checkpoint.decode(name, torch.float32).numpy()
    return change(values) if change else values


def _parts(
    name: str, shape: tuple[int, ...], family: Family, config: dict[str, Any]
) -> list[tuple[str, tuple[int, ...], Change | None]]:
    """Return what a file holds of a tensor: name and shape of each part, and what is done to its values."""
    if family.linear:
        return [*file_parts(family.layout, name, shape, config)]
    if family.layout.two_parts and name.endswith("self_attn.kv_b_proj.weight"):
        return [*split_latent_matrix(name, shape, config)]
    if family.layout.permuted and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config["num_attention_heads" if name.endswith("q_proj.weight") else "num_key_value_heads"]
        return [(name, shape, lambda values: permute(values, heads))]  # into GGUF's rotary order
    if (family.layout.gemma or family.layout.limits) and name.endswith("norm.weight"):
        return [(name, shape, lambda values: values + np.float32(1))]
    return [(name, shape, None)]


def _mixed(outputs: list[_OutputTensor], mix: Mix) -> list[_OutputTensor]:
    """Return the tensors with the formats of the mix. Those in float32 stay so."""
    return [
        output if output.quant == "F32" else replace(output, quant=mix.format_of(output.name, output.shape[-1]))
        for output in outputs
    ]


def _packed(source: str, output: _OutputTensor, importance: ImportanceMatrix | None) -> Bytes:
    columns = importance.of_tensor(output.name) if importance else None
    try:
        return _quantized(output, columns)
    except ValueError as error:
        raise CheckpointError(f"{source}: tensor {output.name!r} as {output.quant}: {error}") from error


def _quantized(output: _OutputTensor, importance: Floats | None) -> Bytes:
    """Return the bytes of a tensor. `importance`: [1 or experts, columns], or None."""
    if output.read is not None:
        values = output.read()
        if importance is not None and len(importance) > 1:  # the heads of a part of latent attention
            heads = zip(values, importance, strict=True)
            return np.concatenate([quantize(matrix, output.quant, columns) for matrix, columns in heads])
        columns = None if importance is None else importance[0]
        return quantize(values.reshape(-1, values.shape[-1]), output.quant, columns)
    stack = output.stack
    assert stack is not None
    by_expert = [None] * len(stack.data) if importance is None else [*importance]
    return np.stack(
        [
            quantize(decode_rows(data, stack.quant, stack.columns), output.quant, columns)
            for data, columns in zip(stack.data, by_expert, strict=True)
        ]
    )
