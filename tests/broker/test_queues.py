"""What queues and workers report: how many jobs wait, how long they have waited, which worker runs them."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from required import required

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest, JobClass


@pytest.fixture
async def lease(broker: Broker, card: ModelCard) -> Any:
    opened = await Lease.register(broker, card)
    yield opened
    await opened.close()


async def test_running_jobs_are_counted_by_class(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest]
) -> None:
    for job_class in (JobClass.BATCH, JobClass.INTERACTIVE, JobClass.BATCH, JobClass.BATCH):
        await broker.jobs.submit(make_request(job_class=job_class))
    claims = await lease.claim(3)
    (depth,) = await broker.jobs.depth()
    assert (depth.interactive, depth.batch, depth.running, depth.batch_running) == (0, 1, 3, 2)
    batch = next(claim for claim in claims if claim.request.job_class is JobClass.BATCH)
    await lease.commit([(batch.job_id, TokenEvent(seq=1, state=JobState.DONE))])
    (depth,) = await broker.jobs.depth()
    assert (depth.running, depth.batch_running) == (2, 1)


async def test_the_longest_wait_of_each_class_is_reported(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest], raw: Any
) -> None:
    (depth,) = await broker.jobs.depth()
    assert (depth.interactive_wait, depth.batch_wait) == (None, None)
    first = await broker.jobs.submit(make_request(job_class=JobClass.BATCH))
    await asyncio.sleep(0.2)
    second = await broker.jobs.submit(make_request(job_class=JobClass.BATCH))
    await broker.jobs.submit(make_request())
    (depth,) = await broker.jobs.depth()
    batch_wait = required(depth.batch_wait, "batch_wait")
    assert batch_wait - 0.2 >= required(depth.interactive_wait, "interactive_wait") >= 0
    # A newer job that goes first by its priority does not hide the older job behind it.
    queue = f"{broker.keys.tag}:queue:batch:tale"
    raw.zadd(queue, {second.id: raw.zscore(queue, first.id) - 1})
    (again,) = await broker.jobs.depth()
    assert required(again.batch_wait, "batch_wait") >= batch_wait


async def test_a_model_whose_name_has_colons_is_counted(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    lease = await Lease.register(broker, replace(card, name="org/a:b:c"))
    await broker.jobs.submit(make_request(model="org/a:b:c"))
    await lease.claim(1)
    (depth,) = await broker.jobs.depth()
    assert (depth.model, depth.running) == ("org/a:b:c", 1)
    await lease.close()


async def test_jobs_are_listed_by_model_class_tenant_and_state(
    broker: Broker, card: ModelCard, lease: Lease, make_request: Callable[..., GenerationRequest]
) -> None:
    other = await Lease.register(broker, replace(card, name="other"))
    submitted: dict[str, dict[str, Any]] = {}
    for model in ("tale", "other"):
        for job_class in JobClass:
            for tenant in ("acme", "globex"):
                record = await broker.jobs.submit(make_request(model=model, job_class=job_class), tenant=tenant)
                submitted[record.id] = {"model": model, "job_class": job_class, "tenant": tenant}
    await lease.claim(1)
    for field in ("model", "job_class", "tenant"):
        for value in {fields[field] for fields in submitted.values()}:
            listed = [job.id for job in await broker.jobs.list(**{field: value})]
            assert sorted(listed) == sorted(job_id for job_id, fields in submitted.items() if fields[field] == value)
    wanted: dict[str, Any] = {"model": "tale", "job_class": JobClass.BATCH, "tenant": "globex"}
    matching = [job_id for job_id, fields in submitted.items() if fields == wanted]
    assert [job.id for job in await broker.jobs.list(**wanted)] == matching
    assert [job.model for job in await broker.jobs.list(state=JobState.RUNNING)] == ["tale"]
    assert await broker.jobs.list(state=JobState.RUNNING, model="other") == []
    await other.close()


async def test_a_worker_shows_its_remaining_lease_and_its_last_step(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest]
) -> None:
    (worker,) = await broker.models.workers()
    assert 0 < worker.lease_left <= broker.config.lease_seconds
    assert worker.step_age is None
    await broker.jobs.submit(make_request())
    (claim,) = await lease.claim(1)
    await lease.commit([(claim.job_id, TokenEvent(seq=1))])
    await asyncio.sleep(0.05)
    (worker,) = await broker.models.workers()
    age = required(worker.step_age, "step_age")
    assert age >= 0.05
    await lease.beat({})
    (worker,) = await broker.models.workers()
    assert required(worker.step_age, "step_age") > age  # a renewal is not a step
    await lease.commit([])
    (worker,) = await broker.models.workers()
    assert required(worker.step_age, "step_age") < age  # an empty step is a step
