"""Reads importance matrices: for each column of a weight, the mean square of the activations that it multiplies.

llama.cpp's llama-imatrix collects them over a text, and writes a GGUF file. For a matrix NAME it has NAME.in_sum2, the
sums of squares [experts, columns], and NAME.counts, how many activations were added for each expert [experts]; a matrix
that is not of experts has one row and one count. Source: tools/imatrix of llama.cpp.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.checkpoint import CheckpointTensor
from ktqueue.loading.gguf.header import read_header
from ktqueue.loading.gguf.library import type_name
from ktqueue.loading.weight_formats import Floats

_SUMS, _COUNTS = ".in_sum2", ".counts"
_PART_OF_KV_B = re.compile(r"attn_[kv]_b\.")


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
            if means.shape != wanted:
                raise CheckpointError(
                    f"{self._path}: {name!r} has {list(means.shape)} numbers, but the model needs {list(wanted)}",
                    param="importance",
                )

    def of_tensor(self, name: str) -> Floats | None:
        """Return the mean squares of a matrix, or None if there are none."""
        return self._means.get(name)


def read_importance(path: Path) -> ImportanceMatrix:
    """Read a GGUF file of llama-imatrix. Raises CheckpointError that names the file and what is wrong."""
    header = read_header(path)
    if (kind := header.metadata.get("general.type")) != "imatrix":
        raise CheckpointError(f"{path}: not an importance matrix: general.type is {kind!r}", param="importance")
    stored = {}
    for info in header.tensors:
        tensor = CheckpointTensor.from_file(
            path, info.name, type_name(info.type_id), info.shape, info.offset, header.data
        )
        values = tensor.decode(torch.float32).numpy()
        if tensor.quant != "F32" or not (np.isfinite(values) & (values >= 0)).all():
            raise CheckpointError(f"{path}: tensor {info.name!r} must hold finite F32 numbers, none below 0")
        stored[info.name] = values
    means = {}
    for name in sorted({key.removesuffix(_SUMS).removesuffix(_COUNTS) for key in stored}):
        sums, counts = stored.get(name + _SUMS), stored.get(name + _COUNTS)
        if sums is None or counts is None or counts.size != sums.size // sums.shape[-1]:
            raise CheckpointError(f"{path}: {name!r} needs {_SUMS[1:]} and {_COUNTS[1:]} for the same experts")
        rows, column_counts = sums.reshape(counts.size, -1), counts.reshape(-1, 1)
        means[name] = np.where(column_counts > 0, rows / np.maximum(column_counts, 1), np.float32(1))
    return ImportanceMatrix(str(path), means)
