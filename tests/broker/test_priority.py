"""Priority changes the order inside a class. Each step is worth a number of seconds of waiting."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.client import Client
from ktqueue.core.codec import decode_request, dumps, encode_request, loads
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import ConfigError
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest, JobClass


async def test_lower_priorities_go_first_and_equal_ones_by_arrival(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    lease = await Lease.register(broker, card)
    for job_id, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 0), ("e", -100), ("f", 100)):
        record = await broker.jobs.submit(make_request(priority=priority), job_id=job_id)
        assert record.priority == priority
    assert record.position == 6
    assert (await broker.jobs.get("e")).position == 1
    assert [claim.job_id for claim in await lease.claim(6)] == ["e", "c", "a", "d", "b", "f"]
    await lease.close()


async def test_a_priority_step_is_worth_priority_seconds_of_waiting(
    config: BrokerConfig, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    async with await Broker.open(replace(config, priority_seconds=0.02)) as broker:
        lease = await Lease.register(broker, card)
        await broker.jobs.submit(make_request(priority=2), job_id="patient")
        await asyncio.sleep(0.05)
        await broker.jobs.submit(make_request(), job_id="late")
        await broker.jobs.submit(make_request(priority=-100), job_id="urgent")
        assert [claim.job_id for claim in await lease.claim(3)] == ["urgent", "patient", "late"]
        await lease.close()


async def test_a_job_that_returns_to_the_queue_keeps_its_place(
    broker: Broker,
    card: ModelCard,
    make_request: Callable[..., GenerationRequest],
    expire_leases: Callable[[], Awaitable[None]],
) -> None:
    lease = await Lease.register(broker, card)
    first = await broker.jobs.submit(make_request(), job_id="first")
    await broker.jobs.submit(make_request(priority=3), job_id="last")
    await broker.jobs.submit(make_request(priority=1), job_id="middle")
    assert len(await lease.claim(3)) == 3
    await lease.release(["last", "middle"])
    assert (await broker.jobs.get("last")).position == 2
    await lease.claim(2)
    await expire_leases()
    await broker.scripts.call("reap", 500_000, 3, b"{}", b"{}", b"{}", "1000 1000 0", 1_000, 1_000)
    heir = await Lease.register(broker, card)
    assert [claim.job_id for claim in await heir.claim(3)] == ["first", "middle", "last"]
    assert (await broker.jobs.get("first")).created_at == first.created_at
    await heir.close()


async def test_the_class_comes_before_the_priority(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    lease = await Lease.register(broker, card)
    await broker.jobs.submit(make_request(priority=-100, job_class=JobClass.BATCH), job_id="batch")
    await broker.jobs.submit(make_request(priority=100), job_id="interactive")
    assert [claim.job_id for claim in await lease.claim(1)] == ["interactive"]
    await lease.close()


async def test_jobs_are_listed_by_arrival_whatever_their_priority(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    lease = await Lease.register(broker, card)
    records = [await broker.jobs.submit(make_request(priority=step)) for step in (50, 0, -50)]
    assert [job.id for job in await broker.jobs.list()] == [job.id for job in reversed(records)]
    told = [job.created_at for job in reversed(await broker.jobs.list())]
    assert told == [job.created_at for job in records] == sorted(told)
    await lease.close()


async def test_a_client_gives_the_priority_as_a_keyword(broker: Broker, config: BrokerConfig, card: ModelCard) -> None:
    lease = await Lease.register(broker, card)
    async with Client(config=config) as client:
        record = await client.submit(model="tale", prompt="Once", priority=-7)
    assert (await broker.jobs.get(record.id)).readable_request().priority == -7
    await lease.close()


def test_a_stored_request_without_a_priority_has_priority_0(make_request: Callable[..., GenerationRequest]) -> None:
    older = loads(encode_request(make_request(priority=9)))
    del older["priority"]
    assert decode_request(dumps(older)).priority == 0


def test_priority_seconds_must_be_valid(config: BrokerConfig) -> None:
    with pytest.raises(ConfigError, match=r"broker\.priority_seconds"):
        replace(config, priority_seconds=-1.0)
