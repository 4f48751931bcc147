"""Reads the header of a GGUF file (versions 2 and 3, little endian).

The file is not trusted. Every count, length and offset is checked against the size of the file before it is used. So a
damaged file raises CheckpointError and never causes a crash, a hang or a large allocation. Format: docs/gguf.md of
ggml. Knows no tensor types and no tensor names.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ktqueue.core.errors import CheckpointError
from ktqueue.core.short_repr import short_repr
from ktqueue.loading.mapped_file import map_file

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_NAME = 1 << 10  # bytes; real keys and tensor names are much shorter
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as the header describes it.

    `shape` is row-major, the reverse of the file's order. `type_id` is ggml's number of the tensor type. `offset` is in
    bytes from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of one GGUF file. `data` maps the whole file, read-only."""

    path: Path
    metadata: dict[str, Any]
    tensors: list[TensorInfo]
    data: np.ndarray[Any, np.dtype[np.uint8]]  # [file bytes]


def read_header(path: Path) -> GgufHeader:
    """Parse the header of one GGUF file. Raises CheckpointError that names the file and what is wrong."""
    data = map_file(path)
    cursor = _Cursor(path, data)
    if cursor.take(4, "the magic") != MAGIC:
        raise CheckpointError(f"{path}: not a GGUF file (it begins with {bytes(data[:4])!r})")
    version = cursor.unsigned("the version", 4)
    if version not in VERSIONS:
        hint = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
        raise CheckpointError(f"{path}: GGUF version {version} is not supported{hint}; known: 2 and 3")
    tensor_count = cursor.count("the tensor count", 24)  # name length, dimensions, type, offset
    entry_count = cursor.count("the metadata count", 13)  # key length, type, one byte
    metadata: dict[str, Any] = {}
    for _ in range(entry_count):
        key = cursor.name("a metadata key")
        if key in metadata:
            raise CheckpointError(f"{path}: metadata key {key!r} appears twice")
        metadata[key] = cursor.value(f"metadata {key}", cursor.unsigned(f"the type of metadata {key}", 4))
    tensor_infos = [_tensor(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise CheckpointError(f"{path}: general.alignment must be a power of two, got {short_repr(alignment)}")
    start = (cursor.position + alignment - 1) // alignment * alignment
    tensors = []
    names = set()
    for tensor in tensor_infos:
        if tensor.name in names:
            raise CheckpointError(f"{path}: tensor {tensor.name!r} appears twice")
        if tensor.offset % alignment:
            raise CheckpointError(f"{path}: the offset of tensor {tensor.name!r} is not a multiple of {alignment}")
        names.add(tensor.name)
        tensors.append(TensorInfo(tensor.name, tensor.shape, tensor.type_id, start + tensor.offset))
    return GgufHeader(path, metadata, tensors, data)


def _tensor(cursor: "_Cursor") -> TensorInfo:
    name = cursor.name("a tensor name")
    dimensions = cursor.unsigned(f"the dimensions of tensor {name}", 4)
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise CheckpointError(
            f"{cursor.path}: tensor {name!r} has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} expected"
        )
    shape = tuple(cursor.unsigned(f"the shape of tensor {name}", 8) for _ in range(dimensions))
    if 0 in shape:
        raise CheckpointError(f"{cursor.path}: tensor {name!r} has an empty dimension: {list(shape)}")
    type_id = cursor.unsigned(f"the type of tensor {name}", 4)
    return TensorInfo(name, shape[::-1], type_id, cursor.unsigned(f"the offset of tensor {name}", 8))


class _Cursor:
    """Reads values one after another and never past the end of the file."""

    def __init__(self, path: Path, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self.path = path
        self.position = 0
        self._view = memoryview(data.data)

    def take(self, size: int, what: str) -> bytes:
        left = len(self._view) - self.position
        if size > left:
            raise CheckpointError(f"{self.path}: truncated or corrupt: {what} needs {size} bytes, but {left} are left")
        self.position += size
        return bytes(self._view[self.position - size : self.position])

    def unsigned(self, what: str, size: int) -> int:
        return int.from_bytes(self.take(size, what), "little")

    def count(self, what: str, smallest: int) -> int:
        """Read the number of items that take at least `smallest` bytes each. They must all fit in the file."""
        number = self.unsigned(what, 8)
        left = len(self._view) - self.position
        if number * smallest > left:
            raise CheckpointError(f"{self.path}: truncated or corrupt: {what} is {number}, but {left} bytes are left")
        return number

    def name(self, what: str) -> str:
        """Read a string that messages may show as it is."""
        name = self.string(what, MAX_NAME)
        if not name.isprintable():
            raise CheckpointError(f"{self.path}: corrupt: {what} is not printable: {short_repr(name)}")
        return name

    def string(self, what: str, limit: int | None = None) -> str:
        size = self.count(f"the length of {what}", 1)
        if limit is not None and size > limit:
            raise CheckpointError(f"{self.path}: corrupt: {what} is {size} bytes long, the limit is {limit}")
        raw = self.take(size, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: corrupt: {what} is not UTF-8") from error

    def value(self, what: str, kind: int) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _BOOL:
            return self.take(1, what) != b"\0"
        if kind in _SCALARS:
            number = np.frombuffer(self.take(np.dtype(_SCALARS[kind]).itemsize, what), _SCALARS[kind])[0]
            # The shortest decimal of the float32: 1e-06, not 9.999999974752427e-07.
            return float(str(number)) if kind == 6 else number.item()
        if kind == _ARRAY:
            return self._array(what)
        raise CheckpointError(f"{self.path}: corrupt: {what} has the unknown type {kind}")

    def _array(self, what: str) -> list[Any]:
        kind = self.unsigned(f"the element type of {what}", 4)
        if kind == _STRING:
            return self._strings(what, self.count(f"the length of {what}", 8))
        if kind == _BOOL:
            return [byte != 0 for byte in self.take(self.count(f"the length of {what}", 1), what)]
        if kind in _SCALARS:
            size = np.dtype(_SCALARS[kind]).itemsize
            values: list[Any] = np.frombuffer(
                self.take(self.count(f"the length of {what}", size) * size, what), _SCALARS[kind]
            ).tolist()
            return values
        raise CheckpointError(f"{self.path}: corrupt: {what} is an array of the unknown type {kind}")

    def _strings(self, what: str, number: int) -> list[str]:
        """Read strings in place, without a call for each: a list of tokens has 150,000 entries."""
        view, position, end = self._view, self.position, len(self._view)
        length = struct.Struct("<Q")
        values = []
        try:
            for _ in range(number):
                (size,) = length.unpack_from(view, position)
                position += 8
                if size > end - position:
                    raise CheckpointError(f"{self.path}: truncated or corrupt: a string of {what} is {size} bytes long")
                values.append(str(view[position : position + size], "utf-8"))
                position += size
        except (struct.error, UnicodeDecodeError) as error:
            raise CheckpointError(f"{self.path}: truncated or corrupt: {what}: {error}") from error
        self.position = position
        return values


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """What a file says of its model: the values whose keys begin with `{architecture}.`, by the rest of the key.

    `source`: the beginning of messages. All methods raise CheckpointError that names the key of a wrong value.
    """

    architecture: str
    values: Mapping[str, Any]
    source: str

    def __contains__(self, name: str) -> bool:
        return self.key(name) in self.values

    def key(self, name: str) -> str:
        """Return the whole key."""
        return f"{self.architecture}.{name}"

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value as it is stored, or `default` if the key is missing."""
        return self.values.get(self.key(name), default)

    def integer(self, name: str, default: Any = None) -> int:
        """Return a number from 1 to 2^31 - 1."""
        return int(self.checked(name, self.get(name, default), int))

    def number(self, name: str, default: Any = None) -> float:
        """Return a positive number."""
        return float(self.checked(name, self.get(name, default), float))

    def count(self, name: str) -> int:
        """Return a number from 0 to 2^31 - 1, or 0 if the key is missing."""
        value = self.get(name, 0)
        return 0 if value == 0 and not isinstance(value, bool) else int(self.checked(name, value, int))

    def flag(self, name: str, default: bool | None = None) -> bool:
        """Return a truth value, or `default` if the key is missing."""
        if not isinstance(value := self.get(name, default), bool):
            raise self.error(name, f"must be true or false, got {short_repr(value)}")
        return value

    def flags(self, name: str, layers: int) -> list[bool]:
        """Return a list that says something of each of so many layers."""
        listed = self.get(name)
        if not isinstance(listed, list) or len(listed) < layers or not {*map(type, listed)} <= {bool}:
            raise self.error(name, f"must be true or false for each of {layers} layers")
        return listed[:layers]

    def checked(self, name: str, value: Any, kind: type) -> int | float:
        """Return `value`, which is stored under the key, if it is a positive number of `kind`, int or float."""
        is_valid = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if kind is int:
            is_valid = is_valid and isinstance(value, int) and 0 < value < 1 << 31
        elif is_valid:
            is_valid = 0 < value < 1e30
        if not is_valid:
            raise self.error(name, f"must be a positive number, got {short_repr(value)}")
        return int(value) if kind is int else float(value)

    def error(self, name: str, problem: str, **facts: int) -> CheckpointError:
        """Return the error for a key. `facts`: `limit` and `value`, where there are such numbers."""
        key = self.key(name)
        return CheckpointError(f"{self.source}: metadata key {key} {problem}", param=key, **facts)
