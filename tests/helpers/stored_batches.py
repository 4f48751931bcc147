"""Batches in a store: their input, their end, and their files."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import redis

from ktqueue.broker.batches import BatchRecord, BatchRequest
from ktqueue.broker.broker import Broker
from ktqueue.storage.store import Store

INPUT = "file-in"


async def put(store: Store, count: int, suffix: str = "", **body: Any) -> None:
    async with store.create(f"files/{INPUT}") as writing:
        for number in range(count):
            values = {"model": "demo", "prompt": f"Tale {number}", "max_tokens": 4, "seed": number, **body}
            if number % 5 == 3:
                values["temperature"] = 900
            line = {"custom_id": f"c{number}{suffix}", "method": "POST", "url": "/v1/completions", "body": values}
            await writing.write(json.dumps(line).encode() + b"\n\n")


async def create(broker: Broker, seconds: float = 3_600.0, tenant: str = "default") -> str:
    request = BatchRequest(input_file_id=INPUT, endpoint="/v1/completions", completion_window="1h")
    return (await broker.batches.create(request, window_seconds=seconds, tenant=tenant)).id


async def content(store: Store, file_id: str | None) -> bytes:
    return b"" if file_id is None else b"".join([part async for part in store.read(f"files/{file_id}")])


async def outputs(broker: Broker, store: Store, record: BatchRecord) -> tuple[list[Any], list[Any]]:
    """The lines of the output file and of the error file. Nothing else is left in the store."""
    ids = (record.facts.output_file_id, record.facts.error_file_id)
    assert {*await store.names("files/"), *await store.names("batches/")} == {
        f"files/{name}" for name in (INPUT, *ids) if name is not None
    }
    found = [[json.loads(line) for line in (await content(store, file_id)).decode().splitlines()] for file_id in ids]
    assert (record.facts.answered, record.facts.failed) == (len(found[0]), len(found[1]))
    for file_id in filter(None, ids):
        file = await broker.files.get(record.tenant, file_id)
        assert (file.purpose, file.size) == ("batch_output", await store.size(f"files/{file_id}"))
    return found[0], found[1]


async def until(broker: Broker, batch_id: str, fits: Callable[[BatchRecord], bool], tenant: str = "default") -> None:
    async with asyncio.timeout(60):
        while not fits(await broker.batches.get(tenant, batch_id)):  # noqa: ASYNC110 # what it asks of has no event
            await asyncio.sleep(0.01)


async def until_clean(store: Store) -> None:
    """Wait until what only the run needed is deleted, which is after the last status."""
    async with asyncio.timeout(60):
        while await store.names("batches/"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def until_released(broker: Broker) -> None:
    """Wait until no batch is owned or waits for an owner."""
    async with asyncio.timeout(60):
        with redis.Redis.from_url(broker.config.url or "") as client:
            while client.zcard(f"{broker.keys.tag}:batches"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
