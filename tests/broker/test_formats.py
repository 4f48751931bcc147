"""Records and journals of a newer version: older workers leave them, and older readers report what they cannot read."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from required import error_of

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.core import codec
from ktqueue.core.codec import NewerFormat
from ktqueue.core.config import BrokerConfig
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest

NEWER = codec.VERSION + 1  # a format that this version cannot read


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Within `with newer:`, requests and events are written and read by a version that uses format NEWER."""
    dumps = codec.dumps

    class NewerVersion:
        def __enter__(self) -> None:
            monkeypatch.setattr(codec, "VERSION", NEWER)
            monkeypatch.setattr(codec, "dumps", lambda value: dumps({**value, "v": NEWER} if "v" in value else value))

        def __exit__(self, *fault: Any) -> None:
            monkeypatch.undo()

    return NewerVersion()


async def test_an_older_worker_claims_the_jobs_behind_those_of_a_newer_format(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest], newer: Any
) -> None:
    old = await Lease.register(broker, card)
    with newer:
        ahead = [await broker.jobs.submit(make_request()) for _ in range(300)]
    behind = await broker.jobs.submit(make_request())
    assert [claim.job_id for claim in await old.claim(8)] == [behind.id]
    (depth,) = await broker.jobs.depth()
    assert (depth.interactive, depth.running) == (300, 1)
    with newer:
        young = await Lease.register(broker, card)
        claims = await young.claim(2)
    assert [(claim.job_id, claim.attempt) for claim in claims] == [(ahead[0].id, 1), (ahead[1].id, 1)]
    for lease in (old, young):
        await lease.close()


async def test_a_newer_worker_takes_jobs_of_both_formats_in_order(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest], newer: Any
) -> None:
    await (await Lease.register(broker, card)).close()
    first = await broker.jobs.submit(make_request())
    with newer:
        second = await broker.jobs.submit(make_request())
    third = await broker.jobs.submit(make_request())
    with newer:
        young = await Lease.register(broker, card)
        claims = await young.claim(8)
    assert [claim.job_id for claim in claims] == [first.id, second.id, third.id]
    await young.close()


async def test_no_newer_job_is_handed_to_an_older_worker_that_waits(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest], newer: Any
) -> None:
    old = await Lease.register(broker, card)
    assert await old.claim(8, wait=True) == []
    with newer:
        job = await broker.jobs.submit(make_request())
    assert (job.state, job.worker_id) == (JobState.QUEUED, None)
    await old.close()


async def test_a_job_of_an_unexpected_format_is_put_aside_without_an_attempt(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest], newer: Any, raw: Any
) -> None:
    old = await Lease.register(broker, card)
    strange = await broker.jobs.submit(make_request())
    raw.hset(f"{broker.keys.tag}:job:{strange.id}", "request", f'{{"v":{NEWER},"model":"tale"}}')
    good = await broker.jobs.submit(make_request())
    assert [claim.job_id for claim in await old.claim(8)] == [good.id]
    record = await broker.jobs.get(strange.id)
    assert (record.state, record.attempts, record.request) == (JobState.QUEUED, 0, None)
    assert await old.claim(8) == []
    bound = await broker.jobs.bound()
    assert [(group.format, group.digest, group.interactive) for group in bound] == [(NEWER, None, 1)]
    assert (await broker.jobs.cancel(strange.id)).state is JobState.CANCELLED
    await old.close()


async def test_a_journal_of_a_newer_worker_is_continued_by_newer_workers(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest], newer: Any
) -> None:
    card = replace(card, digest="d" * 32)
    with newer:
        young = await Lease.register(broker, card)
    job = await broker.jobs.submit(make_request())
    with newer:
        await young.claim(1)
        await young.commit([(job.id, TokenEvent(seq=1, token_ids=(7,), text="x"))])
        await young.release([job.id])
    old = await Lease.register(broker, card)
    assert await old.claim(8) == []
    assert (await broker.jobs.get(job.id)).state is JobState.QUEUED
    assert await old.claim(8) == []
    with newer:
        (claim,) = await young.claim(8)
    assert (claim.job_id, claim.attempt, claim.events[0].text) == (job.id, 1, "x")
    for lease in (old, young):
        await lease.close()


async def test_jobs_of_a_version_that_was_rolled_back_fail_after_a_wait(
    config: BrokerConfig, card: ModelCard, make_request: Callable[..., GenerationRequest], newer: Any, raw: Any
) -> None:
    async with await Broker.open(replace(config, digest_wait=0.2, lease_seconds=5.0)) as broker:
        old = await Lease.register(broker, card)
        with newer:
            job = await broker.jobs.submit(make_request())
        assert await broker.reaper().fail_unserved() == 0
        raw.zadd(f"{broker.keys.tag}:bound", {f"{NEWER}:-:tale": 1_000_000})
        assert await broker.reaper().fail_unserved() == 1
        record = await broker.jobs.get(job.id)
        assert (record.state, error_of(record).code) == (JobState.FAILED, "version_changed")
        await old.close()


async def test_a_reader_refuses_a_newer_event_and_a_lenient_one_continues(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest], newer: Any
) -> None:
    await (await Lease.register(broker, card)).close()
    job = await broker.jobs.submit(make_request())
    worker = await Lease.register(broker, card)
    await worker.claim(1)
    await worker.commit([(job.id, TokenEvent(seq=1, text="x"))])
    with newer:
        await worker.commit([(job.id, TokenEvent(seq=2, text="y")), (job.id, TokenEvent(seq=3, state=JobState.DONE))])
    with pytest.raises(NewerFormat, match=f"format {NEWER}"):
        await broker.journal.replay(job.id)
    seen = [event async for event in broker.journal.follow(job.id, lenient=True)]
    assert seen == await broker.journal.replay(job.id, lenient=True)
    assert [(event.seq, event.text, event.format) for event in seen] == [(1, "x", None), (2, "", NEWER), (3, "", NEWER)]
    record = await broker.jobs.get(job.id)
    assert (record.state, record.usage) == (JobState.DONE, None)
    await worker.close()
