"""Keys of another type under our names, and values of another type in our records: no worker ends or spins."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ktqueue.broker.batches import BatchRequest
from ktqueue.broker.broker import Broker
from ktqueue.broker.conversations import LatestAnswer
from ktqueue.broker.files import FileFacts, new_file_id
from ktqueue.broker.lease import Lease
from ktqueue.broker.reaper import Reaper
from ktqueue.broker.responses import StoredResponse
from ktqueue.broker.scripts import ScriptRefused
from ktqueue.broker.snapshot import take_snapshot
from ktqueue.core.codec import CodecError
from ktqueue.core.errors import FileNotFound, JobNotFound, JournalRegressed, LeaseLost, Unavailable
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest
from ktqueue.core.tenants import TenantLimits

STATES = (JobState.DONE, JobState.FAILED)
MakeRequest = Callable[..., GenerationRequest]


def spoil(broker: Broker, raw: Any, name: str) -> None:
    """Replace a key by a list."""
    raw.delete(f"{broker.keys.tag}:{name}")
    raw.rpush(f"{broker.keys.tag}:{name}", "foreign")


async def test_a_journal_of_another_type_is_lost_and_holds_up_no_other_job(
    broker: Broker, card: ModelCard, make_request: MakeRequest, raw: Any
) -> None:
    lease = await Lease.register(broker, card)
    spoilt, good = [await broker.jobs.submit(make_request()) for _ in range(2)]
    await lease.claim(2)
    await lease.commit([(job.id, TokenEvent(seq=1, text="a")) for job in (spoilt, good)])
    spoil(broker, raw, f"journal:{spoilt.id}")
    await lease.release([spoilt.id])
    (again,) = await lease.claim(1)
    assert (again.job_id, again.events) == (spoilt.id, [])  # it begins anew
    assert await broker.journal.lengths([spoilt.id, good.id]) == [0, 1]
    await lease.commit([(spoilt.id, TokenEvent(seq=1, text="b")), (good.id, TokenEvent(seq=2, text="b"))])
    spoil(broker, raw, f"journal:{spoilt.id}")
    await lease.commit([(job.id, TokenEvent(seq=seq, state=JobState.DONE)) for job, seq in ((spoilt, 2), (good, 3))])
    assert [event.text for event in await broker.journal.replay(good.id)] == ["a", "b", ""]
    with pytest.raises(JournalRegressed, match="begins at 2: earlier events are lost"):
        await broker.journal.replay(spoilt.id)
    await lease.close()


async def test_a_record_of_another_type_is_removed(
    broker: Broker, card: ModelCard, make_request: MakeRequest, raw: Any
) -> None:
    lease = await Lease.register(broker, card)
    spoilt, good = [await broker.jobs.submit(make_request()) for _ in range(2)]
    spoil(broker, raw, f"job:{spoilt.id}")
    with pytest.raises(LeaseLost, match="WRONGTYPE"):
        await lease.claim(2)
    async with asyncio.timeout(10):
        while not await broker.reaper().scrub(keys=1, pause=0.0):  # whichever key is looked at first
            pass
    with pytest.raises(JobNotFound):
        await broker.jobs.get(spoilt.id)
    assert [claim.job_id for claim in await lease.claim(2)] == [good.id]
    await lease.close()


async def test_the_reaper_goes_on_beside_a_step_that_fails(
    broker: Broker, raw: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(reaper: Reaper) -> tuple[int, int]:
        raise ScriptRefused("WRONGTYPE", "reap")

    monkeypatch.setattr(Reaper, "reap", fail)
    task = asyncio.create_task(broker.reaper().run())
    await asyncio.sleep(1.0)
    assert raw.exists(f"{broker.keys.tag}:scrub")  # the steps after the one that fails
    assert caplog.text.count("WRONGTYPE") == 1 and "Traceback" not in caplog.text
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


SINGLE = (
    "live", "ended", "deadlines", "held", "failed", "failed:bytes", "stored", "backlog", "bound", "webhooks", "weights",
    "models", "models:more", "models:seen", "leases", "scrub", "tick", "tenant:acme",
)  # fmt: skip


@pytest.mark.parametrize("name", SINGLE)
async def test_a_key_of_another_type_holds_up_no_job_after_a_reap(
    broker: Broker, card: ModelCard, make_request: MakeRequest, raw: Any, name: str
) -> None:
    limits = TenantLimits(max_live_jobs=9, requests_per_minute=600)

    async def submit() -> str:
        return (await broker.jobs.submit(make_request(expires_in=60.0), tenant="acme", limits=limits)).id

    lease = await Lease.register(broker, card)
    waiting, running = await submit(), await submit()
    assert [claim.job_id for claim in await lease.claim(1)] == [waiting]
    raw.delete(f"{broker.keys.tag}:{name}")
    raw.xadd(f"{broker.keys.tag}:{name}", {"foreign": "1"})
    await broker.reaper().reap()
    if name in ("leases", "models:seen"):  # workers renew their leases, or register again
        await lease.close()
        lease = await Lease.register(broker, card)
    late = await submit()
    claims = [claim.job_id for claim in await lease.claim(3)]
    assert set(claims) | {waiting} == {waiting, running, late}
    await lease.commit([(job, TokenEvent(seq=1, state=state)) for job, state in zip(claims, STATES, strict=False)])
    for job, state in zip(claims, STATES, strict=False):
        assert (await broker.jobs.get(job)).state is state
    assert await broker.jobs.tenant_loads(["acme"])
    await broker.reaper().scrub(pause=0.0)
    await lease.close()


@pytest.mark.parametrize("data", ['{"v":1,"t":["7"]}', '{"v":1,"i":"0"}', '{"v":1,"i":1}', '{"v":1,"i":-1}', "7", "x"])
async def test_a_job_with_a_damaged_event_fails_alone(
    broker: Broker, card: ModelCard, make_request: MakeRequest, raw: Any, data: str
) -> None:
    card = replace(card, digest="d" * 32)
    lease = await Lease.register(broker, card)
    jobs = [await broker.jobs.submit(make_request()) for _ in range(2)]
    await lease.claim(2)
    raw.xadd(f"{broker.keys.tag}:journal:{jobs[0].id}", {"e": data}, id="1-0")
    await lease.release([job.id for job in jobs])
    assert [claim.job_id for claim in await lease.claim(2)] == [jobs[1].id]
    record = await broker.jobs.get(jobs[0].id)
    assert record.state is JobState.FAILED and record.error is not None and record.error.code == "codec_error"
    await lease.close()


async def test_messages_of_others_are_ignored(
    broker: Broker, card: ModelCard, make_request: MakeRequest, raw: Any
) -> None:
    lease = await Lease.register(broker, card)
    assert await lease.claim(1, wait=True) == []
    for message in ("x\ny", "1\ny", "1 2 3\n", "\n"):
        raw.publish(broker.keys.worker_channel(lease.id), message)
    assert await lease.wait_for_work(0.2) == []
    job = await broker.jobs.submit(make_request())
    reader = broker.journal.follow(job.id)
    first = asyncio.ensure_future(anext(reader))
    assert [claim.job_id for claim in await lease.wait_for_work(1.0) or await lease.claim(1)] == [job.id]
    for message in ("x", "x:y", ":"):
        raw.publish(broker.keys.journal_channel(job.id), message)
    await lease.commit([(job.id, TokenEvent(seq=1, text="a"))])
    assert (await first).text == "a"
    await reader.aclose()
    await lease.close()


@pytest.mark.parametrize(
    ("field", "data"), [("card", "x"), ("facts", "[]"), ("more", "5"), ("stats", "{"), ("started", "")]
)
async def test_damage_in_a_worker_hides_no_other(
    broker: Broker, card: ModelCard, raw: Any, field: str, data: str
) -> None:
    leases = [await Lease.register(broker, replace(card, name=name)) for name in ("spoilt", "good")]
    raw.hset(f"{broker.keys.tag}:worker:{leases[0].id}", field, data)
    assert [worker.worker_id for worker in await broker.models.workers()] == [leases[1].id]
    raw.hset(f"{broker.keys.tag}:worker:{leases[1].id}", "stepped", "x")
    assert [worker.step_age for worker in await broker.models.workers()] == [None]
    for lease in leases:
        await lease.close()


@pytest.mark.parametrize(("key", "data"), [("models", "{}"), ("models", '{"v":3}'), ("models:more", "[1]")])
async def test_damage_in_a_card_hides_no_other(broker: Broker, card: ModelCard, raw: Any, key: str, data: str) -> None:
    leases = [await Lease.register(broker, replace(card, name=name, digest="d" * 32)) for name in ("spoilt", "good")]
    raw.hset(f"{broker.keys.tag}:{key}", "spoilt", data)
    assert [found.name for found in await broker.models.cards()] == ["good"]
    for lease in leases:
        await lease.close()


@pytest.mark.parametrize(
    ("field", "data"),
    [("facts", "[]"), ("request", "x"), ("status", "new"), ("created", "now"), ("at:failed", b"\xff")],
)
async def test_a_damaged_batch_is_named_and_hides_no_other(broker: Broker, raw: Any, field: str, data: str) -> None:
    request = BatchRequest(input_file_id="file-1", endpoint="/v1/completions", completion_window="24h")
    spoilt, good = [await broker.batches.create(request, window_seconds=60.0, tenant="acme") for _ in range(2)]
    raw.hset(f"{broker.keys.tag}:batch:{spoilt.id}", field, data)
    found, _ = await broker.batches.list("acme", limit=9)
    assert [batch.id for batch in found] == [good.id]
    with pytest.raises(CodecError, match=f"record of batch {spoilt.id} is damaged"):
        await broker.batches.get("acme", spoilt.id)
    assert (await broker.batches.load()).count == (1 if field in ("facts", "status") else 2)


@pytest.mark.parametrize(("field", "data"), [("facts", "[]"), ("request", "x"), ("status", "new"), ("created", "now")])
async def test_a_damaged_batch_is_put_aside_after_some_takes(broker: Broker, raw: Any, field: str, data: str) -> None:
    request = BatchRequest(input_file_id="file-1", endpoint="/v1/completions", completion_window="24h")
    spoilt = await broker.batches.create(request, window_seconds=60.0, tenant="acme")
    tag = broker.keys.tag
    raw.hset(f"{tag}:batch:{spoilt.id}", field, data)
    for end in ("", "", "; it is put aside$"):
        with pytest.raises(CodecError, match=f"record of batch {spoilt.id} is damaged.*{end}"):
            await broker.batches.take("test")
        assert await broker.batches.take("test") is None
        raw.zadd(f"{tag}:batches", {spoilt.id: 0}, xx=True)  # as if its lease was over
    assert await broker.batches.take("test") is None
    assert not raw.exists(f"{tag}:batches", f"{tag}:batches:open:acme")
    assert 0 < raw.pttl(f"{tag}:batch:{spoilt.id}") <= 1000 * broker.config.batch_ttl
    assert 0 < raw.pttl(f"{tag}:batches:of:acme") <= 1000 * broker.config.batch_ttl


@pytest.mark.parametrize("data", ["x", "", "9" * 30])
@pytest.mark.parametrize("field", ["fence", "failures", "deaths"])
async def test_a_damaged_count_of_a_batch_begins_anew(broker: Broker, raw: Any, field: str, data: str) -> None:
    request = BatchRequest(input_file_id="file-1", endpoint="/v1/completions", completion_window="24h")
    batch = await broker.batches.create(request, window_seconds=60.0, tenant="acme")
    raw.hset(f"{broker.keys.tag}:batch:{batch.id}", field, data)
    found = await broker.batches.take("test")
    assert found is not None and found[1].failures_without_progress == 0
    await broker.batches.note_failure(found[0])
    assert (await broker.batches.get("acme", batch.id)).failures_without_progress == 1


async def test_a_batch_of_another_type_is_left_out(broker: Broker, raw: Any) -> None:
    request = BatchRequest(input_file_id="file-1", endpoint="/v1/completions", completion_window="24h")
    spoilt, good = [await broker.batches.create(request, window_seconds=60.0, tenant="acme") for _ in "12"]
    spoil(broker, raw, f"batch:{spoilt.id}")
    assert (await broker.batches.load()).count == 1
    found = await broker.batches.take("test")
    assert found is not None and found[0].id == good.id
    assert raw.zrange(f"{broker.keys.tag}:batches", 0, -1) == [good.id.encode()]


async def test_a_damaged_file_is_named_and_hides_no_other(broker: Broker, raw: Any) -> None:
    facts = [
        FileFacts(id=new_file_id(), tenant="acme", filename="a", purpose="batch", size=1, seconds=60.0) for _ in "12"
    ]
    spoilt, good = [await broker.files.add(file, None) for file in facts]
    raw.hset(f"{broker.keys.tag}:file:{spoilt.id}", "size", "x")
    assert await broker.files.list("acme", limit=9) == ([good], False)
    with pytest.raises(CodecError, match=f"record of file {spoilt.id} is damaged"):
        await broker.files.get("acme", spoilt.id)
    raw.hset(f"{broker.keys.tag}:file:{spoilt.id}", "expires", "x")
    assert await broker.files.list("acme", limit=9) == ([good], False)
    with pytest.raises(FileNotFound):
        await broker.files.get("acme", spoilt.id)


@pytest.mark.parametrize("data", ["x", "[]", "{}", "7", '{"input_file_id":["x"]}'])
async def test_a_damaged_batch_holds_no_file(broker: Broker, raw: Any, data: str) -> None:
    request = BatchRequest(input_file_id="file-1", endpoint="/v1/completions", completion_window="24h")
    batch = await broker.batches.create(request, window_seconds=60.0, tenant="acme")
    raw.hset(f"{broker.keys.tag}:batch:{batch.id}", "request", data)
    file = FileFacts(id=new_file_id(), tenant="acme", filename="a", purpose="batch", size=1, seconds=60.0)
    await broker.files.add(file, None)
    await broker.files.delete("acme", file.id)
    assert await broker.files.list("acme", limit=9) == ([], False)


@pytest.mark.parametrize("data", ["x", "[]", '{"v":1}'])
async def test_a_damaged_conversation_begins_anew(broker: Broker, raw: Any, data: str) -> None:
    answer = LatestAnswer("job-1", include_usage=True)
    await broker.conversations.begin("acme", "c", answer)
    (key,) = raw.keys(f"{broker.keys.tag}:conversation:*")
    raw.set(key, data)
    assert await broker.conversations.begin("acme", "c", answer) is None
    assert await broker.conversations.find("acme", "c") == answer


@pytest.mark.parametrize("data", ["", "x", b"\xff\xfe", "9" * 30])
async def test_damaged_counts_begin_anew(
    broker: Broker, card: ModelCard, make_request: MakeRequest, raw: Any, data: str | bytes
) -> None:
    lease, tag = await Lease.register(broker, card), broker.keys.tag
    for _ in "12":
        for field in ("live", "queued", "bytes"):
            raw.hset(f"{tag}:tenant:acme", field, data)
        raw.hset(f"{tag}:stored", "acme", data)
        raw.hset(f"{tag}:backlog", "interactive:tale", data)
        raw.set(f"{tag}:failed:bytes", data)
        job = await broker.jobs.submit(make_request(), tenant="acme", limits=TenantLimits(max_live_jobs=9))
        assert (await broker.jobs.tenant_loads(["acme"]))[0].live == 1
        spoil(broker, raw, "tenant:acme")
        assert (await broker.jobs.tenant_loads(["acme"]))[0].live == 0
        assert [claim.job_id for claim in await lease.claim(1)] == [job.id]
        await lease.commit([(job.id, TokenEvent(seq=1, state=JobState.FAILED))])
        assert int(raw.get(f"{tag}:failed:bytes")) > 0
    await lease.close()


VALUES = ["", "x", "x y", "7 7", b"\xff\xfe", "9" * 30, "-1", ["foreign"]]


def overwrite(raw: Any, key: str, data: str | bytes | list[str]) -> None:
    """Replace a key by a text, or by a list."""
    raw.delete(key)
    raw.rpush(key, *data) if isinstance(data, list) else raw.set(key, data)


@pytest.mark.parametrize("data", VALUES)
async def test_a_damaged_idempotency_key_counts_as_none(
    broker: Broker, card: ModelCard, make_request: MakeRequest, raw: Any, data: str | bytes | list[str]
) -> None:
    lease = await Lease.register(broker, card)
    request = BatchRequest(input_file_id="file-1", endpoint="/v1/completions", completion_window="24h")

    async def submitted() -> list[str]:
        batch = await broker.batches.create(request, window_seconds=60.0, tenant="acme", idempotency_key="k")
        return [(await broker.jobs.submit(make_request(), idempotency_key="k")).id, batch.id]

    first = await submitted()
    keys = list(raw.scan_iter(f"{broker.keys.tag}:idempotency:*"))
    assert len(keys) == 2
    for key in keys:
        overwrite(raw, key, data)
    again = await submitted()
    assert set(first).isdisjoint(again) and await submitted() == again
    await lease.close()


@pytest.mark.parametrize("data", VALUES)
async def test_a_damaged_note_of_the_memory_stops_no_job(
    broker: Broker, card: ModelCard, make_request: MakeRequest, raw: Any, data: str | bytes | list[str]
) -> None:
    lease = await Lease.register(broker, card)
    overwrite(raw, f"{broker.keys.tag}:memory", data)
    if data == "7 7":  # a note that can be read
        with pytest.raises(Unavailable, match="Redis uses 7 bytes"):
            await broker.jobs.submit(make_request())
    else:
        await broker.jobs.submit(make_request())
    await lease.close()


@pytest.mark.parametrize("data", ["", "x", b"\xff\xfe", "9" * 30, ["foreign"]])
async def test_a_damaged_sum_of_waiting_bytes_begins_anew(
    broker: Broker, card: ModelCard, make_request: MakeRequest, raw: Any, data: str | bytes | list[str]
) -> None:
    lease = await Lease.register(broker, card)
    key = f"{broker.keys.tag}:waiting"
    jobs = [await broker.jobs.submit(make_request())]
    size = int(raw.get(key))
    overwrite(raw, key, data)
    jobs += [await broker.jobs.submit(make_request()) for _ in range(2)]
    assert 0 < int(raw.get(key)) < 3 * size  # the sizes of requests differ a little
    overwrite(raw, key, data)
    assert [claim.job_id for claim in await lease.claim(3)] == [job.id for job in jobs]
    assert not raw.exists(key)
    await lease.close()


@pytest.mark.parametrize("data", VALUES)
async def test_a_damaged_sum_of_responses_is_counted_anew(
    broker: Broker, raw: Any, data: str | bytes | list[str]
) -> None:
    response = StoredResponse([{"role": "user", "content": "Hi"}], {})
    key = f"{broker.keys.tag}:responses:bytes:acme"
    await broker.responses.store("acme", "1", response)
    size = int(raw.get(key))
    overwrite(raw, key, data)
    await broker.responses.delete("acme", "1")
    overwrite(raw, key, data)
    await broker.responses.store("acme", "2", response)
    assert int(raw.get(key)) == size
    assert await broker.responses.find("acme", "2") == response


@pytest.mark.parametrize("data", ["x", "[]", '{"v":1}', ["foreign"]])
async def test_a_damaged_response_counts_as_none(broker: Broker, raw: Any, data: str | list[str]) -> None:
    response = StoredResponse([{"role": "user", "content": "Hi"}], {})
    await broker.responses.store("acme", "1", response)
    (key,) = raw.scan_iter(f"{broker.keys.tag}:response:*")
    overwrite(raw, key, data)
    assert await broker.responses.find("acme", "1") is None
    await broker.responses.store("acme", "1", response)
    assert await broker.responses.find("acme", "1") == response


async def test_foreign_names_of_models_hide_no_other(
    broker: Broker, card: ModelCard, make_request: MakeRequest, raw: Any
) -> None:
    leases = [await Lease.register(broker, replace(card, name=name, digest="d" * 32)) for name in ("tale", "spoilt")]
    job = await broker.jobs.submit(make_request())
    tag = broker.keys.tag
    raw.hset(f"{tag}:job:{job.id}", "order", "x")
    raw.hset(f"{tag}:models", b"\xff\xfe", "{}")
    raw.hset(f"{tag}:backlog", mapping={b"batch:\xff": "1", "batch": "1", "interactive:tale": "x"})
    raw.zadd(f"{tag}:bound", {b"1:-:\xff": 1, "x": 2})
    raw.zadd(f"{tag}:bound:batch:1:-:".encode() + b"\xff", {"job-1": 1})
    raw.hset(f"{tag}:worker:{leases[1].id}", "stats", '{"running":"x"}')
    snapshot = await take_snapshot(broker)
    assert [worker.model for worker in snapshot.workers] == ["tale"]
    assert [depth.model for depth in snapshot.depths] == ["spoilt", "tale"]
    assert snapshot.bound == []
    for lease in leases:
        await lease.close()
