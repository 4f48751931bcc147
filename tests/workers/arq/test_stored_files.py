"""Retention of the store: expired files, and objects without a record."""

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ktqueue.broker.batches import BatchRequest
from ktqueue.broker.broker import Broker
from ktqueue.broker.files import FileFacts, content_name, new_file_id
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import FileNotFound, Unavailable
from ktqueue.storage.folder import WRITING, FolderStore
from ktqueue.workers.arq.stored_files import INSTALLATION, purge_store


async def test_old_files_are_deleted_and_others_kept(
    broker_config: BrokerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path)
    async with await Broker.open(broker_config) as broker:

        async def put(name: str) -> str:
            async with store.create(name) as writing:
                await writing.write(b"x")
            return name

        async def add(seconds: float) -> str:
            facts = FileFacts(id=new_file_id(), tenant="acme", filename="a", purpose="batch", size=1, seconds=seconds)
            name = await put(content_name(facts.id))
            await broker.files.add(facts, None)
            return name

        request = BatchRequest(input_file_id="file-1", endpoint="/v1/completions", completion_window="24h")
        batch = await broker.batches.create(request, window_seconds=60, tenant="acme")
        kept = [
            await add(60),
            await put(content_name(new_file_id())),  # its record is on its way
            await put(f"batches/{batch.id}/index"),
        ]
        late = await add(0.001)
        orphans = [await put(content_name(new_file_id())), await put("batches/batch_gone/out-1")]
        (tmp_path / WRITING / "dead").write_bytes(b"half")
        day = time.time() - 2 * 86_400
        for name in (kept[0], kept[2], *orphans):
            os.utime(tmp_path / name, (day, day))
        await asyncio.sleep(0.01)
        assert await purge_store(broker, store) == 3
        assert sorted([*await store.names("files/"), *await store.names("batches/")]) == sorted(kept)
        assert not list((tmp_path / WRITING).iterdir())
        assert await broker.files.expired(10) == []
        with pytest.raises(FileNotFound):
            await broker.files.get("acme", late.removeprefix("files/"))
        assert await purge_store(broker, store) == 0

        async def fails() -> None:
            raise Unavailable("the disk is gone")

        monkeypatch.setattr(store, "sweep", fails)
        assert await purge_store(broker, store) == 0  # no error of the chore


async def test_objects_of_another_installation_are_left_alone(
    broker_config: BrokerConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two installations have the same store by mistake, and later one of them loses its Redis."""
    store = FolderStore(tmp_path)

    async def put(name: str) -> str:
        async with store.create(name) as writing:
            await writing.write(b"x")
        return name

    async with (
        await Broker.open(replace(broker_config, prefix="ours")) as ours,
        await Broker.open(replace(broker_config, prefix="theirs")) as theirs,
    ):
        await purge_store(ours, store)
        assert caplog.text == ""
        orphan = await put(content_name(new_file_id()))
        assert await purge_store(ours, store) == 0  # from here on the store is ours
        for _ in range(2):
            assert await purge_store(theirs, store, orphan_seconds=-60) == 0
        assert "another installation" in caplog.text
        assert await store.names("files/") == [orphan]
        assert await purge_store(ours, store, orphan_seconds=-60) == 1
        await put(orphan)
        await store.delete(INSTALLATION)
        assert await purge_store(theirs, store, orphan_seconds=-60) == 1  # as its operator wants
        assert await purge_store(ours, store, orphan_seconds=-60) == 0
