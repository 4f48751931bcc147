"""A store in a folder, which may be on a file system that several hosts share.

An object is written to a file in `.writing`, and renamed once it is whole and durable. Its writer holds a lock on that
file, so that `sweep` can tell a living writer from a dead one without a clock.
"""

import asyncio
import errno
import fcntl
import os
import secrets
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

from ktqueue.core.errors import Unavailable
from ktqueue.core.units import format_bytes
from ktqueue.storage.store import PART_BYTES, THREADS, NotStored, Store, check_name, check_prefix, is_name

WRITING = ".writing"

Result = TypeVar("Result")


class FolderStore(Store):
    """The store `root`, a folder that is made when it is needed.

    `min_free_bytes`: nothing is written while the file system has less space than that.
    """

    def __init__(self, root: Path, min_free_bytes: int = 0) -> None:
        self._root = root
        self._min_free_bytes = min_free_bytes
        self._was_swept = False
        self._own: set[Path] = set()  # files that this process is writing
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="store")

    @asynccontextmanager
    async def create(self, name: str) -> AsyncIterator["FileWriting"]:
        path = self._path(name)
        if not self._was_swept:  # by the first writer of a process, so that a process that dies often leaves little
            self._was_swept = True
            await self.sweep()
        file = _TemporaryFile(self._root, self._min_free_bytes)
        writing = FileWriting(self, file)
        self._own.add(file.path)
        try:
            await self._run(file.open)
            yield writing
            await writing.flush()
            await self._run(file.commit, path)
        finally:
            await asyncio.shield(self._run(self._close, file))

    async def read(self, name: str, start: int = 0, length: int | None = None) -> AsyncGenerator[bytes, None]:
        path, place, left = self._path(name), start, length
        while left is None or left > 0:
            data = await self._run(self._read, path, place, PART_BYTES if left is None else min(left, PART_BYTES))
            if not data:
                return
            place += len(data)
            left = None if left is None else left - len(data)
            yield data

    async def size(self, name: str) -> int:
        return (await self._run(self._status, self._path(name))).st_size

    async def age(self, name: str) -> float:
        return time.time() - (await self._run(self._status, self._path(name))).st_mtime

    async def delete(self, name: str) -> None:
        await self._run(self._delete, self._path(name))

    async def names(self, prefix: str) -> list[str]:
        return await self._run(self._names, self._root / check_prefix(prefix))

    async def sweep(self) -> None:
        await self._run(self._sweep)

    async def _run(self, work: Callable[..., Result], *args: object) -> Result:
        """Call `work` in a thread. Raises Unavailable."""
        with self._usable():
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            raise Unavailable(f"the store of files cannot be used: {reason}", param="storage.location") from error

    def _path(self, name: str) -> Path:
        return self._root / check_name(name)

    def _read(self, path: Path, start: int, count: int) -> bytes:
        """A part of a file, which is opened for it alone: slow readers then hold no open files."""
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._not_stored(path) from error
        try:
            return os.pread(descriptor, count, start)
        finally:
            os.close(descriptor)

    def _status(self, path: Path) -> os.stat_result:
        try:
            return path.stat()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._not_stored(path) from error

    def _not_stored(self, path: Path) -> NotStored:
        """The error for a missing file. Raises OSError if the whole store is missing: it may not be mounted."""
        if not (self._root / WRITING).is_dir():  # each writer makes it, and nobody deletes it
            raise OSError(errno.ENOENT, f"nothing was ever stored in {self._root}, or it is not mounted")
        return NotStored(f"the store has no object {path.name}", value=path.name)

    def _close(self, file: "_TemporaryFile") -> None:
        file.close()
        self._own.discard(file.path)

    def _delete(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        folder = path.parent
        while folder != self._root:
            try:
                folder.rmdir()
            except OSError:  # it has other objects, or somebody else has deleted it
                return
            folder = folder.parent

    def _names(self, folder: Path) -> list[str]:
        found = []
        for parent, _, files in os.walk(folder):  # a folder that is missing has no objects
            found += [str((Path(parent) / file).relative_to(self._root)) for file in files]
        return sorted(filter(is_name, found))

    def _sweep(self) -> None:
        for path in (self._root / WRITING).glob("*"):
            if path in self._own:  # on NFS our own lock would not keep us out, and closing the file would end it
                continue
            try:
                descriptor = os.open(path, os.O_RDWR)
            except FileNotFoundError:  # its writer was ready just now
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            except BlockingIOError:  # its writer lives
                continue
            finally:
                os.close(descriptor)


class FileWriting:
    """See `Writing`. Small writes are collected."""

    def __init__(self, store: FolderStore, file: "_TemporaryFile") -> None:
        self._store = store
        self._file = file
        self._buffer = bytearray()
        self.size = 0

    async def write(self, data: bytes) -> None:
        self._buffer += data
        self.size += len(data)
        if len(self._buffer) >= PART_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Write what was collected."""
        data, self._buffer = self._buffer, bytearray()
        for start in range(0, len(data), PART_BYTES):
            await self._store._run(self._file.write, bytes(data[start : start + PART_BYTES]))


class _TemporaryFile:
    """The file of an object that is not whole yet. Its methods block. The lock is for threads that outlive a task."""

    def __init__(self, root: Path, min_free_bytes: int) -> None:
        self._root = root
        self._min_free_bytes = min_free_bytes
        self.path = root / WRITING / secrets.token_hex(8)
        self._descriptor = -1
        self._is_closed = False
        self._lock = threading.Lock()

    def open(self) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._lock:
            self._check_open()
            while True:
                self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
                if os.fstat(self._descriptor).st_nlink:
                    return
                os.close(self._descriptor)  # a sweep deleted it before it was locked
                self._descriptor = -1

    def write(self, data: bytes) -> None:
        with self._lock:
            self._check_open()
            status = os.fstatvfs(self._descriptor)
            if status.f_bavail * status.f_frsize < self._min_free_bytes:
                least = format_bytes(self._min_free_bytes)
                raise OSError(errno.ENOSPC, f"less than {least} are free (storage.min_free_bytes)")
            view = memoryview(data)
            while view:
                view = view[os.write(self._descriptor, view) :]

    def commit(self, path: Path) -> None:
        """Make it durable, and give it its name."""
        with self._lock:
            self._check_open()
            os.fsync(self._descriptor)
            while True:
                made = [path.parent, *(parent for parent in path.parents if not parent.exists())]
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                try:
                    self.path.rename(path)
                    break
                except FileNotFoundError:
                    if not self.path.exists():
                        raise
                    # else a delete has just removed the folder, which was empty
            for folder in {*made, *(parent.parent for parent in made)}:
                _sync(folder)

    def close(self) -> None:
        """Close it, and delete it unless it has a name. A write that still runs ends first."""
        with self._lock:
            self._is_closed = True
            if self._descriptor >= 0:
                self.path.unlink(missing_ok=True)
                os.close(self._descriptor)
                self._descriptor = -1

    def _check_open(self) -> None:
        if self._is_closed:
            raise OSError(errno.EBADF, "the writer has left")


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
