"""Batches of several tenants and models: nobody waits for the lines of others that cannot run now."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ktqueue.batches.run import LEAST_WINDOW
from ktqueue.broker.batches import BatchRequest, BatchStatus
from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.core.config import Config, GatewayConfig
from ktqueue.core.tenants import TenantConfig, hash_of
from ktqueue.storage.folder import FolderStore
from ktqueue.workers.arq import batch_owner
from ktqueue.workers.arq.batch_owner import BatchOwner

LINES = 3 * LEAST_WINDOW


@pytest.fixture
async def owner(broker: Broker, model: Any, tmp_path: Path) -> AsyncIterator[FolderStore]:
    """An owner of batches, whose store this is. The model `gone` has no worker any more."""
    await (await Lease.register(broker, replace(model.card(), name="gone"))).close()
    store = FolderStore(tmp_path)
    slow = TenantConfig(name="slow", keys=(hash_of("slow"),), requests_per_minute=1, requests_burst=1)
    config = Config(broker=broker.config, gateway=GatewayConfig(tenants=(slow,)))
    task = asyncio.create_task(BatchOwner(broker, store, config).run())
    yield store
    task.cancel()
    await asyncio.wait([task])


async def create(broker: Broker, store: FolderStore, tenant: str, model: str = "demo", lines: int = LINES) -> str:
    name = f"file-{tenant}-{model}"
    async with store.create(f"files/{name}") as writing:
        for number in range(lines):
            body = {"model": model, "prompt": "Once", "max_tokens": 2}
            line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body}
            await writing.write(json.dumps(line).encode() + b"\n")
    request = BatchRequest(input_file_id=name, endpoint="/v1/completions", completion_window="1h")
    return (await broker.batches.create(request, window_seconds=3_600.0, tenant=tenant)).id


async def until(broker: Broker, tenant: str, batch_id: str, status: BatchStatus) -> None:
    async with asyncio.timeout(30):
        while (await broker.batches.get(tenant, batch_id)).status is not status:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def has_queued(broker: Broker, model: str, count: int) -> None:
    async with asyncio.timeout(30):
        while sum(depth.batch for depth in await broker.jobs.depth() if depth.model == model) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_lines_of_a_model_without_workers_leave_room_for_others(
    broker: Broker, owner: FolderStore, start_worker: Any
) -> None:
    await create(broker, owner, "default", "gone")
    await has_queued(broker, "gone", LEAST_WINDOW)
    batch_id = await create(broker, owner, "default")
    async with start_worker():
        await until(broker, "default", batch_id, BatchStatus.COMPLETED)


async def test_lines_that_wait_for_the_rate_of_their_tenant_leave_room_for_others(
    broker: Broker, owner: FolderStore, start_worker: Any
) -> None:
    slow = await create(broker, owner, "slow")
    async with start_worker():
        await until(broker, "slow", slow, BatchStatus.IN_PROGRESS)
        await asyncio.sleep(1)
        batch_id = await create(broker, owner, "default")
        await until(broker, "default", batch_id, BatchStatus.COMPLETED)


async def test_a_tenant_without_a_running_batch_is_not_kept_out_by_many_of_another(
    broker: Broker, owner: FolderStore, start_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_owner, "MAX_BATCHES", 2)
    waiting = [await create(broker, owner, "ann", "gone", 1) for _ in range(4)]
    for batch_id in waiting[:2]:
        await until(broker, "ann", batch_id, BatchStatus.IN_PROGRESS)
    async with start_worker():
        mine, later = [await create(broker, owner, "bob", lines=1) for _ in range(2)]
        await until(broker, "bob", mine, BatchStatus.COMPLETED)
        await until(broker, "bob", later, BatchStatus.COMPLETED)
    for batch_id in waiting[2:]:
        assert (await broker.batches.get("ann", batch_id)).status is BatchStatus.VALIDATING
