"""Importance matrices: for each column of a weight, the mean square of the activations that it multiplies.

llama.cpp's llama-imatrix collects them over a text, and writes a GGUF file. For a matrix NAME it has NAME.in_sum2, the
sums of squares [experts, columns], and NAME.counts, how many activations were added for each expert [experts]; a matrix
that is not of experts has one row and one count. Newer versions add NAME.in_sum, the plain sums.

Its older files, named .dat, are int32 numbers, names and float32 numbers: the number of matrices; for each the length
of its name, the name, how many calls were added, how many numbers follow, and the sums of the calls' means. What comes
after is not read. Source: tools/imatrix of llama.cpp.
"""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ktqueue.core.errors import CheckpointError
from ktqueue.core.short_repr import short_repr
from ktqueue.loading.checkpoint import CheckpointTensor
from ktqueue.loading.gguf.header import MAGIC, read_header
from ktqueue.loading.gguf.library import type_name
from ktqueue.loading.gguf.writer import GgufWriter
from ktqueue.loading.weight_formats import Floats

_PLAIN_SUMS, _SUMS, _COUNTS = ".in_sum", ".in_sum2", ".counts"
_PART_OF_KV_B = re.compile(r"attn_[kv]_b\.")


@dataclass(slots=True)
class ColumnSums:
    """Sums of squared activations [1 or experts, columns], and how many were added, [1 or experts]. Both float64."""

    squares: npt.NDArray[np.float64]
    counts: npt.NDArray[np.float64]

    @classmethod
    def zeros(cls, experts: int, columns: int) -> "ColumnSums":
        """Return sums over nothing."""
        return cls(np.zeros((experts, columns)), np.zeros(experts))

    def add(self, activations: torch.Tensor, expert: int = 0) -> None:
        """Add float32 activations [tokens, columns] of one expert."""
        self.squares[expert] += activations.square().sum(0).numpy()
        self.counts[expert] += len(activations)


class ImportanceMatrix:
    """The mean squares by GGUF name of the matrix: [1 or experts, columns] float32.

    An expert that no token chose has ones, as in llama.cpp.
    """

    def __init__(self, path: str, means: Mapping[str, Floats]) -> None:
        self._path = path
        self._means = dict(means)

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compare with the `shapes` of a model's tensors. Raises CheckpointError that names what does not fit."""
        for name, means in self._means.items():
            if (shape := shapes.get(name)) is None:
                if _PART_OF_KV_B.sub("attn_kv_b.", name) in shapes:
                    continue  # llama.cpp measures the two parts of a matrix that we write whole
                raise CheckpointError(f"{self._path}: {name!r} is not a tensor of this model", param="importance")
            experts = shape[0] if len(shape) == 3 else 1  # [experts, rows, columns]
            wanted = (experts, shape[-1])
            if len(means) == 1 and means.size == experts * shape[-1]:  # old files do not say how many experts
                means = self._means[name] = means.reshape(wanted)
            if means.shape != wanted:
                raise CheckpointError(
                    f"{self._path}: {name!r} has {list(means.shape)} numbers, but the model needs {list(wanted)}",
                    param="importance",
                )

    def of_tensor(self, name: str) -> Floats | None:
        """Return the mean squares of a matrix, or None if there are none."""
        return self._means.get(name)


def read_importance(path: Path) -> ImportanceMatrix:
    """Read a file of llama-imatrix, or of `write_importance`. Raises CheckpointError that names what is wrong."""
    with path.open("rb") as file:
        is_gguf = file.read(len(MAGIC)) == MAGIC
    return ImportanceMatrix(str(path), _means_of_gguf(path) if is_gguf else _means_of_dat(path))


def write_importance(path: Path, sums: Mapping[str, ColumnSums], *, text: str, chunks: int, chunk_tokens: int) -> None:
    """Write sums by GGUF name of the matrix, as llama-imatrix does. `text`: name of the file that was read."""
    tensors: dict[str, Floats] = {}
    for name, found in sorted(sums.items()):
        tensors[name + _SUMS] = found.squares.astype(np.float32)
        tensors[name + _COUNTS] = found.counts.astype(np.float32)[:, None]
    metadata = {
        "general.type": "imatrix",
        "imatrix.datasets": [text],
        "imatrix.chunk_count": chunks,
        "imatrix.chunk_size": chunk_tokens,
    }
    with GgufWriter(path, "imatrix") as writer:
        writer.add_metadata(metadata)
        for name, values in tensors.items():
            writer.add_tensor(name, "F32", values.shape)
        writer.start()
        for values in tensors.values():
            writer.write(values.reshape(-1).view(np.uint8))


def _means_of_gguf(path: Path) -> dict[str, Floats]:
    header = read_header(path)
    if (kind := header.metadata.get("general.type")) != "imatrix":
        raise CheckpointError(
            f"{path}: not an importance matrix: general.type is {short_repr(kind)}", param="importance"
        )
    stored = {}
    for info in header.tensors:
        if info.name.endswith(_PLAIN_SUMS):
            continue
        tensor = CheckpointTensor.from_file(
            path, info.name, type_name(info.type_id), info.shape, info.offset, header.data
        )
        values = tensor.decode(torch.float32).numpy()
        if tensor.quant != "F32":
            raise CheckpointError(f"{path}: tensor {info.name!r} must hold F32 numbers, not {tensor.quant}")
        stored[info.name] = _checked(path, info.name, values)
    means = {}
    for name in sorted({key.removesuffix(_SUMS).removesuffix(_COUNTS) for key in stored}):
        sums, counts = stored.get(name + _SUMS), stored.get(name + _COUNTS)
        if sums is None or counts is None or counts.size != sums.size // sums.shape[-1]:
            raise CheckpointError(f"{path}: {name!r} needs {_SUMS[1:]} and {_COUNTS[1:]} for the same experts")
        rows, column_counts = sums.reshape(counts.size, -1), counts.reshape(-1, 1)
        means[name] = np.where(column_counts > 0, rows / np.maximum(column_counts, 1), np.float32(1))
    return means


def _means_of_dat(path: Path) -> dict[str, Floats]:
    data, place = path.read_bytes(), 0

    def take(size: int) -> bytes:
        nonlocal place
        if size < 0 or place + size > len(data):
            raise CheckpointError(f"{path}: not an importance matrix, or it is truncated", param="importance")
        place += size
        return data[place - size : place]

    def number() -> int:
        return int(struct.unpack("<i", take(4))[0])

    means: dict[str, Floats] = {}
    for _ in range(number()):
        name = take(number()).decode(errors="replace")
        calls, size = number(), number()
        values = np.frombuffer(take(4 * size), "<f4").astype(np.float32)
        if calls < 1 or size < 1 or name in means:
            raise CheckpointError(f"{path}: not an importance matrix: {name!r} has {size} numbers of {calls} calls")
        means[name] = _checked(path, name, values)[None] / np.float32(calls)
    return means


def _checked(path: Path, name: str, values: Floats) -> Floats:
    if not (np.isfinite(values) & (values >= 0)).all():
        raise CheckpointError(f"{path}: tensor {name!r} must hold finite F32 numbers, none below 0")
    return values
