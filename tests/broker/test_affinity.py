"""Prefix affinity: cached prefixes change which worker runs a job, and in which order, within limits."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.broker.prefix_hashes import LENGTHS, prefix_hashes
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest, JobClass

KIB = 1024
OLD, NEW = "o" * (2 * KIB), "n" * (2 * KIB)


def ids(claims: Any) -> Any:
    return [claim.job_id for claim in claims]


async def submit(broker: Any, make_request: Any, job_id: Any, prompt: Any, **fields: Any) -> Any:
    return await broker.jobs.submit(make_request(prompt, **fields), job_id=job_id)


async def end(lease: Any, *job_ids: Any) -> None:
    await lease.commit([(one, TokenEvent(seq=1, state=JobState.DONE)) for one in job_ids])


@pytest.fixture
def arrive(broker: Broker, raw: Any) -> Any:
    """Set a job's arrival, in seconds from now. One in the future counts as new, however slow this machine is."""

    def change(job_id: Any, seconds: Any) -> None:
        at = round((time.time() + seconds) * 1e6)
        raw.hset(f"{broker.keys.tag}:job:{job_id}", "order", at)

    return change


def chat(*texts: Any, **fields: Any) -> Any:
    messages = tuple({"role": "user", "content": text} for text in texts)
    return GenerationRequest(model="tale", messages=messages, **fields)


def test_prefix_hashes_are_equal_as_far_as_the_prompts_are() -> None:
    request = GenerationRequest(model="tale", prompt="a" * 5_000)
    longer = GenerationRequest(model="tale", prompt="a" * 5_000 + "b" * 100_000)
    assert len(prefix_hashes(request)) == 3
    assert not set(prefix_hashes(request, "acme")) & {*prefix_hashes(request), *prefix_hashes(request, "other")}
    assert prefix_hashes(longer)[:3] == prefix_hashes(request)
    assert len(prefix_hashes(longer)) == len(set(prefix_hashes(longer))) == len(LENGTHS) == 7
    late = GenerationRequest(model="tale", prompt="a" * 3_000 + "b" * 3_000)
    assert [x == y for x, y in zip(prefix_hashes(late), prefix_hashes(longer), strict=False)] == [True, True, False]
    assert prefix_hashes(GenerationRequest(model="tale", prompt="a" * 900)) == []


def test_a_continued_conversation_shares_the_prefix_of_its_earlier_turns() -> None:
    turn = chat("x" * 3_000, "y" * 3_000)
    on = chat("x" * 3_000, "y" * 3_000, "z" * 3_000)
    assert prefix_hashes(on)[:3] == prefix_hashes(turn)[:3] != []
    tools = ({"type": "function", "function": {"name": "f"}},)
    assert not set(prefix_hashes(chat("x" * 3_000, "y" * 3_000, tools=tools))) & set(prefix_hashes(turn))
    by_ids = GenerationRequest(model="tale", prompt_token_ids=(7,) * 1_000)
    assert len(prefix_hashes(by_ids)) == 2  # four bytes each


async def test_a_job_with_a_cached_prefix_overtakes_jobs_that_arrived_just_before(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    lease = await Lease.register(broker, card)
    for job_class in JobClass:
        await submit(broker, make_request, f"{job_class}-first", OLD)
        assert ids(await lease.claim(1)) == [f"{job_class}-first"]
        names = [f"{job_class}-{number}" for number in range(18)]
        for number, name in enumerate(names):
            prompt = OLD + name if number in (5, 17) else f"{name} {NEW}"
            await submit(broker, make_request, name, prompt, job_class=job_class)
        assert ids(await lease.claim(2)) == [names[5], names[0]]  # the last job is beyond the window
        assert ids(await lease.claim(20)) == [names[17], *names[1:5], *names[6:17]]
    await lease.close()


async def test_the_longest_cached_prefix_goes_first_then_the_earliest_arrival(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    lease = await Lease.register(broker, card)
    await submit(broker, make_request, "first", OLD * 4)
    await lease.claim(1)
    for job_id, prompt in (("cold", NEW), ("a", OLD), ("b", OLD * 3), ("c", OLD * 3)):
        await submit(broker, make_request, job_id, prompt)
    assert ids(await lease.claim(4)) == ["b", "c", "a", "cold"]
    await lease.close()


async def test_no_cached_prefix_overtakes_a_job_that_arrived_long_before(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest]
) -> None:
    lease = await Lease.register(broker, card)
    await submit(broker, make_request, "first", OLD)
    await lease.claim(1)
    await submit(broker, make_request, "warm", OLD, priority=1)  # ranks as if it had arrived half a minute later
    await submit(broker, make_request, "cold", NEW)
    assert ids(await lease.claim(2)) == ["cold", "warm"]
    await lease.close()


async def test_a_new_job_is_left_to_the_worker_that_has_its_prefix(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest], arrive: Any
) -> None:
    here, there = await Lease.register(broker, card), await Lease.register(broker, card)
    await submit(broker, make_request, "first", OLD)
    assert ids(await there.claim(1)) == ["first"]
    await end(there, "first")
    assert ids(await there.claim(3)) == []  # it waits with three free rows
    for job_id, prompt in (("known", OLD), ("unknown", NEW), ("short", "x")):
        await submit(broker, make_request, job_id, prompt)
        arrive(job_id, 60)
    assert ids(await here.claim(3)) == ["unknown", "short"]
    assert ids(await here.claim(3)) == []
    assert ids(await there.claim(3)) == ["known"]
    await here.close()
    await there.close()


async def test_a_job_is_left_to_another_worker_for_a_moment_only(
    broker: Broker, card: ModelCard, make_request: Callable[..., GenerationRequest], arrive: Any
) -> None:
    here, there = await Lease.register(broker, card), await Lease.register(broker, card)
    await submit(broker, make_request, "first", OLD)
    await there.claim(1)
    await there.claim(3)
    await here.wait_for_work(5)
    await submit(broker, make_request, "known", OLD)
    async with asyncio.timeout(10):  # no other worker takes the job, so the worker that left it wakes up
        while not (claims := await here.claim(3)):
            await here.wait_for_work(60)
    assert ids(claims) == ["known"]
    await here.close()
    await there.close()


@pytest.mark.parametrize("why", ["no row", "gone", "dead", "known here too", "other model"])
async def test_no_job_is_left_to_a_worker_that_cannot_take_it(
    broker: Broker,
    card: ModelCard,
    make_request: Callable[..., GenerationRequest],
    arrive: Any,
    expire_leases: Callable[[], Awaitable[None]],
    why: Any,
) -> None:
    here, there = await Lease.register(broker, card), await Lease.register(broker, card)
    for lease, name in ((there, "one"), (here, "two")):
        await submit(broker, make_request, name, OLD if lease is there or why == "known here too" else NEW)
        arrive(name, -60)
        assert ids(await lease.claim(1)) == [name]
    await there.claim(0 if why == "no row" else 3)
    if why == "gone":
        await there.close()
        await end(here, *ids(await here.claim(1)))
    elif why == "dead":
        await expire_leases()
        here = await Lease.register(broker, card)
    elif why == "other model":
        here = await Lease.register(
            broker, type(card)(**{**{n: getattr(card, n) for n in card.__slots__}, "name": "b"})
        )
    await broker.jobs.submit(make_request(OLD, model=here.card.name), job_id="known")
    arrive("known", 60)
    assert ids(await here.claim(1)) == ["known"]
    await here.close()


async def test_the_remembered_prefixes_of_a_worker_are_bounded_and_deleted_with_it(
    broker: Broker,
    card: ModelCard,
    make_request: Callable[..., GenerationRequest],
    raw: Any,
    expire_leases: Callable[[], Awaitable[None]],
) -> None:
    lease, dead = await Lease.register(broker, card), await Lease.register(broker, card)
    warm = f"{broker.keys.tag}:warm:"
    raw.zadd(warm + lease.id, {f"{number:016x}": number for number in range(1_024)})
    for one in (lease, dead):
        await submit(broker, make_request, f"job-{one.id}", OLD)
        await one.claim(1)
    names = [name.decode() for name in raw.zrange(warm + lease.id, 0, -1)]
    assert len(names) == 1_024
    assert set(prefix_hashes(make_request(OLD))) == set(names[-2:])
    assert raw.pttl(warm + lease.id) > 0
    await lease.close()
    await expire_leases()
    await broker.scripts.call("reap", 500_000, 3, b"{}", b"{}", b"{}", "1000 1000 0", 1_000, 1_000)
    assert raw.keys("*:warm:*") == []
