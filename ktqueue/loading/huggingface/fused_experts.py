"""Splits the experts that a folder in FP8 has in one tensor, as Mistral 4's, into tensors of each expert.

These are `x.experts.gate_up_proj` [experts, 2 * rows, columns] and `x.experts.down_proj` [experts, rows, columns] in
float8_e4m3fn, each with scales under its name and `_scale_inv`: one for each expert, [experts, 1, 1], or one for each
block of an expert's matrix. (transformers' finegrained_fp8.py.)
"""

import re
from collections.abc import Iterator, Mapping

from ktqueue.loading.checkpoint import CheckpointTensor

_TENSOR = re.compile(r"(?P<module>.+\.experts)\.(?P<part>(?:gate_up|down)_proj(?:_scale_inv|_activation_scale)?)")
_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_SCALE = "_scale_inv"


def split_experts(tensors: Mapping[str, CheckpointTensor]) -> dict[str, CheckpointTensor]:
    """Return the tensors, with those of each expert instead of fused ones. Fused ones in another layout stay."""
    modules: dict[str, dict[str, CheckpointTensor]] = {}
    for name, tensor in tensors.items():
        if match := _TENSOR.fullmatch(name):
            modules.setdefault(match["module"], {})[match["part"]] = tensor
    split = dict(tensors)
    for module, parts in modules.items():
        if _can_split(parts):
            for part in parts:
                del split[f"{module}.{part}"]
            split.update(_of_each_expert(module, parts))
    return split


def _can_split(parts: Mapping[str, CheckpointTensor]) -> bool:
    shapes = [parts[name].shape if name in parts else () for part in _MATRICES for name in (part, part + _SCALE)]
    if any(len(shape) != 3 or shape[0] != shapes[0][0] for shape in shapes):
        return False
    gate_up, scales, down, _ = shapes
    is_float8 = all(parts[part].quant == "F8_E4M3" for part in _MATRICES)
    # Rows come first, and no scale is for rows of both gate and up, unless there is only one row of scales.
    return is_float8 and gate_up[2] == down[1] and gate_up[1] % 2 == 0 and (scales[1] == 1 or scales[1] % 2 == 0)


def _of_each_expert(module: str, parts: Mapping[str, CheckpointTensor]) -> Iterator[tuple[str, CheckpointTensor]]:
    for part, names in _MATRICES.items():
        weight, scale = parts[part], parts[part + _SCALE]
        experts, rows, columns = weight.shape
        codes = weight.data.reshape(experts, len(names), -1)
        count = 1 if scale.shape[1] == 1 else len(names)  # of parts of an expert's scales
        scales = scale.data.reshape(experts, count, -1)
        for expert in range(experts):
            for place, name in enumerate(names):
                whole = f"{module}.{expert}.{name}.weight"
                yield whole, CheckpointTensor(whole, weight.quant, (rows // len(names), columns), codes[expert, place])
                shape = scale.shape[1] // count, scale.shape[2]
                stored = scales[expert, min(place, count - 1)]
                yield whole + _SCALE, CheckpointTensor(whole + _SCALE, scale.quant, shape, stored)
