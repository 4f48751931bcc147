"""Writes GGUF files with the gguf library. header.py reads them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import gguf
import numpy as np

from ktqueue.loading.checkpoint import Progress
from ktqueue.loading.weight_formats import FILE_BLOCKS, Bytes, Floats

_FILE_TYPES = {
    "F32": gguf.LlamaFileType.ALL_F32,
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q2_K": gguf.LlamaFileType.MOSTLY_Q2_K,
    "Q3_K": gguf.LlamaFileType.MOSTLY_Q3_K_M,
    "Q4_K": gguf.LlamaFileType.MOSTLY_Q4_K_M,
    "Q3_K_M": gguf.LlamaFileType.MOSTLY_Q3_K_M,
    "Q4_K_S": gguf.LlamaFileType.MOSTLY_Q4_K_S,
    "Q4_K_M": gguf.LlamaFileType.MOSTLY_Q4_K_M,
    "Q5_K": gguf.LlamaFileType.MOSTLY_Q5_K_M,
    "Q5_K_S": gguf.LlamaFileType.MOSTLY_Q5_K_S,
    "Q5_K_M": gguf.LlamaFileType.MOSTLY_Q5_K_M,
    "Q6_K": gguf.LlamaFileType.MOSTLY_Q6_K,
    "IQ4_NL": gguf.LlamaFileType.MOSTLY_IQ4_NL,
    "IQ4_XS": gguf.LlamaFileType.MOSTLY_IQ4_XS,
    "MXFP4": gguf.LlamaFileType.MOSTLY_MXFP4_MOE,
    "IQ2_XXS": gguf.LlamaFileType.MOSTLY_IQ2_XXS,
    "IQ2_XS": gguf.LlamaFileType.MOSTLY_IQ2_XS,
    "IQ2_S": gguf.LlamaFileType.MOSTLY_IQ2_S,
    "IQ3_XXS": gguf.LlamaFileType.MOSTLY_IQ3_XXS,
    "IQ3_S": gguf.LlamaFileType.MOSTLY_IQ3_S,
    "IQ1_S": gguf.LlamaFileType.MOSTLY_IQ1_S,
    "IQ1_M": gguf.LlamaFileType.MOSTLY_IQ1_M,
    "NVFP4": gguf.LlamaFileType.MOSTLY_NVFP4,
    "Q4_1": gguf.LlamaFileType.MOSTLY_Q4_1,
    "Q5_0": gguf.LlamaFileType.MOSTLY_Q5_0,
    "Q5_1": gguf.LlamaFileType.MOSTLY_Q5_1,
}


def write_floats(path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, Floats]) -> None:
    """Write a GGUF file of float32 tensors that is not a model. It gets its name when it is complete."""
    part = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(part, architecture)
    try:
        _add_metadata(writer, metadata)
        for name, values in tensors.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        part.replace(path)
    except BaseException:
        writer.close()
        part.unlink(missing_ok=True)
        raise


def _add_metadata(writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)


class TensorDescription(Protocol):
    """What the header of a file says about a tensor that will be written."""

    @property
    def name(self) -> str: ...

    @property
    def quant(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


AnyTensor = TypeVar("AnyTensor", bound=TensorDescription)


class GgufWriter:
    """Writes one GGUF file: first the metadata and the description of all tensors, then the data of each tensor.

    Use it as a context manager. The file gets its name only if no exception is raised; until then it ends in `.part`.
    """

    def __init__(self, path: Path, architecture: str, file_type: str) -> None:
        self._path = path
        self._part = path.with_name(path.name + ".part")
        self._writer = gguf.GGUFWriter(self._part, architecture)
        self._writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        self._writer.add_file_type(int(_FILE_TYPES[file_type]))

    def add_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add strings, bools, lists, and numbers (an int as u32, a float as f32)."""
        _add_metadata(self._writer, metadata)

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
