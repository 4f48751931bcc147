"""Experts of a Hugging Face folder whose matrices are transposed: [experts, columns, rows].

Llama 4's have the rows of gate before those of up. gpt-oss's have them in turns, and biases. In MXFP4 matrices are not
transposed, and a matrix is two tensors: `_blocks` [experts, rows, columns / 32, 16], with two numbers of four bits in
each byte, the first in the lower half, and `_scales` [experts, rows, columns / 32], the exponents. Source:
transformers' integrations/mxfp4.py.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.checkpoint import BIAS, DOWN, GATE_UP, CheckpointTensor
from ktqueue.loading.huggingface.quantised_blocks import mxfp4_blocks, nibbles
from ktqueue.loading.single_experts import ConvertedExperts
from ktqueue.loading.weight_formats import Bytes
from ktqueue.operators.native import as_array
from ktqueue.operators.packed import ExpertWeights, Floats, PackedExperts

BLOCKS, SCALES = "_blocks", "_scales"
PARTS = tuple(f"{part}{ending}" for part in (GATE_UP, DOWN) for ending in ("", BIAS, BLOCKS, SCALES))
"""Names of the tensors of an experts module of gpt-oss."""
_GATE, _UP, _ALL = slice(0, None, 2), slice(1, None, 2), slice(None)
_BLOCK = 32  # columns of a block of MXFP4


def transposed_experts(folder: Path, module: str, parts: Mapping[str, CheckpointTensor]) -> ExpertWeights:
    """Return the experts of one module from its tensors GATE_UP and DOWN, gate first. Raises CheckpointError."""
    if missing := {GATE_UP, DOWN} - set(parts):
        raise CheckpointError(f"{folder}: {module} has no {' and no '.join(sorted(missing))}")
    rows = {part: _matrix(folder, module, part, parts)[2] for part in (GATE_UP, DOWN)}
    if rows[GATE_UP] % 2:
        raise CheckpointError(f"{folder}: {module}.{GATE_UP} must have the rows of gate and up, got {rows[GATE_UP]}")
    half = rows[GATE_UP] // 2

    def stack(part: str, chosen: slice) -> PackedExperts:
        experts, columns, _ = parts[part].shape
        data = ConvertedExperts(experts, lambda expert: _from_transposed(parts, part, expert, chosen))
        return PackedExperts(parts[part].quant, len(range(rows[part])[chosen]), columns, data)

    return ExpertWeights(stack(GATE_UP, slice(half)), stack(GATE_UP, slice(half, None)), stack(DOWN, _ALL))


def interleaved_experts(folder: Path, module: str, parts: Mapping[str, CheckpointTensor]) -> ExpertWeights:
    """Return the experts of one module of gpt-oss from its tensors by the names of PARTS. Raises CheckpointError."""
    matrices = {part: _matrix(folder, module, part, parts) for part in (GATE_UP, DOWN)}
    biases = {}
    for part, (_, experts, rows, _) in matrices.items():
        bias = parts.get(f"{part}{BIAS}")
        if bias is None or bias.shape != (experts, rows):
            found = "missing" if bias is None else list(bias.shape)
            raise CheckpointError(f"{folder}: {module}.{part}{BIAS} must be {[experts, rows]}, it is {found}")
        biases[part] = as_array(bias.decode(torch.float32))
    if matrices[GATE_UP][2] % 2:
        raise CheckpointError(f"{folder}: {module}: rows of gate and up must be in turns, got {matrices[GATE_UP][2]}")

    def stack(part: str, chosen: slice) -> PackedExperts:
        quant, experts, rows, columns = matrices[part]

        def convert(expert: int) -> Bytes:
            if quant == "MXFP4":
                return _from_mxfp4(folder, parts, part, expert, chosen)
            return _from_transposed(parts, part, expert, chosen)

        data = ConvertedExperts(experts, convert)
        bias: Floats = np.ascontiguousarray(biases[part][:, chosen])
        return PackedExperts(quant, len(range(rows)[chosen]), columns, data, bias)

    return ExpertWeights(stack(GATE_UP, _GATE), stack(GATE_UP, _UP), stack(DOWN, _ALL))


def _matrix(folder: Path, module: str, part: str, parts: Mapping[str, CheckpointTensor]) -> tuple[str, int, int, int]:
    """Return the format of a matrix, the number of experts, its rows and its columns."""
    if (plain := parts.get(part)) is not None:
        if len(plain.shape) != 3:
            raise CheckpointError(f"{folder}: {module}.{part} must have 3 dimensions, it is {list(plain.shape)}")
        experts, columns, rows = plain.shape
        return plain.quant, experts, rows, columns
    blocks, scales = parts.get(f"{part}{BLOCKS}"), parts.get(f"{part}{SCALES}")
    if blocks is None or scales is None:
        raise CheckpointError(f"{folder}: {module} has no {part}, and not both of {part}{BLOCKS} and {part}{SCALES}")
    if (blocks.quant, scales.quant) != ("U8", "U8"):
        raise CheckpointError(
            f"{folder}: {module}.{part}{BLOCKS} and {SCALES} must be U8, they are {blocks.quant} and {scales.quant}"
        )
    if len(blocks.shape) != 4 or blocks.shape[3] != _BLOCK // 2 or blocks.shape[:3] != scales.shape:
        raise CheckpointError(
            f"{folder}: {module}.{part}{BLOCKS} {list(blocks.shape)} and {part}{SCALES} {list(scales.shape)} must be "
            f"[experts, rows, blocks, {_BLOCK // 2}] and [experts, rows, blocks]"
        )
    experts, rows, count, _ = blocks.shape
    return "MXFP4", experts, rows, count * _BLOCK


def _from_transposed(parts: Mapping[str, CheckpointTensor], part: str, expert: int, chosen: slice) -> Bytes:
    tensor = parts[part]
    _, columns, rows = tensor.shape
    numbers = tensor.expert_views()[expert].reshape(columns, rows, -1)  # bytes of a number last
    return np.ascontiguousarray(numbers[:, chosen].swapaxes(0, 1)).reshape(-1)


def _from_mxfp4(folder: Path, parts: Mapping[str, CheckpointTensor], part: str, expert: int, chosen: slice) -> Bytes:
    blocks, scales = parts[f"{part}{BLOCKS}"], parts[f"{part}{SCALES}"]
    _, rows, count, half = blocks.shape
    codes = nibbles(blocks.expert_views()[expert].reshape(rows, count * half)[chosen])
    exponents = scales.expert_views()[expert].reshape(rows, count)[chosen]
    if (exponents == 255).any():  # NaN in OCP Microscaling Formats 1.0
        raise CheckpointError(f"{folder}: tensor {scales.name!r} has NaN, in expert {expert}")
    return mxfp4_blocks(codes, exponents)
