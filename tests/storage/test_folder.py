"""The store in a folder, with real files."""

import asyncio
import os
from pathlib import Path

import pytest

from ktqueue.core.config import StorageConfig
from ktqueue.core.errors import Unavailable
from ktqueue.storage.folder import WRITING, FolderStore
from ktqueue.storage.opening import open_store
from ktqueue.storage.store import PART_BYTES, NotStored, Store


async def put(store: Store, name: str, data: bytes) -> None:
    async with store.create(name) as writing:
        await writing.write(data)


async def get(store: Store, name: str, start: int = 0, length: int | None = None) -> list[bytes]:
    return [part async for part in store.read(name, start, length)]


def leftovers(root: Path) -> list[Path]:
    return list((root / WRITING).glob("*"))


async def test_an_object_is_there_once_its_block_has_ended(tmp_path: Path) -> None:
    store = open_store(StorageConfig(min_free_bytes=0), tmp_path)
    data = os.urandom(2 * PART_BYTES + 7)
    async with store.create("files/file-1") as writing:
        for start in range(0, len(data), 100_000):
            await writing.write(data[start : start + 100_000])
        assert writing.size == len(data)
        with pytest.raises(NotStored):
            await store.size("files/file-1")
    assert await store.size("files/file-1") == len(data)
    assert 0 <= await store.age("files/file-1") < 60
    assert [len(part) for part in await get(store, "files/file-1")] == [PART_BYTES, PART_BYTES, 7]
    assert b"".join(await get(store, "files/file-1", 5, PART_BYTES + 1)) == data[5 : PART_BYTES + 6]
    assert await get(store, "files/file-1", len(data)) == []
    await put(store, "files/file-1", b"new")
    assert await get(store, "files/file-1") == [b"new"]
    assert (tmp_path / "files" / "files" / "file-1").stat().st_mode & 0o077 == 0


async def test_what_ends_early_leaves_nothing(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    with pytest.raises(ZeroDivisionError):
        async with store.create("batches/b/out") as writing:
            await writing.write(bytes(PART_BYTES))
            raise ZeroDivisionError
    begun = asyncio.Event()

    async def write_for_ever() -> None:
        async with store.create("batches/b/out") as writing:
            while True:
                await writing.write(bytes(PART_BYTES))
                begun.set()

    task = asyncio.create_task(write_for_ever())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await store.names("batches/") == []
    assert leftovers(tmp_path) == []


async def test_a_sweep_deletes_what_a_dead_writer_left_and_nothing_else(tmp_path: Path) -> None:
    """A dead writer's file is as its process left it: without a lock."""
    store = FolderStore(tmp_path)
    async with store.create("files/a") as writing:
        await writing.write(bytes(PART_BYTES))
        (tmp_path / WRITING / "dead").write_bytes(b"half")
        await FolderStore(tmp_path).sweep()
        assert len(leftovers(tmp_path)) == 1
    (tmp_path / WRITING / "dead").write_bytes(b"half")
    await put(FolderStore(tmp_path), "files/b", b"")  # the first object of a process
    assert leftovers(tmp_path) == []
    assert await store.names("files/") == ["files/a", "files/b"]


async def test_objects_are_listed_and_deleted_by_folder(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    for name in ("batches/b2/out-1", "batches/b1/index", "batches/b1/out-1", "files/a"):
        await put(store, name, b"x")
    assert await store.names("batches/b1/") == ["batches/b1/index", "batches/b1/out-1"]
    assert await store.names("batches/none/") == []
    for name in await store.names("batches/"):
        await store.delete(name)
        await store.delete(name)
    assert not (tmp_path / "batches").exists()
    with pytest.raises(NotStored):
        await get(store, "batches/b1/index")
    await asyncio.gather(*(_put_and_delete(store, f"batches/{number % 3}/x{number}") for number in range(60)))


async def _put_and_delete(store: Store, name: str) -> None:
    await put(store, name, b"x")
    assert await get(store, name) == [b"x"]
    await store.delete(name)


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../a", "files/../../a", "files//a", ".writing/a", "a\0", "a/"])
async def test_no_name_leaves_the_folder(tmp_path: Path, name: str) -> None:
    store = FolderStore(tmp_path)
    with pytest.raises(ValueError, match="name of an object"):
        await put(store, name, b"")
    with pytest.raises(ValueError, match="name of an object"):
        await store.delete(name)


async def test_a_store_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    full = FolderStore(tmp_path, min_free_bytes=1 << 62)
    with pytest.raises(Unavailable, match="min_free_bytes"):
        await put(full, "files/a", b"x")
    assert leftovers(tmp_path) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="Not a directory"):
        await put(FolderStore(tmp_path / "file"), "files/a", b"x")
