"""Storage formats of weights that packages bring. Knows no file format. See docs/guides/families.md.

Kernels of packages are not loaded: blocks are converted to a format that our kernels read, when they are loaded.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.installed import FORMATS, describe, load_entry, usable_entries
from ktqueue.operators.native import QUANTS, dequantize

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Shape = tuple[int, ...]

_FLOATS = ("F32", "F16", "BF16")
_CHECKED = 1 << 16  # numbers of a matrix that are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderLayout:
    """How a Hugging Face folder stores the matrices of a format.

    `quant_method`: in the folder's `quantization_config`. `parts`: names of a matrix's tensors below its module; the
    matrix is `weight` there. `shape`: returns the rows and columns of a matrix from the shapes of its parts. `join`:
    returns its blocks, [rows * columns / elements, block_bytes], from its parts, which have their own shapes. Parts in
    F32, F16 and BF16 are float32, float8 numbers are bytes, others have their own types.
    """

    quant_method: str
    parts: tuple[str, ...]
    shape: Callable[[Mapping[str, Shape]], Shape]
    join: Callable[[Mapping[str, npt.NDArray[Any]]], Bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFormat:
    """A storage format of weights.

    `name`: of the entry point. `elements`, `block_bytes`: numbers and bytes of a block. `decode`: returns the numbers
    of whole blocks, [blocks * elements] float32, from bytes [blocks * block_bytes]. `stored_as`: a format of our
    kernels that holds every block exactly. `convert`: returns blocks in that format from bytes of this one; None only
    for F32, F16 and BF16, which are made from the numbers. `gguf_type`: number of the tensor type in GGUF files; None:
    files name it, or have no such tensors. `folder`: how folders store it, or None.
    """

    name: str
    elements: int
    block_bytes: int
    decode: Callable[[Bytes], Floats]
    stored_as: str = "F32"
    convert: Callable[[Bytes], Bytes] | None = None
    gguf_type: int | None = None
    folder: FolderLayout | None = None

    def stored(self, data: Bytes, stored_block: tuple[int, int]) -> Bytes:
        """Convert whole blocks to `stored_as`, whose block has `stored_block` elements and bytes. Returns a copy.

        Raises CheckpointError that names the format and its package, if that fails, if the number of bytes is wrong,
        or if the first numbers are not equal.
        """
        count = data.size // self.block_bytes * self.elements
        try:
            if self.convert is None:
                numbers = self._decoded(data)
                blocks = _as_floats(numbers, self.stored_as)
            else:
                numbers = self._decoded(data[: max(1, _CHECKED // self.elements) * self.block_bytes])
                blocks = np.ascontiguousarray(self.convert(data)).view(np.uint8).reshape(-1)
            wanted = count // stored_block[0] * stored_block[1]
            if blocks.size != wanted:
                raise ValueError(f"{count} numbers in {self.stored_as} are {wanted} bytes, got {blocks.size}")
            head = blocks[: numbers.size // stored_block[0] * stored_block[1]]
            if not np.array_equal(dequantize(self.stored_as, head, numbers.size), numbers, equal_nan=True):
                raise ValueError(f"{self.stored_as} does not hold its numbers exactly")
        except Exception as error:  # code of a package can fail in any way
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise CheckpointError(f"{describe(FORMATS, self.name)}: {kind}{error}") from error
        return blocks

    def _decoded(self, data: Bytes) -> Floats:
        numbers = np.asarray(self.decode(data), np.float32).reshape(-1)
        if numbers.size != (wanted := data.size // self.block_bytes * self.elements):
            raise ValueError(f"decode must return {wanted} numbers for {data.size} bytes, got {numbers.size}")
        return numbers


def _as_floats(numbers: Floats, quant: str) -> Bytes:
    """Return numbers in F32, F16 or BF16. They may be rounded, which `stored` notices."""
    if quant == "BF16":
        return np.ascontiguousarray(numbers.view(np.uint16)[1::2]).view(np.uint8)
    with np.errstate(over="ignore"):
        return numbers.astype(np.float16 if quant == "F16" else np.float32).view(np.uint8)


def packaged_format(name: str) -> StorageFormat | None:
    """Return the format of a package with that name, or None. Raises CheckpointError that names the package."""
    found = load_entry(FORMATS, name, StorageFormat)
    if found is not None and (wrong := _problem(found, name)):
        raise CheckpointError(f"{describe(FORMATS, name)}: {wrong}")
    return found


def packaged_formats() -> Iterator[StorageFormat]:
    """Yield all formats of packages that can be used: see usable_entries."""
    return usable_entries(FORMATS, packaged_format)


def _problem(found: StorageFormat, name: str) -> str | None:
    if found.name != name:
        return f"the name of the format is {found.name!r}, which must be the name of the entry point"
    if found.name in QUANTS:
        return f"ktqueue has a format {name} already"
    if min(found.elements, found.block_bytes) < 1:
        return f"a block has {found.elements} elements and {found.block_bytes} bytes, both must be at least 1"
    if found.stored_as not in QUANTS:
        return f"stored_as must be a format of our kernels, {', '.join(QUANTS)}, got {found.stored_as!r}"
    if found.convert is None and found.stored_as not in _FLOATS:
        return f"a format that is stored as {found.stored_as} needs convert"
    return None
