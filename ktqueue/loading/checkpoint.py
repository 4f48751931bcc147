"""A model's config and tensors, as stored in its files.

Tensor names are those of transformers' module tree. The readers of GGUF and safetensors rename tensors and pass views
of the mapped files. Dense tensors are decoded on request, expert weights stay packed.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ktqueue.core.errors import CheckpointError
from ktqueue.families.table import family_of_type
from ktqueue.loading.mapped_file import release_pages
from ktqueue.loading.weight_formats import (
    FILE_BLOCKS,
    RAW,
    Bytes,
    Floats,
    is_stored,
    loaded_format,
    requantise,
    row_bytes,
    tensor_bytes,
)
from ktqueue.operators.kv_cache import CacheScale
from ktqueue.operators.native import as_array, dequantize
from ktqueue.operators.packed import ExpertWeights, PackedExperts, PackedMatrix

CHUNK_ELEMENTS = 4 << 20  # decoded at once, which limits the float32 buffer to 16 MiB
Progress = Callable[[int, int, str], None]  # amount done, total amount, name of the next tensor
GATE_UP, DOWN = "gate_up_proj", "down_proj"  # the fused parameters of a transformers experts module
BIAS = "_bias"  # the ending of the names of their biases


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One stored tensor.

    `stored` is a view of its bytes, or a function that returns them: then they are converted whenever they are read.
    If `heads` is above 0, the rows are in GGUF's rotary order (pairs interleaved) for that many heads. Decoding
    restores transformers' order.
    """

    name: str
    quant: str
    shape: tuple[int, ...]
    stored: Bytes | Callable[[], Bytes]
    heads: int = 0

    @classmethod
    def from_file(
        cls, path: Any, name: str, quant: str, shape: tuple[int, ...], offset: int, file: Bytes, *, raw: bool = False
    ) -> "CheckpointTensor":
        """Return a view of `file` at `offset`. `raw`: the tensor may hold one of RAW, which are not weights
        by themselves. Raises CheckpointError if the tensor does not lie inside the file."""
        if not (raw and quant in RAW) and not is_stored(quant):
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
    def data(self) -> Bytes:
        """The bytes, a view of the file or a copy."""
        return self.stored() if callable(self.stored) else self.stored

    @property
    def part_quants(self) -> tuple[str, str] | None:
        """The formats of the two tensors of which this one is made; None: it is one (see gguf/latent.py)."""
        return None

    @property
    def nbytes(self) -> int:
        """Bytes in the file, or once converted."""
        return tensor_bytes(self.quant, self.shape)

    def computed(self, compute: Callable[[Floats], Floats]) -> "CheckpointTensor":
        """Return a tensor in F32 of what `compute` makes of the values, in their own shape."""
        values = compute(self.decode(torch.float32).numpy())
        return CheckpointTensor(self.name, "F32", self.shape, values.reshape(-1).view(np.uint8))

    def expert_views(self) -> list[Bytes]:
        """Return one flat byte view per expert of an [experts, rows, columns] tensor."""
        return list(self.data.reshape(self.shape[0], -1))

    def packed_experts(self, bias: "CheckpointTensor | None" = None) -> PackedExperts:
        """Return an [experts, rows, columns] tensor as views, with the `bias` [experts, rows] decoded."""
        _, rows, columns = self.shape
        values = None if bias is None else as_array(bias.decode(torch.float32))
        return PackedExperts(self.quant, rows, columns, self.expert_views(), values)

    def packed_matrix(self) -> PackedMatrix:
        """Return a [rows, columns] tensor as a view, or as a copy if its rows are reordered or requantised."""
        rows, columns = self.shape
        data = self.data
        if self.heads:
            data = unpermute_packed(data, self.heads, data.size // rows)
        return requantise_matrix(PackedMatrix(self.quant, rows, columns, data))

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """Decode to `dtype`, in the tensor's own shape, a chunk of rows at a time."""
        size, data = row_bytes(self.quant, self.columns), self.data
        rows = data.size // size
        out = torch.empty((rows, self.columns), dtype=dtype)
        step = max(1, CHUNK_ELEMENTS // self.columns)
        for start in range(0, rows, step):
            chunk = data[start * size : (start + step) * size]
            out[start : start + step] = torch.from_numpy(decode_rows(chunk, self.quant, self.columns))
        if self.heads:
            out = unpermute(out.view(self.shape), self.heads)
        return out.view(self.shape)


def check_packed(path: Any, places: Iterable[tuple[int, int, str]], start: int, alignment: int = 1) -> int:
    """Check that the tensors of a file share no bytes, and have none between them but for `alignment`.

    llama.cpp and the safetensors library refuse other files too: a wrong type, shape or offset leads to one.
    places: each tensor's first byte, the byte behind it, and its name. start: where the first begins. Returns the byte
    behind the last. Raises CheckpointError.
    """
    for begin, end, name in sorted(places):
        if begin != start:
            raise CheckpointError(f"{path}: corrupt: tensor {name!r} must begin at byte {start}, got {begin}")
        start = end + -end % alignment
    return start


def unpermute_packed(data: Bytes, heads: int, size: int) -> Bytes:
    """Do what `unpermute` does with packed rows of `size` bytes, each of which is packed by itself. Returns a copy."""
    pairs = data.reshape(heads, -1, 2, size)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1)


def decode_rows(data: Bytes, quant: str, columns: int) -> Floats:
    """Decode packed rows to [rows, columns] float32, a copy."""
    count = data.size // row_bytes(quant, columns) * columns
    return dequantize(loaded_format(quant), requantise(quant, data), count).reshape(-1, columns)


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of a q or k matrix from GGUF's order (pairs side by side) to transformers' (two halves)."""
    rows = weight.shape[0]
    return weight.view(heads, rows // heads // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


def permute(weight: Floats, heads: int) -> Floats:
    """Do the inverse of `unpermute`."""
    rows = weight.shape[0]
    swapped = weight.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2)
    return np.ascontiguousarray(swapped).reshape(weight.shape)


class Checkpoint:
    """A model's config and weights, by transformers name.

    `files` are the maps that `tensors` and `experts` view. `cache_scales`: what the files state for a float8 cache, by
    the name of the layer's module. `prefix`: what the names in the files lack at the beginning. Raises CheckpointError
    if the gate and up weights of a module differ in shape.
    """

    def __init__(
        self,
        path: str,
        config: dict[str, Any],
        tensors: Mapping[str, CheckpointTensor],
        experts: Mapping[str, ExpertWeights],
        files: Iterable[Bytes],
        cache_scales: Mapping[str, CacheScale] | None = None,
        prefix: str = "",
    ) -> None:
        self.path = path
        self._prefix = prefix
        self.cache_scales = cache_scales or {}
        self._files = list(files)
        self._config = config
        self._tensors = dict(tensors)
        self._experts = dict(experts)
        family = family_of_type(config.get("model_type"))
        self._transposed, self._in_turns = family.transposed_experts, family.experts_in_turns
        for module, weights in ((self.stored_name(name), found) for name, found in experts.items()):
            gate, up = ([len(stack.data), stack.rows, stack.columns] for stack in (weights.gate, weights.up))
            if gate != up:  # `shape` assumes so
                raise CheckpointError(f"{path}: {module}: gate is {gate}, up is {up}; they must have the same shape")
            for stack in (weights.gate, weights.up, weights.down):
                if stack.bias is not None and stack.bias.shape != (wanted := (len(stack.data), stack.rows)):
                    raise CheckpointError(f"{path}: {module}: a bias is {list(stack.bias.shape)}, not {list(wanted)}")

    def config(self) -> dict[str, Any]:
        """Return a copy of the transformers config as a plain dict."""
        return dict(self._config)

    def names(self) -> list[str]:
        """Return all parameter names. A layer's experts appear as the two fused parameters of their module."""
        fused = []
        for module, weights in self._experts.items():
            endings = ("",) if weights.down.bias is None else ("", BIAS)
            fused += [f"{module}.{part}{ending}" for part in (GATE_UP, DOWN) for ending in endings]
        return [*self._tensors, *fused]

    def stored_name(self, name: str) -> str:
        """Return a name without the beginning that the names in the files lack, for messages."""
        return name.removeprefix(self._prefix)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the tensor's shape. Raises CheckpointError for an unknown name."""
        if (found := self._fused(name)) is None:
            return self._tensor(name).shape
        experts, part = found
        stack = experts.gate if part.startswith(GATE_UP) else experts.down
        rows = (2 if part.startswith(GATE_UP) else 1) * stack.rows
        if part.endswith(BIAS):
            return (len(stack.data), rows)
        return (len(stack.data), stack.columns, rows) if self._transposed else (len(stack.data), rows, stack.columns)

    def quant(self, name: str) -> str:
        """Return the storage format, such as `Q4_K`. Raises CheckpointError for an unknown name."""
        if (found := self._fused(name)) is None:
            return self._tensor(name).quant
        experts, part = found
        if part.endswith(BIAS):
            return "F32"
        return experts.gate.quant if part == GATE_UP else experts.down.quant

    def part_quants(self, name: str) -> tuple[str, str] | None:
        """Return CheckpointTensor.part_quants of a dense tensor. Raises CheckpointError for an unknown name."""
        return self._tensor(name).part_quants

    def nbytes(self, name: str) -> int:
        """Return the bytes in the file. Raises CheckpointError for an unknown name."""
        if (found := self._fused(name)) is None:
            return self._tensor(name).nbytes
        experts, part = found
        stacks = (experts.gate, experts.up) if part.startswith(GATE_UP) else (experts.down,)
        if part.endswith(BIAS):
            return sum(stack.bias.nbytes for stack in stacks if stack.bias is not None)
        return sum(tensor_bytes(stack.quant, (len(stack.data), stack.rows, stack.columns)) for stack in stacks)

    def decode(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor decoded to `dtype`. Raises CheckpointError for an unknown name."""
        if (found := self._fused(name)) is None:
            return self._tensor(name).decode(dtype)
        experts, part = found
        out = torch.empty(self.shape(name), dtype=dtype)
        biased = part.endswith(BIAS)
        rows = out.mT if self._transposed and not biased else out  # [experts, rows, columns] or [experts, rows]
        fill = _fill_biases if biased else _fill
        if part.startswith(DOWN):
            fill(rows, experts.down)
        elif self._in_turns:
            fill(rows[:, ::2], experts.gate)
            fill(rows[:, 1::2], experts.up)
        else:
            fill(rows[:, : experts.gate.rows], experts.gate)
            fill(rows[:, experts.gate.rows :], experts.up)
        return out

    def matrix(self, name: str) -> PackedMatrix:
        """Return a two-dimensional tensor as stored, rows in transformers' order. Raises CheckpointError."""
        tensor = self._tensor(name)
        if len(tensor.shape) != 2:
            raise CheckpointError(
                f"{self.path}: {self.stored_name(name)} has the shape {list(tensor.shape)}, expected a matrix"
            )
        return tensor.packed_matrix()

    def experts(self, module: str) -> ExpertWeights:
        """Return the packed weights of an experts module. Raises CheckpointError for an unknown name."""
        try:
            return requantise_experts(self._experts[module])
        except KeyError:
            raise CheckpointError(f"{self.path}: no expert weights for {self.stored_name(module)}") from None

    def are_equal(self, name: str, other: str) -> bool:
        """Whether two tensors hold the same numbers. Raises CheckpointError for an unknown name."""
        first, second = self._tensor(name), self._tensor(other)
        if (first.quant, first.shape) != (second.quant, second.shape):
            return torch.equal(first.decode(torch.float32), second.decode(torch.float32))
        ours, theirs = first.data, second.data
        return all(
            np.array_equal(ours[start : start + CHUNK_ELEMENTS], theirs[start : start + CHUNK_ELEMENTS])
            for start in range(0, ours.size, CHUNK_ELEMENTS)
        )

    def ignore(self, name: str) -> None:
        """Treat a tensor as missing. For an expert tensor, this covers all experts of its module."""
        if self._fused(name) is not None:
            del self._experts[name.rpartition(".")[0]]
        self._tensors.pop(name, None)

    def expert_modules(self) -> list[str]:
        """Return the names of all experts modules."""
        return list(self._experts)

    def release(self) -> None:
        """Drop the files' pages from memory. Views that are read again bring them back."""
        for file in self._files:
            release_pages(file)

    def close(self) -> None:
        """Drop the file maps and the memory of their pages. Views that were handed out stay valid."""
        self._tensors.clear()
        self._experts.clear()
        self.release()
        self._files.clear()

    def _tensor(self, name: str) -> CheckpointTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: no tensor for {self.stored_name(name)}") from None

    def _fused(self, name: str) -> tuple[ExpertWeights, str] | None:
        module, _, part = name.rpartition(".")
        if part.removesuffix(BIAS) in (GATE_UP, DOWN) and module in self._experts:
            return self._experts[module], part
        return None


def _fill(out: torch.Tensor, stack: PackedExperts) -> None:
    for expert, data in enumerate(stack.data):
        out[expert] = torch.from_numpy(decode_rows(data, stack.quant, stack.columns))


def _fill_biases(out: torch.Tensor, stack: PackedExperts) -> None:
    assert stack.bias is not None
    out.copy_(torch.from_numpy(stack.bias))


def requantise_matrix(matrix: PackedMatrix) -> PackedMatrix:
    """Return a matrix in the format in which it is loaded."""
    return replace(matrix, quant=loaded_format(matrix.quant), data=requantise(matrix.quant, matrix.data))


def requantise_experts(weights: ExpertWeights) -> ExpertWeights:
    """Return the experts of a layer in the formats in which they are loaded."""

    def stack(experts: PackedExperts) -> PackedExperts:
        if loaded_format(experts.quant) == experts.quant:
            return experts
        return replace(
            experts, quant=loaded_format(experts.quant), data=[requantise(experts.quant, data) for data in experts.data]
        )

    return ExpertWeights(stack(weights.gate), stack(weights.up), stack(weights.down))
