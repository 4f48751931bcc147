"""Submitting, finding and listing jobs."""

import asyncio
import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from required import retry_after

from ktqueue.broker.broker import Broker
from ktqueue.broker.jobs import QueueDepth
from ktqueue.broker.lease import Lease
from ktqueue.broker.models import process_name
from ktqueue.core.codec import CodecError, NewerFormat, encode_request
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import (
    IdempotencyConflict,
    InvalidRequest,
    JobConflict,
    JobNotFound,
    ModelNotFound,
    QueueFull,
    RequestTooLarge,
    Unavailable,
)
from ktqueue.core.events import JobState
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest, JobClass, SamplingParams


async def test_a_model_must_be_known(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    with pytest.raises(Unavailable) as unknown:
        await broker.jobs.submit(make_request())
    assert unknown.value.retry_after
    lease = await Lease.register(broker, card)
    with pytest.raises(ModelNotFound) as caught:
        await broker.jobs.submit(make_request(model="novel"))
    assert (caught.value.param, caught.value.value) == ("model", "novel")
    await lease.close()
    await broker.jobs.submit(make_request())  # the model is still known after its worker has left


async def test_a_model_is_forgotten_after_its_ttl(
    config: BrokerConfig, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    async with await Broker.open(replace(config, model_ttl=0.2)) as broker:
        lease = await Lease.register(broker, card)
        await asyncio.sleep(0.1)
        await lease.beat({})
        await asyncio.sleep(0.15)
        assert [known.name for known in await broker.models.cards()] == ["tale"]
        await lease.close()
        await asyncio.sleep(0.25)
        assert await broker.models.cards() == []
        with pytest.raises(Unavailable):
            await broker.jobs.submit(make_request())


async def test_submitting_twice_under_one_id_makes_one_job(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest]
) -> None:
    first = await broker.jobs.submit(make_request(), job_id="a")
    again = await broker.jobs.submit(make_request(), job_id="a")
    assert again == first  # with the same seed
    assert await broker.jobs.depth() == [QueueDepth("tale", 1, 0, 0)]
    with pytest.raises(IdempotencyConflict):
        await broker.jobs.submit(make_request("Twice"), job_id="a")
    with pytest.raises(InvalidRequest):
        await broker.jobs.submit(make_request(), job_id="no spaces")


async def test_an_idempotency_key_belongs_to_its_tenant_and_request(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest]
) -> None:
    first = await broker.jobs.submit(make_request(), idempotency_key="k", tenant="t")
    assert (await broker.jobs.submit(make_request(), idempotency_key="k", tenant="t")).id == first.id
    assert (await broker.jobs.submit(make_request(), idempotency_key="k", tenant="u")).id != first.id
    with pytest.raises(IdempotencyConflict) as caught:
        await broker.jobs.submit(make_request("Twice"), idempotency_key="k", tenant="t")
    assert caught.value.status == 422


async def test_a_key_is_that_of_its_job_when_another_version_notes_more_of_the_answers_form(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest]
) -> None:
    first = await broker.jobs.submit(make_request(), idempotency_key="k")
    newer = make_request(reply_options={"null_usage": True})
    assert (await broker.jobs.submit(newer, idempotency_key="k")).id == first.id


async def test_an_earlier_version_stored_a_hash_of_the_whole_request(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest], raw: Any
) -> None:
    request = make_request(reply_options={"types": {}})
    first = await broker.jobs.submit(request, job_id="a", idempotency_key="k")
    whole = hashlib.sha256(encode_request(request)).hexdigest()
    raw.hset(f"{broker.keys.tag}:job:a", "hash", whole)
    (key,) = raw.keys(f"{broker.keys.tag}:idempotency:*")
    raw.set(key, f"{whole} a")
    assert (await broker.jobs.submit(request, job_id="a")).id == first.id
    assert (await broker.jobs.submit(request, idempotency_key="k")).id == first.id


async def test_an_idempotency_key_whose_job_has_expired_is_refused(
    config: BrokerConfig, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    async with await Broker.open(replace(config, job_ttl=0.05)) as broker:
        lease = await Lease.register(broker, card)
        job = await broker.jobs.submit(make_request(), idempotency_key="k")
        await broker.jobs.cancel(job.id)
        await asyncio.sleep(0.1)
        with pytest.raises(JobConflict):
            await broker.jobs.submit(make_request(), idempotency_key="k")
        await lease.close()


async def test_a_submit_whose_reply_was_lost_makes_one_job(
    broker: Broker, lease: Lease, proxy: Any, make_request: Callable[..., GenerationRequest]
) -> None:
    wire, config = proxy
    async with await Broker.open(config) as cut:
        wire.lose_reply_to("Once")
        record = await cut.jobs.submit(make_request())
    assert wire.lost == 1
    assert [job.id for job in await broker.jobs.list()] == [record.id]


async def test_a_seed_is_made_once_and_kept(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest]
) -> None:
    record = await broker.jobs.submit(make_request())
    seed = record.readable_request().sampling.seed
    assert seed is not None
    assert (await broker.jobs.get(record.id)).readable_request().sampling.seed == seed
    given = await broker.jobs.submit(make_request(sampling=SamplingParams(seed=7)))
    assert given.readable_request().sampling.seed == 7


async def test_queues_have_a_limit_for_each_class(
    config: BrokerConfig, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    async with await Broker.open(replace(config, max_queued_interactive=2, max_queued_batch=1)) as broker:
        lease = await Lease.register(broker, card)
        places = [(await broker.jobs.submit(make_request())).position for _ in range(2)]
        assert places == [1, 2]
        with pytest.raises(QueueFull) as caught:
            await broker.jobs.submit(make_request())
        assert (caught.value.limit, caught.value.value) == (2, 2)
        assert retry_after(caught.value) > 0
        await broker.jobs.submit(make_request(job_class=JobClass.BATCH))
        with pytest.raises(QueueFull):
            await broker.jobs.submit(make_request(job_class=JobClass.BATCH))
        await lease.claim(1)
        await broker.jobs.submit(make_request())
        await lease.close()


async def test_a_request_has_a_maximum_size(
    config: BrokerConfig, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    async with await Broker.open(replace(config, max_request_bytes=2_000)) as broker:
        with pytest.raises(RequestTooLarge) as caught:
            await broker.jobs.submit(make_request("x" * 2_000))
        assert caught.value.limit == 2_000


async def test_unknown_jobs_are_not_found(broker: Broker) -> None:
    with pytest.raises(JobNotFound):
        await broker.jobs.get("none")
    with pytest.raises(JobNotFound):
        await broker.jobs.cancel("none")


async def test_jobs_are_listed_newest_first_and_by_state(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest]
) -> None:
    ids = [(await broker.jobs.submit(make_request())).id for _ in range(4)]
    await broker.jobs.cancel(ids[1])
    (claim,) = await lease.claim(1)
    assert claim.job_id == ids[0]
    assert [job.id for job in await broker.jobs.list()] == [ids[3], ids[2], ids[0], ids[1]]
    assert [job.id for job in await broker.jobs.list(state=JobState.QUEUED)] == [ids[3], ids[2]]
    assert [job.id for job in await broker.jobs.list(state=JobState.RUNNING)] == [ids[0]]
    assert [job.id for job in await broker.jobs.list(state=JobState.CANCELLED)] == [ids[1]]
    assert len(await broker.jobs.list(limit=2)) == 2
    assert [job.position for job in await broker.jobs.list(state=JobState.QUEUED)] == [2, 1]


async def test_an_unreadable_record_does_not_hide_other_jobs(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest], raw: Any
) -> None:
    strange, good = [(await broker.jobs.submit(make_request())).id for _ in range(2)]
    raw.hset(f"{broker.keys.tag}:job:{strange}", "request", b'{"v":99}')
    assert [(job.id, job.request is None) for job in await broker.jobs.list()] == [(good, False), (strange, True)]
    record = await broker.jobs.get(strange)
    assert (record.id, record.state, record.model) == (strange, JobState.QUEUED, "tale")
    with pytest.raises(NewerFormat, match="format 99"):
        record.readable_request()
    assert (await broker.jobs.cancel(strange)).state is JobState.CANCELLED


@pytest.mark.parametrize(("field", "value"), [("class", "third"), ("model", b"\xff"), ("attempts", "a few")])
async def test_a_damaged_record_hides_no_other_job(
    field: str,
    value: str | bytes,
    broker: Broker,
    lease: Lease,
    make_request: Callable[..., GenerationRequest],
    raw: Any,
) -> None:
    damaged, good = [(await broker.jobs.submit(make_request())).id for _ in range(2)]
    raw.hset(f"{broker.keys.tag}:job:{damaged}", field, value)
    assert [job.id for job in await broker.jobs.list()] == [good]
    with pytest.raises(CodecError, match=f"record of job {damaged} is damaged"):
        await broker.jobs.get(damaged)


async def test_the_depth_counts_jobs_by_model_and_class(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest]
) -> None:
    for job_class in (JobClass.INTERACTIVE, JobClass.BATCH, JobClass.BATCH):
        await broker.jobs.submit(make_request(job_class=job_class))
    await lease.claim(1)
    assert await broker.jobs.depth() == [QueueDepth("tale", 0, 2, 1)]


async def test_workers_are_listed_with_their_facts(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    lease = await Lease.register(broker, card)
    await broker.jobs.submit(make_request())
    await lease.claim(1)
    await lease.beat({"running": 1.0})
    (worker,) = await broker.models.workers()
    assert (worker.worker_id, worker.model, worker.max_num_seqs, worker.running) == (lease.id, "tale", 32, 1)
    assert worker.stats == {"running": 1.0}
    assert worker.process == process_name(os.getpid())
    assert worker.host
    assert await broker.models.cards() == [card]
    await lease.close()
    assert await broker.models.workers() == []


async def test_a_wrong_server_is_refused(config: BrokerConfig, raw: Any) -> None:
    raw.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(Unavailable, match="noeviction"):
            await Broker.open(config)
    finally:
        raw.config_set("maxmemory-policy", "noeviction")


async def test_a_missing_server_is_reported(config: BrokerConfig, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="away"):
        await Broker.open(replace(config, url=f"unix://{tmp_path}/none.sock"))
    with pytest.raises(Unavailable, match="ktqueue up"):
        await Broker.open(replace(config, url=None, state_dir=str(tmp_path)))


async def test_a_full_memory_is_reported_as_unavailable(
    broker: Broker, lease: Lease, raw: Any, make_request: Callable[..., GenerationRequest]
) -> None:
    raw.config_set("maxmemory", 1)
    try:
        with pytest.raises(Unavailable, match="memory"):
            await broker.jobs.submit(make_request())
    finally:
        raw.config_set("maxmemory", 0)
    await broker.jobs.submit(make_request())
