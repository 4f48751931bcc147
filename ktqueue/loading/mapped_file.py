"""Files of a model, read whole or mapped into memory. Pipes and devices are refused: they may have no end."""

import mmap
import stat
from pathlib import Path
from typing import Any

import numpy as np

from ktqueue.core.errors import CheckpointError

_POINTER = b"version https://git-lfs"  # a repository's stand-in for a large file


def map_file(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Map the bytes of a file, read-only. The map lives as long as a view of it. Raises CheckpointError."""
    try:
        if _size(path) == 0:
            raise CheckpointError(f"{path}: the file is empty")
        with path.open("rb") as file:
            if file.read(len(_POINTER)) == _POINTER:
                raise CheckpointError(
                    f"{path}: this is a Git LFS pointer, not the file itself: run git lfs pull to download it"
                )
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def read_file(path: Path) -> bytes:
    """Return the bytes of a whole file. Raises CheckpointError."""
    try:
        _size(path)
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def _size(path: Path) -> int:
    """The bytes of a file. Raises CheckpointError for a pipe or a device, which must not even be opened; OSError."""
    found = path.stat()
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):  # the error of a folder names it as one
        raise CheckpointError(f"{path}: must be a file, not a pipe or a device")
    return found.st_size


def release_pages(data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Drop the pages of a mapped file from this process's memory.

    Views stay valid: pages that are read again come back from the file or from the system's page cache. `data` must
    come from `map_file`.
    """
    data.base.obj.madvise(mmap.MADV_DONTNEED)  # type: ignore[union-attr]
