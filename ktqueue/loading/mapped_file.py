"""Files mapped into memory, read-only."""

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from ktqueue.core.errors import CheckpointError

_POINTER = b"version https://git-lfs"  # what a repository has in the place of a large file


def map_file(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The file's bytes, mapped read-only; the map lives as long as a view of it. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise CheckpointError(f"{path}: the file is empty")
            if file.read(len(_POINTER)) == _POINTER:
                raise CheckpointError(f"{path}: a pointer of Git LFS, not the file itself: git lfs pull fetches that")
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def release_pages(data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Count none of the pages of a file mapped by `map_file` as this process's memory any more; views stay valid, and
    what is read again comes back from the file or the system's cache of it."""
    data.base.obj.madvise(mmap.MADV_DONTNEED)  # type: ignore[union-attr]
