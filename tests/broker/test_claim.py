"""A claim counts rows, not jobs, and interactive jobs may exceed the free rows."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.core.codec import decode_event
from ktqueue.core.config import BrokerConfig
from ktqueue.core.events import TokenEvent
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest, JobClass, SamplingParams

MIB = 1 << 20


def ids(claims: Any) -> Any:
    return [claim.job_id for claim in claims]


async def test_a_job_takes_a_row_for_each_choice(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    lease = await Lease.register(broker, card)
    for job_id, n in (("a", 3), ("b", 1), ("c", 4), ("d", 1)):
        await broker.jobs.submit(make_request(sampling=SamplingParams(n=n)), job_id=job_id)
    assert ids(await lease.claim(4)) == ["a", "b"]
    assert ids(await lease.claim(2)) == ["c"]  # it needs more rows than are free; otherwise it would never start
    assert ids(await lease.claim(2)) == ["d"]
    await lease.close()


async def test_only_interactive_jobs_go_beyond_the_free_rows(
    config: BrokerConfig, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    async with await Broker.open(replace(config, batch_share=2)) as broker:
        lease = await Lease.register(broker, card)
        for name in ("b1", "b2", "b3"):
            await broker.jobs.submit(make_request(job_class=JobClass.BATCH), job_id=name)
        for name in ("i1", "i2", "i3", "i4"):
            await broker.jobs.submit(make_request(), job_id=name)
        assert ids(await lease.claim(0, 1)) == ["i1"]
        assert ids(await lease.claim(2, 3)) == ["i2", "b1", "i3"]  # batch gets its share of the free rows only
        assert ids(await lease.claim(0, 5)) == ["i4"]
        assert ids(await lease.claim(0, 5)) == []
        assert ids(await lease.claim(1, 5)) == ["b2"]
        await lease.close()


async def test_an_interactive_job_is_not_claimed_for_more_rows_than_there_are(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    lease = await Lease.register(broker, card)
    await broker.jobs.submit(make_request(sampling=SamplingParams(n=3)), job_id="wide")
    assert ids(await lease.claim(0, 2)) == []
    assert (await broker.jobs.get("wide")).position == 1
    assert ids(await lease.claim(0, 3)) == ["wide"]
    await lease.close()


async def test_a_worker_may_wait_for_interactive_work_alone(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    lease = await Lease.register(broker, card)
    await lease.wait_for_work(5)  # it may have missed messages from before its subscription
    waiting = asyncio.create_task(lease.wait_for_work(30, interactive_only=True))
    for _ in range(3):
        await broker.jobs.submit(make_request(job_class=JobClass.BATCH))
        await asyncio.sleep(0.02)
    assert not waiting.done()
    await broker.jobs.submit(make_request())
    await asyncio.wait_for(waiting, 10)
    await lease.close()


async def test_a_repeated_claim_beyond_the_free_rows_gives_the_same_jobs(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest], proxy: Any
) -> None:
    wire, config = proxy
    async with await Broker.open(config) as cut:
        lease = await Lease.register(cut, card)
        names = [(await broker.jobs.submit(make_request())).id for _ in range(4)]
        wire.lose_reply_to(lease.id)
        assert ids(await lease.claim(0, 3)) == names[:3]
        assert wire.lost == 1
        assert ids(await lease.claim(0, 3)) == names[3:]
        await lease.close()


async def test_a_claim_ends_with_the_job_that_makes_it_heavy(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    """Redis serves nobody else while it writes a reply. Long prompts and long journals both make one heavy."""
    lease = await Lease.register(broker, card)
    for job_id in ("a", "b", "c", "d"):
        await broker.jobs.submit(make_request(prompt=3 * MIB * job_id), job_id=job_id)
    assert ids(await lease.claim(8)) == ["a", "b", "c"]
    assert ids(await lease.claim(5)) == ["d"]
    events = [TokenEvent(seq=seq, token_ids=(1,), text="x") for seq in range(1, 17_001)]
    await lease.commit([("d", event) for event in events])
    await lease.release(["d"])
    await broker.jobs.submit(make_request(), job_id="e")
    assert ids(await lease.claim(5)) == ["d"]
    assert ids(await lease.claim(4)) == ["e"]
    await lease.close()


async def test_long_journals_are_decoded_with_pauses(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    """Decoding the journals of a dead worker may take longer than a lease, which is renewed in the pauses."""
    turns = 0
    decoded: Counter[int] = Counter()

    def decode(seq: int, data: bytes) -> TokenEvent:
        decoded[turns] += 1
        return decode_event(seq, data)

    lease = await Lease.register(broker, card, decode=decode)
    for job_id in ("a", "b", "c"):
        await broker.jobs.submit(make_request(), job_id=job_id)
    await lease.claim(3)
    events = [TokenEvent(seq=seq, token_ids=(1,), text="x") for seq in range(1, 1_501)]
    await lease.commit([(job_id, event) for job_id in ("a", "b", "c") for event in events])
    await lease.release(["a", "b", "c"])

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    claims = await lease.claim(3)
    turning.cancel()
    assert [(claim.job_id, claim.events) for claim in claims] == [(job_id, events) for job_id in ("a", "b", "c")]
    assert max(decoded.values()) <= 1_000
    assert len(decoded) == 6
    await lease.close()
