"""Records of files: quotas, pages, other tenants, expiry."""

import asyncio
from typing import Any

import pytest

from ktqueue.broker.batches import BatchRequest, BatchStatus
from ktqueue.broker.broker import Broker
from ktqueue.broker.files import LOOKED_AT, FileFacts, FileLimits, Order, new_file_id
from ktqueue.core.config import StorageConfig
from ktqueue.core.errors import FileInUse, FileLimitReached, FileNotFound, InvalidRequest
from ktqueue.core.tenants import TenantLimits

LIMITS = FileLimits(files=3, bytes=100)


def facts(file_id: str | None = None, **fields: Any) -> FileFacts:
    defaults = {"tenant": "acme", "filename": "a.jsonl", "purpose": "batch", "size": 10, "seconds": 60.0}
    return FileFacts(id=file_id or new_file_id(), **{**defaults, **fields})


def test_limits_are_those_of_the_tenant_or_of_the_settings() -> None:
    settings = StorageConfig(max_files=7, max_files_bytes=70)
    assert FileLimits.of(settings, None) == FileLimits(7, 70)
    assert FileLimits.of(settings, TenantLimits(max_files=2)) == FileLimits(2, 70)


async def test_a_file_counts_once_until_it_is_deleted(broker: Broker, raw: Any) -> None:
    first = await broker.files.add(facts(filename="drei Wünsche.jsonl"), LIMITS)
    assert await broker.files.get("acme", first.id) == first
    assert first.expires_at - first.created_at == 60
    for _ in range(5):  # as a batch whose owner dies again and again
        assert (await broker.files.add(facts(first.id, size=50), LIMITS)).created_at == first.created_at
    with pytest.raises(FileLimitReached, match="would have 101 bytes") as caught:
        await broker.files.add(facts(size=51), LIMITS)
    assert (caught.value.param, caught.value.limit, caught.value.value) == ("max_files_bytes", 100, 101)
    second = await broker.files.add(facts(size=50), LIMITS)
    third = await broker.files.add(facts(size=0), LIMITS)
    with pytest.raises(FileLimitReached, match="3 files are stored"):
        await broker.files.check_room("acme", 0, LIMITS)
    written = await broker.files.add(facts(size=1_000), None)
    for tenant in ("other", "bytes", "expiry"):  # the last two are words of our keys
        await broker.files.add(facts(tenant=tenant), LIMITS)
        for call in (broker.files.get, broker.files.delete):
            with pytest.raises(FileNotFound):
                await call(tenant, first.id)
    for file in (first, second, third, written):
        await broker.files.delete("acme", file.id)
        with pytest.raises(FileNotFound):
            await broker.files.delete("acme", file.id)
    await broker.files.check_room("acme", 100, LIMITS)
    for tenant in ("other", "bytes", "expiry"):
        files, _ = await broker.files.list(tenant, limit=10)
        await broker.files.delete(tenant, files[0].id)
    assert [key for key in raw.keys("*file*") if raw.ttl(key) < 0] == []


async def test_no_race_exceeds_a_quota(broker: Broker) -> None:
    results = await asyncio.gather(*(broker.files.add(facts(), LIMITS) for _ in range(20)), return_exceptions=True)
    assert sum(isinstance(result, FileLimitReached) for result in results) == 17


async def test_files_are_listed_page_by_page(broker: Broker) -> None:
    ids = [(await broker.files.add(facts(size=number, purpose="ab"[number % 2]), None)).id for number in range(12)]
    newest, has_more = await broker.files.list("acme", limit=5)
    assert [file.id for file in newest] == ids[:-6:-1]
    assert has_more
    await broker.files.delete("acme", ids[3])
    rest, has_more = await broker.files.list("acme", limit=20, order="asc", after=ids[1], purpose="b")
    assert [file.id for file in rest] == ids[5::2]
    assert not has_more
    page, has_more = await broker.files.list("acme", limit=4, order="asc", after=ids[1], purpose="b")
    assert len(page) == 4
    assert not has_more
    for tenant, unknown in (("acme", new_file_id()), ("other", ids[1]), ("other", ids[3])):
        with pytest.raises(InvalidRequest, match="after must be"):
            await broker.files.list(tenant, limit=1, after=unknown)
    await asyncio.gather(*(broker.files.add(facts(), None) for _ in range(LOOKED_AT)))
    found, _ = await broker.files.list("acme", limit=1, purpose="a")
    assert [file.id for file in found] == [ids[10]]


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_a_list_goes_on_after_a_deleted_file(broker: Broker, order: Order) -> None:
    ids = [(await broker.files.add(facts(), None)).id for _ in range(7)]
    seen: list[str] = []
    page, has_more = await broker.files.list("acme", limit=3, order=order)
    while page:
        seen += [file.id for file in page]
        for file in page:
            await broker.files.delete("acme", file.id)
        if has_more:
            page, has_more = await broker.files.list("acme", limit=3, order=order, after=seen[-1])
        else:
            page = []
    assert seen == (ids if order == "asc" else ids[::-1])
    late = (await broker.files.add(facts(), None)).id
    page, _ = await broker.files.list("acme", limit=3, order="asc", after=ids[-1])
    assert [file.id for file in page] == [late]


async def test_deleted_files_do_not_add_up(broker: Broker, raw: Any) -> None:
    deleted = f"{broker.keys.tag}:files:deleted:acme"
    raw.zadd(deleted, {f"file-{place}": place for place in range(2, 20_002)})
    file = await broker.files.add(facts(), None)
    await broker.files.delete("acme", file.id)
    assert raw.zcard(deleted) == 20_000
    assert raw.zrange(deleted, 0, 0) == [b"file-3"]
    assert raw.zrange(deleted, -1, -1) == [file.id.encode()]


async def test_the_input_of_a_batch_is_kept_until_the_batch_has_ended(broker: Broker) -> None:
    mine, others = (facts(tenant=tenant, seconds=0.001) for tenant in ("acme", "other"))
    for file in (mine, others):
        await broker.files.add(file, LIMITS)
    request = BatchRequest(input_file_id=mine.id, endpoint="/v1/completions", completion_window="24h")
    await broker.batches.create(request, window_seconds=60, tenant="acme")
    await asyncio.sleep(0.01)
    assert await broker.files.expired(10) == [(others.id, "other")]
    with pytest.raises(FileNotFound):
        await broker.files.get("acme", mine.id)
    found = await broker.batches.take("owner")
    assert found is not None
    with pytest.raises(FileInUse, match=f"{mine.id} is the input of the batch {found[1].id}, which has not ended"):
        await broker.files.delete("acme", mine.id)
    await broker.batches.update(found[0], change=(BatchStatus.VALIDATING, BatchStatus.FAILED))
    assert {file_id for file_id, _ in await broker.files.expired(10)} == {mine.id, others.id}
    await broker.files.delete("acme", mine.id)


async def test_expired_files_are_not_found_and_can_be_deleted(broker: Broker, raw: Any) -> None:
    kept = await broker.files.add(facts(), None)
    late = await broker.files.add(facts(seconds=0.001), None)
    lost = await broker.files.add(facts(seconds=0.001), None)
    await asyncio.sleep(0.01)
    raw.delete(f"{broker.keys.tag}:file:{lost.id}")  # by hand
    with pytest.raises(FileNotFound):
        await broker.files.get("acme", late.id)
    assert [file.id for file in (await broker.files.list("acme", limit=10))[0]] == [kept.id]
    assert sorted(await broker.files.expired(10)) == sorted([(late.id, "acme"), (lost.id, "")])
    assert await broker.files.missing([f"file:{kept.id}", f"file:{lost.id}"]) == [f"file:{lost.id}"]
    await broker.files.delete("acme", late.id)
    with pytest.raises(FileNotFound):
        await broker.files.delete("", lost.id)
    assert await broker.files.expired(10) == []
