"""Opens a Hugging Face folder: config.json and safetensors, single or sharded.

A safetensors file is a length, a JSON header and raw little-endian data. The header is not trusted. Tensors are views
of the mapped file. Experts are stored one by one (`experts.3.up_proj.weight`, Mixtral's `w1 w3 w2`) or fused
(`experts.gate_up_proj`); nothing is copied in either case, unless fused ones are transposed. Weights that are quantised
in a way of their own are converted whenever they are read. Knows no GGUF.
"""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from ktqueue.core.codec import CodecError, loads
from ktqueue.core.errors import CheckpointError
from ktqueue.core.short_repr import short_repr
from ktqueue.families.family import Family
from ktqueue.families.table import family_of_type
from ktqueue.loading.checkpoint import DOWN, GATE_UP, Checkpoint, CheckpointTensor, check_packed
from ktqueue.loading.huggingface.causal_models import CAUSAL_MODELS
from ktqueue.loading.huggingface.fused_experts import split_experts
from ktqueue.loading.huggingface.hub_files import MODELOPT_FILE
from ktqueue.loading.huggingface.ling import is_ling, ling_config, ling_tensors
from ktqueue.loading.huggingface.mimo import MODEL_TYPES as MIMO_TYPES
from ktqueue.loading.huggingface.mimo import mimo_config
from ktqueue.loading.huggingface.next_tokens import next_token_names
from ktqueue.loading.huggingface.quantisation import read_quantisation
from ktqueue.loading.huggingface.quantised_tensors import join_quantised
from ktqueue.loading.huggingface.step import MODEL_TYPE as STEP_TYPE
from ktqueue.loading.huggingface.step import step_tensors
from ktqueue.loading.huggingface.text_part import OUTSIDE_BASE, missing_prefix, text_part
from ktqueue.loading.huggingface.transposed_experts import (
    BLOCKS,
    PARTS,
    SCALES,
    interleaved_experts,
    transposed_experts,
)
from ktqueue.loading.json_file import optional_json, read_json
from ktqueue.loading.mapped_file import map_file
from ktqueue.loading.single_experts import stack_experts
from ktqueue.loading.unsupported import check_model_type
from ktqueue.loading.weight_formats import Bytes
from ktqueue.operators.kv_cache import CacheScale
from ktqueue.operators.packed import ExpertWeights, PackedExperts

MAX_HEADER = 100 << 20  # bytes; the format's own limit
MAX_DIMENSIONS, MAX_NAME, MAX_DTYPE = 8, 1024, 64  # of a shape, characters of a name and of a type; more is damage
_EXPERT = re.compile(
    r"(?P<module>.+\.experts)\.(?P<index>[0-9]{1,9})\.(?P<part>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
)
_PARTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
_SHARD = re.compile(r"[^/]{1,240}\.safetensors")
_UNUSED = re.compile(r"rotary_emb\.inv_freq$")
"""Frequencies in old files, which are always computed."""
_BY_LAYER = ("num_experts", "moe_topk")
_OTHERS = {
    "adapter_model.safetensors": "is an adapter: merge it with its model first",
    "consolidated*.safetensors": "is in Mistral's own layout, which is not read",
    **dict.fromkeys(
        ("*.bin", "*.pt", "*.pth"), "is not read, because a pickle can run code: convert it to safetensors"
    ),
}
"""Files of weights that are not read, and why."""
_CACHE_SCALE = re.compile(r"(.+)\.self_attn\.(?:(?:attn\.|[kv]_proj\.)?(kv|k|v)_scale|(k|v)_proj\.output_scale)")
"""Scales of a float8 cache. compressed-tensors: `self_attn.k_scale`; ModelOpt: `self_attn.k_proj.k_scale`; Quark:
`self_attn.k_proj.output_scale`; the same with v. An older name for both is `self_attn.kv_scale`."""


def open_folder(folder: Path, *, next_tokens: bool = False) -> Checkpoint:
    """Open a Hugging Face folder. Raises CheckpointError that names the file or tensor at fault.

    `next_tokens`: the checkpoint holds only the layers that predict further tokens, which follow the model's own.
    """
    config, text_name = text_part(read_json(folder / "config.json"))
    if is_ling(config):
        config = ling_config(config, str(folder))
    elif config.get("model_type") in MIMO_TYPES:
        config = mimo_config(config, str(folder))
    family = family_of_type(config.get("model_type"))
    if family.model_type and family.model_type != config["model_type"]:
        config = _without_alias(config, family)
    config |= _equal_in_all_layers(config)
    if type(tuned := config.get("attn_temperature_tuning")) is int:  # 4 in older folders of Llama 4, for true
        config["attn_temperature_tuning"] = bool(tuned)
    check_model_type(config, str(folder))
    quantisation = read_quantisation(_modelopt_config(folder) | config, str(folder))
    config.pop("quantization_config", None)  # of a kind that is read here
    tensors: dict[str, CheckpointTensor] = {}
    maps: list[Bytes] = []
    next_token_name = next_token_names(config)
    module_name = module_name_function(config)
    stored: list[tuple[Path, CheckpointTensor, str]] = []
    for file in weight_files(folder):
        maps.append(map_file(file))
        read = _read(file, maps[-1], raw=quantisation is not None)
        stored += [(file, tensor, name) for tensor in read if (name := text_name(tensor.name)) is not None]
    prefix = missing_prefix([name for _, _, name in stored], config.get("model_type"))
    for file, tensor, found in stored:
        whole = found if found.startswith(OUTSIDE_BASE) else prefix + found
        if ((layer_name := next_token_name(whole)) is not None) != next_tokens:
            continue
        name = module_name(layer_name or whole)
        if name in tensors:
            raise CheckpointError(f"{file}: tensor {tensor.name!r} appears twice")
        if not _UNUSED.search(name):
            tensors[name] = tensor
    if config.get("model_type") == STEP_TYPE:
        tensors = step_tensors(tensors, str(folder))
    scales: dict[str, CacheScale] = {}
    if quantisation is not None:
        scales = _stated_scales(str(folder), tensors)
        tensors = join_quantised(str(folder), split_experts(tensors), quantisation)
    if is_ling(config):
        tensors = ling_tensors(tensors, config, str(folder))
    dense, experts = _group(folder, tensors, family)
    return Checkpoint(str(folder), config, dense, experts, maps, scales, prefix)


def _without_alias(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return the config with the model type of the family. A position of text is one number, not three for time, height
    and width."""
    plain = {**config, "model_type": family.model_type, **family.fixed}
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := plain.get(name), dict):
            plain[name] = {key: value for key, value in rope.items() if key[:5] != "mrope" != value}
    return plain


def _modelopt_config(folder: Path) -> dict[str, Any]:
    """Return what a file of ModelOpt's says of the weights. Its older folders say it there, and not in config.json."""
    stated = optional_json(folder / MODELOPT_FILE).get("quantization")
    return {"quantization_config": {**stated, "quant_method": "modelopt"}} if isinstance(stated, dict) else {}


def _equal_in_all_layers(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values that a config states once for each layer, if all layers have the same: Hunyuan-A13B's."""
    lists = {name: stated for name in _BY_LAYER if isinstance(stated := config.get(name), list)}
    return {name: stated[0] for name, stated in lists.items() if stated and stated.count(stated[0]) == len(stated)}


def _stated_scales(source: str, tensors: Mapping[str, CheckpointTensor]) -> dict[str, CacheScale]:
    """Return what the tensors state, by the name of the layer's module. A number x is stored as x / scale.

    A key without a value, or the reverse, states nothing. Scales of heads count as their largest.
    source: the beginning of messages. Raises CheckpointError for a scale that is no positive number.
    """
    found: dict[str, dict[str, float]] = {}
    for name, tensor in tensors.items():
        if (match := _CACHE_SCALE.fullmatch(name)) is None:
            continue
        layer, *parts = match.groups()
        largest = float(tensor.decode(torch.float32).max()) if tensor.quant in ("F32", "F16", "BF16") else math.nan
        if not 0 < largest < math.inf:
            raise CheckpointError(f"{source}: tensor {name!r} must be a positive number: it scales keys or values")
        for part in parts[0] or parts[1]:
            found.setdefault(layer, {})[part] = largest
    return {layer: CacheScale(scale["k"], scale["v"]) for layer, scale in found.items() if scale.keys() == {"k", "v"}}


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a folder's weights: the single file if there is one, or those of the index.

    transformers has the same precedence. Without both, all safetensors are taken, as by vLLM, except those in Mistral's
    own layout and adapters. Raises CheckpointError.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if weights := [file for file in files if not file.name.startswith(("consolidated", "adapter"))]:
            return weights
        _refuse_others(folder)
        return [single]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must map tensor names to files")
    names = sorted(set(weight_map.values()))
    if wrong := [name for name in names if not (_SHARD.fullmatch(name) and name.isprintable())]:
        raise CheckpointError(
            f"{index}: weight_map must name .safetensors files of this folder, got {short_repr(wrong[0])}"
        )
    return [folder / name for name in names]


def _refuse_others(folder: Path) -> None:
    """Raise CheckpointError that names what a folder without weights in safetensors has instead, if it has any."""
    for ending, problem in _OTHERS.items():
        if found := sorted(folder.glob(ending)):
            raise CheckpointError(f"{folder}: there are no weights in safetensors, and {found[0].name} {problem}")


def _read(path: Path, file: Bytes, *, raw: bool) -> list[CheckpointTensor]:
    size = int.from_bytes(bytes(file[:8]), "little")
    if file.size < 8 or size > min(MAX_HEADER, file.size - 8):
        raise CheckpointError(f"{path}: truncated or corrupt: the header length is {size} bytes")
    try:
        header = loads(bytes(file[8 : 8 + size]))
    except CodecError as error:
        raise CheckpointError(f"{path}: corrupt header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: corrupt header: expected a JSON object")
    header.pop("__metadata__", None)
    tensors = [_tensor(path, name, entry, 8 + size, file, raw) for name, entry in header.items()]
    places = [(*(8 + size + offset for offset in entry["data_offsets"]), name) for name, entry in header.items()]
    end = check_packed(path, places, 8 + size)
    if end != file.size:
        raise CheckpointError(f"{path}: corrupt: the file has {file.size} bytes, but its tensors end at {end}")
    return tensors


def _tensor(path: Path, name: str, entry: Any, start: int, file: Any, raw: bool) -> CheckpointTensor:
    if not (0 < len(name) <= MAX_NAME and name.isprintable()):
        raise CheckpointError(
            f"{path}: corrupt: a tensor's name must have 1 to {MAX_NAME} printable characters, got {short_repr(name)}"
        )
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        all_integers = all(type(n) is int for n in (*shape, begin, end))  # JSON's true is an int to isinstance
        is_valid = all_integers and min(shape, default=1) >= 0 and isinstance(dtype, str)
        is_valid = is_valid and len(shape) <= MAX_DIMENSIONS and len(dtype) <= MAX_DTYPE and dtype.isidentifier()
    except (KeyError, TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise CheckpointError(f"{path}: corrupt header entry of tensor {name!r}")
    if min(shape, default=1) == 0:
        raise CheckpointError(f"{path}: tensor {name!r} has an empty dimension: {list(shape)}")
    raw = raw or name.endswith((BLOCKS, SCALES))
    tensor = CheckpointTensor.from_file(path, name, dtype, shape or (1,), start + begin, file, raw=raw)
    if tensor.data.size != end - begin:
        raise CheckpointError(
            f"{path}: tensor {name!r}: {end - begin} bytes are stored, but its shape needs {tensor.data.size}"
        )
    return tensor


def _group(
    folder: Path, tensors: dict[str, CheckpointTensor], family: Family
) -> tuple[dict[str, CheckpointTensor], dict[str, ExpertWeights]]:
    """Split tensors into dense ones and the experts of each module, in expert order."""
    dense: dict[str, CheckpointTensor] = {}
    single: dict[str, dict[str, dict[int, CheckpointTensor]]] = {}
    fused: dict[str, dict[str, CheckpointTensor]] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if match := _EXPERT.fullmatch(name):
            parts = single.setdefault(match["module"], {"gate": {}, "up": {}, "down": {}})
            if (existing := parts[_PARTS[match["part"]]].setdefault(int(match["index"]), tensor)) is not tensor:
                raise CheckpointError(
                    f"{folder}: tensors {existing.name!r} and {name!r} are the same weights of one expert"
                )
        elif module.endswith(".experts") and part in (PARTS if family.experts_in_turns else (GATE_UP, DOWN)):
            fused.setdefault(module, {})[part] = tensor
        else:
            dense[name] = tensor
    if both := sorted(single.keys() & fused.keys()):
        raise CheckpointError(f"{folder}: {both[0]} has its weights twice, expert by expert and fused")
    experts = {module: stack_experts(str(folder), module, parts) for module, parts in single.items()}
    for module, matrices in fused.items():
        from_parts = _from_fused
        if family.experts_in_turns:
            from_parts = interleaved_experts
        elif family.transposed_experts and not _are_rows_first(matrices):
            from_parts = transposed_experts
        experts[module] = from_parts(folder, module, matrices)
    return dense, experts


def _are_rows_first(parts: Mapping[str, CheckpointTensor]) -> bool:
    """Whether fused experts are not transposed. transformers 5 saves Qwen3-VL-MoE so, which is published transposed."""
    gate_up, down = (parts[name].shape if name in parts else () for name in (GATE_UP, DOWN))
    return len(gate_up) == len(down) == 3 and gate_up[2] == down[1]


def _from_fused(folder: Path, module: str, parts: dict[str, CheckpointTensor]) -> ExpertWeights:
    if missing := {GATE_UP, DOWN} - set(parts):
        raise CheckpointError(f"{folder}: {module} has no {' and no '.join(sorted(missing))}")
    gate_up, down = parts[GATE_UP], parts[DOWN]
    if len(gate_up.shape) != 3 or len(down.shape) != 3 or gate_up.shape[1] % 2:
        raise CheckpointError(f"{folder}: {module}: fused experts must be [experts, rows, columns]")
    return split_fused(gate_up, down)


def split_fused(gate_up: CheckpointTensor, down: CheckpointTensor) -> ExpertWeights:
    """Split fused [experts, 2 * rows, columns] (gate rows first) and [experts, rows, columns] into three stacks of
    views."""
    _, rows, columns = gate_up.shape
    halves = [matrix.reshape(2, -1) for matrix in gate_up.expert_views()]
    return ExpertWeights(
        gate=PackedExperts(gate_up.quant, rows // 2, columns, [half[0] for half in halves]),
        up=PackedExperts(gate_up.quant, rows // 2, columns, [half[1] for half in halves]),
        down=down.packed_experts(),
    )


def module_name_function(config: Mapping[str, Any]) -> Callable[[str], str]:
    """Return a function that maps a tensor's name in a file to its name in the causal language model of `config`.

    For some models these names differ; they are renamed as transformers does it. Conversions that make one tensor from
    several are ignored: experts are put together as they are read, and a tensor without a place is refused later.
    """
    model_type = config.get("model_type")
    class_name = CAUSAL_MODELS.get(model_type) if isinstance(model_type, str) else None
    conversions: list[Any] | None = None
    for key in (class_name, model_type):  # transformers' order
        if isinstance(key, str) and conversions is None:
            conversions = get_checkpoint_conversion_mapping(key)  # type: ignore[no-untyped-call]
    steps = [step for step in conversions or () if isinstance(step, WeightRenaming)]

    def rename(name: str) -> str:
        for step in steps:
            name, _ = step.rename_source_key(name)
        return name

    return rename
