"""What a lease allows. Once it has expired, it allows nothing."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.core.codec import encode_event
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import LeaseLost
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest, JobClass


async def test_an_expired_lease_can_do_nothing_even_before_it_is_reaped(
    broker: Broker,
    card: ModelCard,
    make_request: Callable[..., GenerationRequest],
    expire_leases: Callable[[], Awaitable[None]],
) -> None:
    lease = await Lease.register(broker, card)
    job = await broker.jobs.submit(make_request())
    await lease.claim(1)
    await lease.commit([(job.id, TokenEvent(seq=1, text="a"))])
    waiting = await broker.jobs.submit(make_request())
    await expire_leases()
    with pytest.raises(LeaseLost):
        await lease.commit([(job.id, TokenEvent(seq=2, text="b"))])
    with pytest.raises(LeaseLost):
        await lease.commit([(job.id, TokenEvent(seq=2, state=JobState.DONE))])
    with pytest.raises(LeaseLost):
        await lease.release([job.id])
    with pytest.raises(LeaseLost):
        await lease.claim(1)
    with pytest.raises(LeaseLost):
        await lease.beat({})
    await lease.close()
    assert [event.seq for event in await broker.journal.replay(job.id)] == [1]
    assert (await broker.jobs.get(job.id)).state is JobState.RUNNING
    assert (await broker.jobs.get(waiting.id)).state is JobState.QUEUED


async def test_a_job_whose_record_is_damaged_fails_alone(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest], raw: Any
) -> None:
    lease = await Lease.register(broker, card)
    strange, good = [await broker.jobs.submit(make_request()) for _ in range(2)]
    cancelled = await broker.jobs.submit(make_request())
    raw.hset(broker.keys.tag + ":job:" + strange.id, "request", b'{"v":1}')
    assert [claim.job_id for claim in await lease.claim(1)] == []
    last = (await broker.journal.replay(strange.id))[-1]
    assert last.state is JobState.FAILED
    assert last.error is not None
    assert last.error.code == "codec_error"
    assert [claim.job_id for claim in await lease.claim(2)] == [good.id, cancelled.id]
    await broker.jobs.cancel(cancelled.id)
    another = await broker.jobs.submit(make_request())
    raw.hset(broker.keys.tag + ":job:" + another.id, "request", b"not JSON")
    assert await lease.claim(1) == []
    assert await lease.commit([]) == {cancelled.id}
    assert await lease.commit([(good.id, TokenEvent(seq=1, state=JobState.DONE))]) == {cancelled.id}
    await lease.close()


async def test_a_renewal_keeps_the_lease(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    lease = await Lease.register(broker, card)
    job = await broker.jobs.submit(make_request())
    await lease.claim(1)
    for _ in range(8):
        await asyncio.sleep(broker.config.lease_seconds / 4)
        await lease.beat({})
    assert await lease.commit([(job.id, TokenEvent(seq=1, state=JobState.DONE))]) == set()
    await lease.close()


async def test_the_former_worker_cannot_change_a_job_that_another_runs(
    broker: Broker,
    card: ModelCard,
    make_request: Callable[..., GenerationRequest],
    expire_leases: Callable[[], Awaitable[None]],
) -> None:
    old = await Lease.register(broker, card)
    job = await broker.jobs.submit(make_request())
    await old.claim(1)
    await old.commit([(job.id, TokenEvent(seq=1, text="a"))])
    await expire_leases()
    assert await broker.reaper().reap() == (1, 0)
    new = await Lease.register(broker, card)
    (claim,) = await new.claim(1)
    assert (claim.attempt, claim.events) == (2, [TokenEvent(seq=1, text="a")])
    for event in (TokenEvent(seq=2, text="stale"), TokenEvent(seq=2, state=JobState.DONE)):
        with pytest.raises(LeaseLost):
            await old.commit([(job.id, event)])
    with pytest.raises(LeaseLost):
        await old.release([job.id])
    await new.commit([(job.id, TokenEvent(seq=2, text="b")), (job.id, TokenEvent(seq=3, state=JobState.DONE))])
    assert [event.text for event in await broker.journal.replay(job.id)] == ["a", "b", ""]
    await new.close()


async def test_a_valid_lease_cannot_change_another_workers_job(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    mine, other = await Lease.register(broker, card), await Lease.register(broker, card)
    job = await broker.jobs.submit(make_request())
    assert len(await mine.claim(1)) == 1
    assert await other.claim(1) == []
    assert await other.commit([(job.id, TokenEvent(seq=1, text="x"))]) == {job.id}
    assert await other.commit([(job.id, TokenEvent(seq=1, state=JobState.DONE))]) == {job.id}
    await other.release([job.id])
    assert await broker.journal.replay(job.id) == []
    assert (await broker.jobs.get(job.id)).worker_id == mine.id
    await other.close()
    await mine.close()


async def test_two_workers_never_get_the_same_job(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    leases = [await Lease.register(broker, card) for _ in range(4)]
    ids = {(await broker.jobs.submit(make_request())).id for _ in range(100)}
    claims = await asyncio.gather(*(lease.claim(3) for lease in leases for _ in range(9)))
    got = [claim.job_id for batch in claims for claim in batch]
    assert sorted(got) == sorted(ids)
    for lease in leases:
        await lease.close()


async def test_a_worker_gets_jobs_of_its_model_only(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    tale, novel = await Lease.register(broker, card), await Lease.register(broker, replace(card, name="novel"))
    await broker.jobs.submit(make_request(model="novel"))
    assert await tale.claim(4) == []
    assert len(await novel.claim(4)) == 1
    await tale.close()
    await novel.close()


async def test_a_commit_whose_reply_was_lost_happens_once(
    broker: Broker, card: ModelCard, proxy: Any, make_request: Callable[..., GenerationRequest]
) -> None:
    wire, config = proxy
    async with await Broker.open(config) as cut:
        lease = await Lease.register(cut, card)
        job = await broker.jobs.submit(make_request())
        await lease.claim(1)
        for seq in range(1, 6):
            wire.lose_reply_to(f"word{seq}")
            assert await lease.commit([(job.id, TokenEvent(seq=seq, text=f"word{seq}"))]) == set()
        wire.lose_reply_to('"s":"done"')
        assert await lease.commit([(job.id, TokenEvent(seq=6, state=JobState.DONE))]) == set()
        assert wire.lost == 6
        assert [event.seq for event in await broker.journal.replay(job.id)] == [1, 2, 3, 4, 5, 6]
        await lease.close()


async def test_a_cancel_is_reported_again_if_the_reply_was_lost(
    broker: Broker, card: ModelCard, proxy: Any, make_request: Callable[..., GenerationRequest]
) -> None:
    wire, config = proxy
    async with await Broker.open(config) as cut:
        lease = await Lease.register(cut, card)
        job = await broker.jobs.submit(make_request())
        await lease.claim(1)
        await broker.jobs.cancel(job.id)
        wire.lose_reply_to("word")
        assert await lease.commit([(job.id, TokenEvent(seq=1, text="word"))]) == {job.id}
        assert await lease.commit([]) == {job.id}
        assert await lease.commit([(job.id, TokenEvent(seq=2, state=JobState.CANCELLED))]) == set()
        assert await lease.commit([]) == set()
        await lease.close()


async def test_a_claim_whose_reply_was_lost_gives_the_same_jobs(
    broker: Broker, card: ModelCard, proxy: Any, make_request: Callable[..., GenerationRequest]
) -> None:
    wire, config = proxy
    async with await Broker.open(config) as cut:
        lease = await Lease.register(cut, card)
        assert await lease.claim(2) == []  # the server has the script now, so only the reply of the claim can be lost
        ids = [(await broker.jobs.submit(make_request())).id for _ in range(3)]
        wire.lose_reply_to(lease.id)
        claims = await lease.claim(2)
        assert wire.lost == 1
        assert [claim.job_id for claim in claims] == ids[:2]
        assert [claim.attempt for claim in claims] == [1, 1]
        assert [claim.job_id for claim in await lease.claim(2)] == ids[2:]
        await lease.close()


async def test_a_gap_in_a_journal_loses_the_lease(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    lease = await Lease.register(broker, card)
    job = await broker.jobs.submit(make_request())
    other = await broker.jobs.submit(make_request())
    await lease.claim(2)
    with pytest.raises(LeaseLost, match="SEQUENCE"):
        await lease.commit([(other.id, TokenEvent(seq=1)), (job.id, TokenEvent(seq=2))])
    assert await broker.journal.replay(other.id) == []  # all or nothing


async def test_a_lost_step_loses_the_lease(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest], raw: Any
) -> None:
    lease = await Lease.register(broker, card)
    job = await broker.jobs.submit(make_request())
    await lease.claim(1)
    await lease.commit([(job.id, TokenEvent(seq=1))])
    await lease.beat({})
    raw.hincrby(f"{broker.keys.tag}:worker:{lease.id}", "step", -1)  # as if the server had lost its last second
    with pytest.raises(LeaseLost):
        await lease.commit([(job.id, TokenEvent(seq=2))])
    with pytest.raises(LeaseLost):  # a worker without jobs commits nothing, but may have ended those that are back
        await lease.beat({})


async def test_one_commit_takes_many_events_of_many_choices(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    lease = await Lease.register(broker, card)
    job = await broker.jobs.submit(make_request())
    await lease.claim(1)
    events = [TokenEvent(seq=seq, index=seq % 7, text=str(seq)) for seq in range(1, 2_500)]
    await lease.commit([(job.id, event) for event in events])
    await lease.commit([(job.id, TokenEvent(seq=2_500, state=JobState.DONE))])
    assert (await broker.journal.replay(job.id))[:-1] == events
    await lease.close()


async def test_interactive_goes_first_but_batch_has_its_share(
    config: BrokerConfig, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    async with await Broker.open(replace(config, batch_share=4)) as broker:
        lease = await Lease.register(broker, card)
        for _ in range(8):
            await broker.jobs.submit(make_request(job_class=JobClass.BATCH))
        for _ in range(8):
            await broker.jobs.submit(make_request())
        classes = [claim.request.job_class.value[0] for _ in range(16) for claim in await lease.claim(1)]
        assert "".join(classes) == "iiibiiibiibbbbbb"
        await lease.close()


async def test_old_batch_jobs_do_not_delay_interactive_jobs(
    config: BrokerConfig, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    async with await Broker.open(replace(config, batch_share=1_000)) as broker:
        lease = await Lease.register(broker, card)
        for _ in range(20):
            await broker.jobs.submit(make_request(job_class=JobClass.BATCH))
        await asyncio.sleep(0.1)
        young = await broker.jobs.submit(make_request())
        assert [claim.job_id for claim in await lease.claim(1)] == [young.id]
        await lease.close()


async def test_released_jobs_keep_their_places_and_attempts(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    lease = await Lease.register(broker, card)
    ids = [(await broker.jobs.submit(make_request())).id for _ in range(3)]
    await lease.claim(2)
    await lease.commit([(ids[0], TokenEvent(seq=1, text="a"))])
    await lease.release(ids[:1])
    released = await broker.jobs.get(ids[0])
    assert (released.state, released.attempts, released.worker_id, released.position) == (JobState.QUEUED, 0, None, 1)
    (again,) = await lease.claim(1)
    assert (again.job_id, again.attempt, again.events) == (ids[0], 1, [TokenEvent(seq=1, text="a")])
    await lease.close()  # leaving returns all jobs
    assert [job.state for job in await broker.jobs.list()] == [JobState.QUEUED] * 3
    assert [job.position for job in await broker.jobs.list()] == [3, 2, 1]


async def test_jobs_keep_their_order_even_within_one_microsecond(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest], raw: Any
) -> None:
    lease = await Lease.register(broker, card)
    first = await broker.jobs.submit(make_request(), job_id="z")
    for key in ("queue:interactive:tale", "live"):
        raw.zadd(f"{broker.keys.tag}:{key}", {"z": 4e15})  # as if the clock had gone back
    raw.hset(f"{broker.keys.tag}:job:z", "order", 4 * 10**15)
    for name in ("y", "x"):
        await broker.jobs.submit(make_request(), job_id=name)
    assert [claim.job_id for claim in await lease.claim(3)] == [first.id, "y", "x"]
    await lease.close()


async def test_a_new_job_wakes_an_idle_worker(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    lease = await Lease.register(broker, card)
    loop = asyncio.get_running_loop()
    waiting = asyncio.create_task(lease.wait_for_work(5))
    await asyncio.sleep(0.05)
    began = loop.time()
    await broker.jobs.submit(make_request())
    await waiting
    assert loop.time() - began < 1
    await broker.jobs.submit(make_request())  # queued while no worker waits, so the next wait returns at once
    await asyncio.sleep(0.05)
    began = loop.time()
    await lease.wait_for_work(5)
    assert loop.time() - began < 1
    began = loop.time()
    await lease.wait_for_work(0.1)
    assert loop.time() - began > 0.09
    await lease.close()


async def test_a_repeated_step_is_recognised_by_the_script_itself(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    lease = await Lease.register(broker, card)
    job = await broker.jobs.submit(make_request())
    await lease.claim(1)
    step = (
        "commit_events",
        lease.id,
        500_000,
        1,
        1_000,
        1_000,
        job.id,
        1,
        encode_event(TokenEvent(seq=1, text="a")),
        "",
    )
    for _ in range(3):
        assert await broker.scripts.call(*step) == [[], []]
    assert len(await broker.journal.replay(job.id)) == 1
    await lease.close()
