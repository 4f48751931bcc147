"""Reports the modules of a model, where each of them will be and how many bytes it has, without loading weights."""

import math
import re
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ktqueue.core.errors import CheckpointError, KtqueueError
from ktqueue.families.table import family_of_type
from ktqueue.loading.checkpoint import Checkpoint
from ktqueue.loading.load import CardFacts, PreparedModel, card_facts, experts_per_token, kv_layout, prepare
from ktqueue.loading.plan import find_replaced
from ktqueue.loading.rules import KEEP
from ktqueue.loading.skeleton import tied_names
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer
from ktqueue.loading.weight_formats import loaded_format, tensor_bytes
from ktqueue.operators.gpu.dense import DEFAULT_DENSE, ONE_PRODUCT, stays_quantised
from ktqueue.operators.gpu.kernels.expert_warpgroups import fits
from ktqueue.operators.gpu.kernels.panel_layout import ExpertRecord
from ktqueue.operators.latent_shape import latent_shape
from ktqueue.operators.latent_weights import up_matrix_bytes
from ktqueue.operators.native import packed_bytes
from ktqueue.operators.rotary import rotary_kinds, rotary_pairs

ON_BOTH_SIDES = "GpuDecoder"
"""The operator with dense weights on its device, held as its option `dense` says, and with experts packed for the CPU.
A tied head is held once."""
WHOLE = "CpuDecoder"
"""The operator that packs all matrices, and the absorbed one in two parts."""
LATENT = "LatentAttention"
"""The operator that packs its matrices only in float32 on the CPU, and never the absorbed one."""
ABSORBED = ".kv_b_proj"
"""The matrix of latent attention that is applied to queries and results: decoded, in whole or in part."""

_INDEX = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class ReportRow:
    """Like modules of all layers together.

    `name` has `*` for the layer. `quants` are the storage formats in the file, `file_bytes` the bytes there.
    `device_bytes` are the bytes on `device` once loaded, `largest_bytes` the same for the largest of the modules.
    """

    name: str
    count: int
    class_name: str
    operator: str
    device: str
    quants: tuple[str, ...]
    file_bytes: int
    device_bytes: int
    largest_bytes: int


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The plan of a model with its bytes.

    `source` is the file or folder. `rows` are in model order. `device_bytes` are the bytes of weights on each device.
    `refusal`: why loading would fail, or None. `cache_token_bytes` are the bytes of the cache per token, in
    `cache_layers` layers, `state_bytes` those of a sequence's states in layers with linear attention.
    `caches_latents`: whether keys are latents.
    `position_bytes` are the bytes of rotary tables on a GPU for each position. For `original_length` see KVLayout.
    `movable_bytes` are those of experts on the CPU that a GPU may hold too, `movable_layer_bytes` those of the largest
    layer, `decoded_layer_bytes` what a GPU needs to decode these: 0 if it does not. `fits_warpgroups`: whether
    expert_warpgroups.py multiplies them all, if gate and up have one format.
    """

    source: str
    facts: CardFacts
    layers: int
    parameters: int
    rows: list[ReportRow]
    device_bytes: dict[str, int]
    refusal: str | None
    hidden: int
    experts_per_token: int
    cache_token_bytes: int
    cache_layers: int
    caches_latents: bool
    state_bytes: int
    position_bytes: int
    original_length: int
    movable_bytes: int
    movable_layer_bytes: int
    decoded_layer_bytes: int
    fits_warpgroups: bool


def report_model(
    path: str,
    *,
    rules: str | None = None,
    tokenizer: str | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
) -> ModelReport:
    """Return the report of a model file for a rule file.

    `tokenizer` is a path if it is not part of the model. `cache_dtype` defaults to `dtype`. Raises CheckpointError and
    RuleError as loading would. If the plan cannot be carried out, the model cannot be run or the tokenizer cannot be
    built, the report's `refusal` says so instead.
    """
    prepared = prepare(path, rules=rules, device=device, dtype=dtype)
    refusal: KtqueueError | None = prepared.refusal
    if refusal is None:
        try:
            load_tokenizer(tokenizer or path)
        except CheckpointError as error:
            refusal = error
    rows = list(_rows(prepared))
    totals: dict[str, int] = {}
    for row in rows:
        totals[row.device] = totals.get(row.device, 0) + row.device_bytes
    movable = [row for row in rows if (row.operator, row.device) == (ON_BOTH_SIDES, "cpu")]
    checkpoint, layout = prepared.checkpoint, kv_layout(prepared.config, 1, cache_dtype or dtype)
    return ModelReport(
        source=checkpoint.path,
        facts=card_facts(prepared.config, checkpoint),
        layers=int(prepared.config.num_hidden_layers),
        parameters=sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names()),
        rows=rows,
        device_bytes=totals,
        refusal=None if refusal is None else refusal.message,
        hidden=int(prepared.config.hidden_size),
        experts_per_token=experts_per_token(prepared.config),
        cache_token_bytes=layout.page_bytes,
        cache_layers=layout.layers,
        caches_latents=layout.latent is not None,
        state_bytes=layout.state_bytes,
        position_bytes=_position_bytes(prepared),
        original_length=layout.original_length,
        movable_bytes=sum(row.device_bytes for row in movable),
        movable_layer_bytes=max((row.largest_bytes for row in movable), default=0),
        decoded_layer_bytes=_decoded_bytes(prepared) if movable and prepared.dtype == torch.bfloat16 else 0,
        fits_warpgroups=_fits_warpgroups(prepared, movable),
    )


def _expert_matrices(prepared: PreparedModel) -> list[list[torch.Size]]:
    """Shapes [experts, rows, columns] of each layer with experts, in any order."""
    modules = (module for name, module in prepared.skeleton.named_modules() if name.endswith(".experts"))
    return [[one.shape for one in module.parameters() if one.dim() == 3] for module in modules]


def _decoded_bytes(prepared: PreparedModel) -> int:
    """Bytes of gate and up of the layer with the most weights of experts: down is decoded to the same memory later."""
    weights = (sum(shape.numel() for shape in shapes) for shapes in _expert_matrices(prepared))
    return max(weights, default=0) * 2 // 3 * prepared.dtype.itemsize


def _fits_warpgroups(prepared: PreparedModel, rows: Iterable[ReportRow]) -> bool:
    sizes = {size for shapes in _expert_matrices(prepared) for shape in shapes for size in shape[1:]}
    quants = {loaded_format(quant) for row in rows for quant in row.quants}
    return all(fits(ExpertRecord(quant, quant, quant, size, size)) for quant in quants for size in sizes)


def _position_bytes(prepared: PreparedModel) -> int:
    """Bytes of cosines and sines of a position, and of the growth of queries; 0 for models without rotary tables."""
    if all(replacement.op != ON_BOTH_SIDES for replacement in prepared.plan.replacements):
        return 0
    rotary = prepared.skeleton.get_submodule("model.rotary_emb")
    kinds = rotary_kinds(rotary)
    family = family_of_type(prepared.config.model_type)
    growth = 4 if family.chunked or (family.growing and not family.latent) else 0
    return 2 * 4 * max(1, len(kinds)) * max(rotary_pairs(rotary, kinds)) + growth


def _rows(prepared: PreparedModel) -> Iterable[ReportRow]:
    skeleton, checkpoint, plan = prepared.skeleton, prepared.checkpoint, prepared.plan
    operators = {replacement.name: replacement.op for replacement in plan.replacements}
    dense = {replacement.name: replacement.options.get("dense", DEFAULT_DENSE) for replacement in plan.replacements}
    tied, checkpoint_names = tied_names(skeleton), set(checkpoint.names())
    grouped: dict[tuple[str, str, str, str], list[tuple[str, int, int]]] = {}
    modules: dict[tuple[str, str, str, str], list[int]] = {}  # bytes of each module
    for name, module in skeleton.named_modules():
        ancestor = find_replaced(name, operators)
        operator = KEEP if ancestor is None else operators[ancestor]
        own_tensors = [f"{name}.{key}" for key, _ in (*module.named_parameters(recurse=False), *_kept_buffers(module))]
        own_tensors = [tensor for tensor in own_tensors if operator not in (KEEP, ON_BOTH_SIDES) or tensor not in tied]
        if not own_tensors:
            continue
        device, packed, twice = plan.device_of(name), operator != KEEP, False
        if operator == ON_BOTH_SIDES:
            packed = name.endswith(".experts")
            device = "cpu" if packed else device
            is_linear = isinstance(module, torch.nn.Linear | torch.nn.Embedding) and not name.endswith(ABSORBED)
            if ancestor is not None and dense[ancestor] != "dequantised" and is_linear:
                product = _product(own_tensors[0], checkpoint_names)
                packed = all(stays_quantised(checkpoint.quant(weight)) for weight in product)
                if dense[ancestor] == "both":
                    multiplies = isinstance(module, torch.nn.Linear) or own_tensors[0] in tied.values()
                    twice = packed and multiplies and prepared.dtype != torch.float32
                    packed = False
        elif operator == LATENT:
            floats = all(parameter.dtype == torch.float32 for parameter in module.parameters(recurse=False))
            packed = device == "cpu" and floats and not name.endswith(ABSORBED)
        key = (_INDEX.sub(".*", name), type(module).__name__, operator, device)
        modules.setdefault(key, []).append(0)
        for tensor in own_tensors:
            source = tied.get(tensor, tensor)
            held_bytes = _held(module, tensor, source, checkpoint, packed=packed, panels=operator == ON_BOTH_SIDES)
            if twice and len(checkpoint.shape(source)) > 1:
                held_bytes += _held(module, tensor, source, checkpoint, packed=True, panels=True)
            if operator == WHOLE and name.endswith(ABSORBED):
                shape = latent_shape(skeleton.get_submodule(name.removesuffix(ABSORBED)))
                both = checkpoint.part_quants(source)
                parts = both and (loaded_format(both[0]), loaded_format(both[1]))
                held_bytes = up_matrix_bytes(loaded_format(checkpoint.quant(source)), parts, shape)
            if operator in (WHOLE, ON_BOTH_SIDES) and name.endswith(".v_proj"):  # see operators/padded_values.py
                attention: Any = skeleton.get_submodule(name.removesuffix(".v_proj"))
                held_bytes = held_bytes * attention.head_dim // getattr(attention, "v_head_dim", attention.head_dim)
            file_bytes = checkpoint.nbytes(source) if source == tensor else 0
            grouped.setdefault(key, []).append((checkpoint.quant(source), file_bytes, held_bytes))
            modules[key][-1] += held_bytes
    for key, tensors in grouped.items():
        pattern, class_name, operator, device = key
        yield ReportRow(
            name=pattern,
            count=len(modules[key]),
            class_name=class_name,
            operator=operator,
            device=device,
            quants=tuple(sorted({quant for quant, _, _ in tensors})),
            file_bytes=sum(file_bytes for _, file_bytes, _ in tensors),
            device_bytes=sum(modules[key]),
            largest_bytes=max(modules[key]),
        )


def _product(weight: str, names: Container[str]) -> list[str]:
    """Return the weights that are multiplied as one matrix together with `weight`, including itself."""
    module, _, kind = weight.rpartition(".")
    parent, _, leaf = module.rpartition(".")
    leaves = {leaf}.union(*(group for group in ONE_PRODUCT if leaf in group))
    return [name for leaf_name in leaves if (name := f"{parent}.{leaf_name}.{kind}" if parent else weight) in names]


def _kept_buffers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    skipped = module._non_persistent_buffers_set
    return [(key, buffer) for key, buffer in module.named_buffers(recurse=False) if key not in skipped]


def _held(
    module: torch.nn.Module, tensor: str, source: str, checkpoint: Checkpoint, *, packed: bool, panels: bool
) -> int:
    """Return the bytes in memory of a tensor, decoded or packed. Packed embeddings are held in rows unless `panels`."""
    shape = checkpoint.shape(source)
    parameter: torch.Tensor = getattr(module, tensor.rpartition(".")[2])
    if not packed or (panels and len(shape) < 2):
        return math.prod(shape) * parameter.dtype.itemsize
    if isinstance(module, torch.nn.Conv1d):  # of linear attention; it is never packed
        return math.prod(shape) * torch.float32.itemsize
    if isinstance(module, torch.nn.Embedding) and not panels:
        return tensor_bytes(loaded_format(checkpoint.quant(source)), shape)
    if len(shape) < 2:
        return math.prod(shape) * torch.float32.itemsize
    return math.prod(shape[:-2]) * packed_bytes(loaded_format(checkpoint.quant(source)), *shape[-2:])
