"""Tensors as they lie in a file, and a checkpoint made of them.

Names are those of the transformers module tree; GGUF and safetensors readers do the naming and
hand over views into their file maps. Dense tensors are decoded on request, expert weights never.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.mapped_file import release_pages
from ktqueue.loading.weight_formats import (
    FILE_BLOCKS,
    REQUANTISED,
    Bytes,
    Floats,
    loaded_format,
    requantise,
    row_bytes,
    tensor_bytes,
)
from ktqueue.operators.native import dequantize
from ktqueue.operators.packed import ExpertWeights, PackedExperts, PackedMatrix

CHUNK_ELEMENTS = 4 << 20  # decoded at a time: bounds the float32 scratch to 16 MiB
GATE_UP, DOWN = "gate_up_proj", "down_proj"  # the fused parameters of a transformers experts module


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor of a file. `data` are its bytes, a view; `heads` > 0: rows are in GGUF's rotary order,
    pairs interleaved, for that many heads, and are put back when decoded."""

    name: str
    quant: str
    shape: tuple[int, ...]
    data: Bytes
    heads: int = 0

    @classmethod
    def of_file(
        cls, path: Any, name: str, quant: str, shape: tuple[int, ...], offset: int, file: Bytes
    ) -> "CheckpointTensor":
        """A view of `file` at `offset`. Raises CheckpointError where the tensor does not lie inside the file."""
        if quant not in FILE_BLOCKS:
            raise CheckpointError(
                f"{path}: tensor {name!r} is stored as {quant}, which is not supported; known: {', '.join(FILE_BLOCKS)}"
            )
        try:
            size = tensor_bytes(quant, shape)
        except ValueError as error:
            raise CheckpointError(f"{path}: tensor {name!r}: {error}") from error
        if offset < 0 or offset + size > file.size:
            raise CheckpointError(
                f"{path}: tensor {name!r} needs bytes {offset} to {offset + size}, but the file has {file.size}: "
                "it is truncated or corrupt"
            )
        return cls(name, quant, shape, file[offset : offset + size])

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.data.size

    def matrices(self) -> list[Bytes]:
        """A [experts, rows, columns] tensor as one flat byte view an expert."""
        return list(self.data.reshape(self.shape[0], -1))

    def stack(self) -> PackedExperts:
        """A [experts, rows, columns] tensor as views."""
        _, rows, columns = self.shape
        return PackedExperts(self.quant, rows, columns, self.matrices())

    def packed(self) -> PackedMatrix:
        """A [rows, columns] tensor as a view; a copy where rows are in GGUF's rotary order, or widened."""
        rows, columns = self.shape
        data = unpermute_packed(self.data, self.heads, self.data.size // rows) if self.heads else self.data
        return requantise_matrix(PackedMatrix(self.quant, rows, columns, data))

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Decoded to `dtype` in the tensor's own shape, a chunk of rows at a time."""
        size = row_bytes(self.quant, self.columns)
        rows = self.data.size // size
        out = torch.empty((rows, self.columns), dtype=dtype)
        step = max(1, CHUNK_ELEMENTS // self.columns)
        for start in range(0, rows, step):
            chunk = self.data[start * size : (start + step) * size]
            out[start : start + step] = torch.from_numpy(decode_rows(chunk, self.quant, self.columns))
        if self.heads:
            out = unpermute(out.view(self.shape), self.heads)
        return out.view(self.shape)


def unpermute_packed(data: Bytes, heads: int, size: int) -> Bytes:
    """As `unpermute`, for packed rows of `size` bytes: formats pack each row by itself, so rows can move. A copy."""
    pairs = data.reshape(heads, -1, 2, size)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1)


def decode_rows(data: Bytes, quant: str, columns: int) -> Floats:
    """Packed rows to [rows, columns] float32, a copy."""
    count = data.size // row_bytes(quant, columns) * columns
    return dequantize(loaded_format(quant), requantise(quant, data), count).reshape(-1, columns)


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a llama-architecture q or k from GGUF's order (pairs side by side) to transformers' (two halves)."""
    rows = weight.shape[0]
    return weight.view(heads, rows // heads // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


def permute(weight: Floats, heads: int) -> Floats:
    """The inverse of `unpermute`."""
    rows = weight.shape[0]
    swapped = weight.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2)
    return np.ascontiguousarray(swapped).reshape(weight.shape)


class Checkpoint:
    """A model's config and tensors by transformers name. Implements checkpoint.Checkpoint. `files`: the maps of the
    files that `tensors` and `experts` view.

    Raises CheckpointError where a module's gate and up weights differ in shape.
    """

    def __init__(
        self,
        path: str,
        config: dict[str, Any],
        tensors: Mapping[str, CheckpointTensor],
        experts: Mapping[str, ExpertWeights],
        files: Iterable[Bytes],
    ) -> None:
        self.path = path
        self._files = list(files)
        self._config = config
        self._tensors = dict(tensors)
        self._experts = dict(experts)
        for module, weights in experts.items():
            gate, up = ([len(one.data), one.rows, one.columns] for one in (weights.gate, weights.up))
            if gate != up:  # `shape` tells of both by what gate is
                raise CheckpointError(f"{path}: {module}: gate is {gate}, up is {up}; they must have one shape")

    def config(self) -> dict[str, Any]:
        """The transformers config as a plain dict, a copy."""
        return dict(self._config)

    def names(self) -> list[str]:
        """Parameter names present; a layer's experts appear as the two fused parameters of their module."""
        return [*self._tensors, *(f"{module}.{part}" for module in self._experts for part in (GATE_UP, DOWN))]

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape. Raises CheckpointError for an unknown name."""
        if (found := self._fused(name)) is None:
            return self._tensor(name).shape
        experts, part = found
        stack = experts.gate if part == GATE_UP else experts.down
        return (len(stack.data), (2 if part == GATE_UP else 1) * stack.rows, stack.columns)

    def quant(self, name: str) -> str:
        """The storage type, such as `Q4_K`. Raises CheckpointError for an unknown name."""
        if (found := self._fused(name)) is None:
            return self._tensor(name).quant
        experts, part = found
        return experts.gate.quant if part == GATE_UP else experts.down.quant

    def nbytes(self, name: str) -> int:
        """Bytes in the file. Raises CheckpointError for an unknown name."""
        if (found := self._fused(name)) is None:
            return self._tensor(name).nbytes
        experts, part = found
        stacks = (experts.gate, experts.up) if part == GATE_UP else (experts.down,)
        return sum(view.size for stack in stacks for view in stack.data)

    def dense(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor decoded to `dtype`. Raises CheckpointError for an unknown name."""
        if (found := self._fused(name)) is None:
            return self._tensor(name).tensor(dtype)
        experts, part = found
        out = torch.empty(self.shape(name), dtype=dtype)
        if part == DOWN:
            _fill(out, experts.down)
        else:
            _fill(out[:, : experts.gate.rows], experts.gate)
            _fill(out[:, experts.gate.rows :], experts.up)
        return out

    def matrix(self, name: str) -> PackedMatrix:
        """A two-dimensional tensor as it is stored, rows in transformers' order. Raises CheckpointError."""
        tensor = self._tensor(name)
        if len(tensor.shape) != 2:
            raise CheckpointError(f"{self.path}: {name} has the shape {list(tensor.shape)}, a matrix is expected")
        return tensor.packed()

    def experts(self, module: str) -> ExpertWeights:
        """The packed weights of the experts module of that name. Raises CheckpointError for an unknown one."""
        try:
            return requantise_experts(self._experts[module])
        except KeyError:
            raise CheckpointError(f"{self.path}: no expert weights for {module}") from None

    def alike(self, name: str, other: str) -> bool:
        """Whether two tensors of the file hold the same numbers. Raises CheckpointError for an unknown name."""
        one, two = self._tensor(name), self._tensor(other)
        if (one.quant, one.shape) != (two.quant, two.shape):
            return torch.equal(one.tensor(torch.float32), two.tensor(torch.float32))
        starts = range(0, one.nbytes, CHUNK_ELEMENTS)
        return all(
            np.array_equal(one.data[at : at + CHUNK_ELEMENTS], two.data[at : at + CHUNK_ELEMENTS]) for at in starts
        )

    def leave_out(self, name: str) -> None:
        """Take a tensor for one that the file does not have; of experts all those of their module."""
        if self._fused(name) is not None:
            del self._experts[name.rpartition(".")[0]]
        self._tensors.pop(name, None)

    def expert_modules(self) -> list[str]:
        """Names of the experts modules present."""
        return list(self._experts)

    def release(self) -> None:
        """Let go of the memory that the files' pages took; they come back where views of them are read again."""
        for file in self._files:
            release_pages(file)

    def close(self) -> None:
        """Let go of the file maps and of the memory that their pages took; views handed out stay valid."""
        self._tensors.clear()
        self._experts.clear()
        self.release()
        self._files.clear()

    def _tensor(self, name: str) -> CheckpointTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: no tensor for {name}") from None

    def _fused(self, name: str) -> tuple[ExpertWeights, str] | None:
        module, _, part = name.rpartition(".")
        if part in (GATE_UP, DOWN) and module in self._experts:
            return self._experts[module], part
        return None


def _fill(out: torch.Tensor, stack: PackedExperts) -> None:
    for expert, data in enumerate(stack.data):
        out[expert] = torch.from_numpy(decode_rows(data, stack.quant, stack.columns))


def requantise_matrix(matrix: PackedMatrix) -> PackedMatrix:
    """A matrix in the type that it is handed out in."""
    return replace(matrix, quant=loaded_format(matrix.quant), data=requantise(matrix.quant, matrix.data))


def requantise_experts(weights: ExpertWeights) -> ExpertWeights:
    """The experts of a layer in the types that they are handed out in."""

    def stack(one: PackedExperts) -> PackedExperts:
        if one.quant not in REQUANTISED:
            return one
        return replace(one, quant=loaded_format(one.quant), data=[requantise(one.quant, data) for data in one.data])

    return ExpertWeights(stack(weights.gate), stack(weights.up), stack(weights.down))
