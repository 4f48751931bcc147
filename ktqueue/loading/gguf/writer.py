"""Writes GGUF files with the gguf library. header.py reads them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import gguf
import numpy as np

from ktqueue.loading.checkpoint import Progress
from ktqueue.loading.weight_formats import FILE_BLOCKS, Bytes

_FILE_TYPES = {
    "F32": "ALL_F32",
    "Q3_K": "MOSTLY_Q3_K_M",
    "Q4_K": "MOSTLY_Q4_K_M",
    "Q5_K": "MOSTLY_Q5_K_M",
    "MXFP4": "MOSTLY_MXFP4_MOE",
}
"""Names in LlamaFileType of formats and mixes for which it is not MOSTLY_ and the format."""


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """What the header of a file says about a tensor that will be written."""

    name: str
    quant: str
    shape: tuple[int, ...]


AnyTensor = TypeVar("AnyTensor", bound=TensorDescription)


class GgufWriter:
    """Writes one GGUF file: first the metadata and the description of all tensors, then the data of each tensor.

    Use it as a context manager. The file gets its name only if no exception is raised; until then it ends in `.part`.
    """

    def __init__(self, path: Path, architecture: str, file_type: str = "") -> None:
        """`file_type`: the format or mix of most weights; empty for a file that is not a model."""
        self._path = path
        self._part = path.with_name(path.name + ".part")
        self._writer = gguf.GGUFWriter(self._part, architecture)
        if file_type:
            self._writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            self._writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES.get(file_type, f"MOSTLY_{file_type}")].value)

    def add_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add strings, bools, lists, and numbers (an int as u32, a float as f32)."""
        for key, value in metadata.items():
            match value:
                case bool():
                    self._writer.add_bool(key, value)
                case int():
                    self._writer.add_uint32(key, value)
                case float():
                    self._writer.add_float32(key, value)
                case str():
                    self._writer.add_string(key, value)
                case _:
                    self._writer.add_array(key, value)

    def add_tensor(self, name: str, quant: str, shape: tuple[int, ...]) -> None:
        """Describe a tensor. The data must be written in the same order as the descriptions."""
        elements, size = FILE_BLOCKS[quant]
        packed = (*shape[:-1], shape[-1] // elements * size)
        self._writer.add_tensor_info(
            name, packed, np.dtype(np.uint8), int(np.prod(packed)), raw_dtype=gguf.GGMLQuantizationType[quant]
        )

    def start(self) -> None:
        """Write the header. Only `write` may follow."""
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_ti_data_to_file()

    def write(self, packed: Bytes) -> None:
        """Write the bytes of the next tensor."""
        self._writer.write_tensor_data(packed)

    def write_all(
        self, tensors: Sequence[AnyTensor], pack: Callable[[AnyTensor], Bytes], progress: Progress | None = None
    ) -> None:
        """Write the header and all tensors. `pack` returns the bytes of a tensor when it is its turn."""
        for tensor in tensors:
            self.add_tensor(tensor.name, tensor.quant, tensor.shape)
        self.start()
        for done, tensor in enumerate(tensors):
            if progress:
                progress(done, len(tensors), tensor.name)
            self.write(pack(tensor))
        if progress:
            progress(len(tensors), len(tensors), "")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
        if kind is None:
            self._part.replace(self._path)
        else:
            self._part.unlink(missing_ok=True)
