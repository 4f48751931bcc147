"""Batches over HTTP with real processes: as the openai package uses them, and while everything is killed."""

import argparse
import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, ConflictError, NotFoundError
from openai.types import Batch

from ktqueue.core.config import ControlConfig
from tests.chaos.batches import measure

ENDED = ("failed", "completed", "expired", "cancelled")


def lines(count: int, wrong: Callable[[int], bool] = lambda _: False, *, first: int = 0, **body: Any) -> bytes:
    """Batch lines c0, c1, ... for chats, some of which fail when they run."""
    return b"".join(
        json.dumps({
            "custom_id": f"c{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "demo",
                "messages": [{"role": "system", "content": f"You tell tales {number % 3}."},
                             {"role": "user", "content": f"Tale {number}"}],
                "max_tokens": 4,
                **body,
                **({"temperature": 900} if wrong(number) else {}),
            },
        }).encode() + b"\n"
        for number in range(first, first + count)
    )  # fmt: skip


def client_of(stack: Any, **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{stack.up.url}/v1", api_key="none", **options)


async def create(client: AsyncOpenAI, content: bytes, window: Any = "24h", **options: Any) -> Batch:
    file = await client.files.create(file=("lines.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window=window, **options
    )


async def until(client: AsyncOpenAI, batch: Batch, fits: Callable[[Batch], bool], within: float = 60.0) -> Batch:
    async with asyncio.timeout(within):
        while not fits(batch):
            await asyncio.sleep(0.02)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def until_ended(client: AsyncOpenAI, batch: Batch, within: float = 60.0) -> Batch:
    return await until(client, batch, lambda batch: batch.status in ENDED, within)


async def records(client: AsyncOpenAI, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    return [json.loads(line) for line in (await client.files.content(file_id)).text.splitlines()]


def numbers(found: list[Any]) -> list[int]:
    return [int(record["custom_id"].removeprefix("c")) for record in found]


@pytest.mark.long
async def test_the_openai_package_runs_batches(start_stack: Any) -> None:
    async with start_stack(control=ControlConfig()) as stack, client_of(stack, max_retries=0) as client:
        metadata = {"night": "one"}
        batch = await create(client, lines(60, lambda number: number % 10 == 7), metadata=metadata)
        assert (batch.status, batch.metadata, batch.endpoint) == ("validating", metadata, "/v1/chat/completions")
        batch = await until_ended(client, batch)
        assert batch.status == "completed", batch
        assert batch.request_counts is not None
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (60, 54, 6)
        assert batch.usage is not None
        assert batch.usage.output_tokens == 4 * 54
        assert batch.in_progress_at and batch.finalizing_at and batch.completed_at
        answered, failed = [await records(client, name) for name in (batch.output_file_id, batch.error_file_id)]
        assert numbers(answered) == [number for number in range(60) if number % 10 != 7]
        assert numbers(failed) == [7, 17, 27, 37, 47, 57]
        assert {record["response"]["status_code"] for record in failed} == {400}
        assert {record["response"]["body"]["object"] for record in answered} == {"chat.completion"}

        bad = await create(client, lines(3) + lines(1) + b"{\n")
        late = await create(client, lines(3, max_tokens=400, ignore_eos=True), window="1s")
        short_and_long = lines(5) + lines(40, first=5, max_tokens=400, ignore_eos=True)
        long = await create(client, short_and_long)
        bad = await until_ended(client, bad)
        assert bad.status == "failed"
        assert bad.errors is not None
        assert bad.errors.data is not None
        assert [(error.code, error.line) for error in bad.errors.data] == [
            ("duplicate_custom_id", 4), ("invalid_json_line", 5)
        ]  # fmt: skip
        await until(client, long, lambda batch: bool(batch.request_counts and batch.request_counts.completed))
        assert (await client.batches.cancel(long.id)).status == "cancelling"
        long = await until_ended(client, long)
        assert long.status == "cancelled"
        answered, failed = [await records(client, name) for name in (long.output_file_id, long.error_file_id)]
        assert sorted(numbers(answered) + numbers(failed)) == list(range(45))
        assert 5 <= len(answered) < 45
        assert {record["error"]["code"] for record in failed} == {"batch_cancelled"}
        late = await until_ended(client, late)
        assert late.status == "expired"
        failed = await records(client, late.error_file_id)
        assert {record["error"]["code"] for record in failed} == {"batch_expired"}

        newest = [late_or_long.id async for late_or_long in client.batches.list(limit=3)]  # further pages are fetched
        assert newest == [long.id, late.id, bad.id, batch.id]
        with pytest.raises(ConflictError, match="completed already"):
            await client.batches.cancel(batch.id)
        with pytest.raises(NotFoundError):
            await client.batches.retrieve("batch_unknown")
        for wrong in ({"completion_window": "1y"}, {"endpoint": "/v1/embeddings"}, {"metadata": {"a": "b" * 513}}):
            values: Any = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **wrong}
            with pytest.raises(BadRequestError) as refused:
                await client.batches.create(input_file_id=batch.input_file_id, **values)
            assert refused.value.param == next(iter(wrong))


@pytest.mark.long
@pytest.mark.timeout(180)
async def test_everything_dies_while_a_batch_runs() -> None:
    result = await measure(
        argparse.Namespace(lines=400, tokens=24, kills=5, minutes=2.0, lease=0.3, pause=0.05, seed=2)
    )
    assert result["status"] == "completed"
    assert result["kills"] >= 2
    assert result["each_line_once_and_in_order"]
