"""What ended jobs leave in Redis counts for their tenants. Workers can write when clients have filled the server."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import redis
from required import number, retry_after

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.broker.redis.private_server import PrivateServer
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import InvalidRequest, KtqueueError, PoisonJob, TenantLimitReached, Unavailable
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import DROPPED, GenerationRequest, SamplingParams
from ktqueue.core.tenants import TenantLimits

NO_LIMITS = TenantLimits()
MIB = 1 << 20


def failed(seq: Any, error: Any) -> Any:
    return TokenEvent(seq=seq, state=JobState.FAILED, error=error.info())


@pytest.mark.parametrize("end", ["done", "cancelled", "expired", "failed by its own fault"])
async def test_an_ended_job_keeps_nothing_of_its_prompt(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest], raw: Any, end: Any
) -> None:
    request = make_request(
        "x" * 100_000, sampling=SamplingParams(n=2, logprobs=1), metadata={"a": "b"}, user="u", priority=3,
        expires_in=0.05 if end == "expired" else None,
    )  # fmt: skip
    job = await broker.jobs.submit(request)
    key = f"{broker.keys.tag}:job:{job.id}"
    assert raw.memory_usage(key, samples=0) > 100_000
    if end == "cancelled":
        await broker.jobs.cancel(job.id)
    elif end == "expired":
        await asyncio.sleep(0.06)
        await broker.reaper().reap()
    else:
        await lease.claim(2)
        fault = failed(1, InvalidRequest("too long"))
        await lease.commit([(job.id, TokenEvent(seq=1, state=JobState.DONE) if end == "done" else fault)])
    assert raw.memory_usage(key, samples=0) < 3_000
    record = await broker.jobs.get(job.id)
    assert record.state is JobState(end.split(" ")[0])
    assert record.request_dropped
    rest = record.readable_request()
    assert (rest.prompt, rest.metadata, rest.user) == (DROPPED, {"a": "b"}, "u")
    assert (rest.sampling.n, rest.sampling.logprobs, record.priority) == (2, 1, 3)
    assert (await broker.jobs.submit(request, job_id=job.id)).state is record.state  # the same request is recognised


async def test_a_job_of_an_older_version_keeps_its_request(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest], raw: Any
) -> None:
    job = await broker.jobs.submit(make_request("what it was"))
    raw.hdel(f"{broker.keys.tag}:job:{job.id}", "summary")
    record = await broker.jobs.cancel(job.id)
    assert record.state is JobState.CANCELLED
    assert record.readable_request().prompt == "what it was"
    assert not record.request_dropped


async def test_a_failed_job_keeps_its_request_while_there_is_room(
    config: BrokerConfig, card: ModelCard, make_request: Callable[..., GenerationRequest], raw: Any
) -> None:
    settings = replace(config, max_failed_bytes=25_000, failed_ttl=1_000, job_ttl=10)
    async with await Broker.open(settings) as broker:
        lease = await Lease.register(broker, card)
        for k in range(3):
            await broker.jobs.submit(make_request("x" * 10_000), job_id=f"{k}")
            await lease.claim(1)
            await lease.commit([(f"{k}", failed(1, PoisonJob("again and again")))])
        records = [await broker.jobs.get(f"{k}") for k in range(3)]
        assert [record.request_dropped for record in records] == [True, False, False]
        assert raw.pttl(f"{broker.keys.tag}:job:0") <= 10_000 < raw.pttl(f"{broker.keys.tag}:job:1")
        assert [job.id for job in await broker.jobs.list(state=JobState.FAILED)] == ["2", "1", "0"]
        await lease.close()


def measured(raw: Any, names: Any) -> Any:
    return sum(raw.memory_usage(name, samples=0) for name in names)


def stored(broker: Any, raw: Any, tenant: Any = "acme") -> Any:
    return int(raw.hget(f"{broker.keys.tag}:stored", tenant) or 0)


async def test_stored_bytes_of_a_tenant_count_until_they_expire(
    config: BrokerConfig, card: ModelCard, make_request: Callable[..., GenerationRequest], raw: Any
) -> None:
    settings = replace(config, job_ttl=0.3, journal_ttl=0.2, failed_ttl=0.4, idempotency_ttl=0.5)
    async with await Broker.open(settings) as broker:
        lease = await Lease.register(broker, card)
        for k in range(3):
            await broker.jobs.submit(
                make_request("x" * 50_000), job_id=f"{k}", tenant="acme", limits=NO_LIMITS, idempotency_key=f"{k}"
            )
        assert 150_000 < stored(broker, raw) < 170_000
        await lease.claim(2)
        await lease.commit([("0", TokenEvent(seq=1, text="y" * 30_000)), ("0", TokenEvent(seq=2, state=JobState.DONE))])
        await lease.commit([("1", failed(1, PoisonJob("again and again")))])
        await broker.jobs.cancel("2")
        names = [f"{broker.keys.tag}:{what}:{k}" for k in range(3) for what in ("job", "journal")]
        assert measured(raw, names) <= stored(broker, raw) < 10_000 + measured(raw, names)
        await asyncio.sleep(0.55)
        await broker.reaper().reap()
        assert stored(broker, raw) == 0
        assert raw.exists(f"{broker.keys.tag}:stored", f"{broker.keys.tag}:held") == 0
        await lease.close()


async def test_stored_bytes_of_a_tenant_have_a_limit(
    broker: Broker, lease: Lease, make_request: Callable[..., GenerationRequest]
) -> None:
    limits = TenantLimits(max_stored_bytes=200_000)
    with pytest.raises(TenantLimitReached) as caught:
        for _ in range(100):
            job = await broker.jobs.submit(make_request("x" * 10_000), tenant="acme", limits=limits)
            await broker.jobs.cancel(job.id)
    assert (caught.value.param, caught.value.limit) == ("max_stored_bytes", 200_000)
    assert 180_000 < number(caught.value.value, "value") <= 200_000
    await broker.jobs.submit(make_request("x" * 10_000), tenant="other", limits=limits)


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: Any) -> Any:
    server = PrivateServer()
    yield server.start(tmp_path_factory.mktemp("small"), max_memory=64 * MIB)
    server.stop()


@pytest.fixture
def small(small_server: Any) -> Any:
    with redis.Redis.from_url(small_server) as client:
        client.config_set("maxmemory", 64 * MIB)
        client.execute_command("FLUSHALL", "SYNC")
        yield client, BrokerConfig(url=small_server, lease_seconds=60)


async def test_a_tenant_that_submits_and_cancels_fills_only_its_own_share(
    small: Any, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    client, config = small
    async with await Broker.open(config) as broker:
        lease = await Lease.register(broker, card)
        reaper = asyncio.create_task(broker.reaper().run())
        await broker.reaper().reap()
        refusals = 0
        for k in range(90):
            with contextlib.suppress(TenantLimitReached):
                job = await broker.jobs.submit(make_request("x" * 1_000_000), tenant="hostile", limits=NO_LIMITS)
                if k % 2:
                    await broker.jobs.cancel(job.id)
                continue
            refusals += 1
            other = await broker.jobs.submit(make_request("y"), tenant="good", limits=NO_LIMITS)
            await broker.jobs.cancel(other.id)
        assert refusals > 60
        assert client.info("memory")["used_memory"] < 40 * MIB
        await lease.beat({})
        reaper.cancel()
        await asyncio.gather(reaper, return_exceptions=True)
        await lease.close()


@pytest.mark.parametrize(("size", "filled"), [(100, 0.85), (200_000, 0.6)])
async def test_clients_leave_a_share_of_the_memory_to_workers(
    small: Any, card: ModelCard, make_request: Callable[..., GenerationRequest], size: Any, filled: Any
) -> None:
    client, config = small
    client.setrange("others", 20 * MIB, "x")
    most = int(client.info("memory")["used_memory"] / filled)
    client.config_set("maxmemory", most)
    async with await Broker.open(config) as broker:
        lease = await Lease.register(broker, card)
        await broker.reaper().reap()
        with pytest.raises(Unavailable) as caught:
            for _ in range(200):
                await broker.jobs.submit(make_request("x" * size))
        assert abs(number(caught.value.limit, "limit") - most * 0.8) < 1
        assert retry_after(caught.value) > 0
        assert client.info("memory")["used_memory"] < most * 0.9
        await lease.close()


async def test_workers_can_write_to_a_full_server(
    small: Any, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    client, config = small
    async with await Broker.open(config) as broker:
        lease = await Lease.register(broker, card)
        jobs = [await broker.jobs.submit(make_request("x" * 1_000), tenant="t", limits=NO_LIMITS) for _ in range(4)]
        assert len(await lease.claim(2)) == 2
        client.config_set("maxmemory", client.info("memory")["used_memory"] - MIB)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.set("full", "x")
        with pytest.raises(Unavailable):
            await broker.jobs.submit(make_request())
        await lease.commit([(job.id, TokenEvent(seq=1, text="a" * 100)) for job in jobs[:2]])
        await lease.beat({})
        await broker.reaper().reap()
        await lease.start_trial(jobs[0].id)
        assert len(await lease.claim(1)) == 1
        await lease.release([jobs[2].id])
        await broker.jobs.cancel(jobs[3].id)
        await broker.reaper().release_lease(lease.id)
        other = await Lease.register(broker, card)
        assert {claim.job_id for claim in await other.claim(3)} == {job.id for job in jobs[:3]}
        await other.commit([(job.id, TokenEvent(seq=2, state=JobState.DONE)) for job in jobs[:2]])
        states = [(await broker.jobs.get(job.id)).state for job in jobs]
        assert states == [JobState.DONE, JobState.DONE, JobState.RUNNING, JobState.CANCELLED]
        with contextlib.suppress(KtqueueError):
            await other.close()
