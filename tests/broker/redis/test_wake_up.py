"""The wake-up with a time limit: wakes at the ring, ends in time, and never before it."""

import asyncio

import pytest

from ktqueue.broker.redis.wake_up import Bell


async def wait(bell: Bell, seconds: float) -> tuple[bool, float]:
    """What the wait gave, and how long it took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    return await bell.wait(seconds), loop.time() - began


async def test_a_rung_bell_is_not_waited_for() -> None:
    bell = Bell()
    bell.ring()
    assert await bell.wait(60)
    bell.clear()
    assert not await bell.wait(0.01)


async def test_a_ring_wakes() -> None:
    bell = Bell()
    task = asyncio.create_task(bell.wait(60))
    await asyncio.sleep(0)
    assert not task.done()
    bell.ring()
    assert await asyncio.wait_for(task, 30)


@pytest.mark.parametrize("first", [0.02, 60.0])
async def test_each_wait_has_its_own_limit(first: float) -> None:
    bell = Bell()  # the first wait leaves its timer behind, which comes too early for the next one or too late
    task = asyncio.create_task(bell.wait(first))
    await asyncio.sleep(0)
    bell.ring()
    assert await task
    bell.clear()
    rung, seconds = await asyncio.wait_for(wait(bell, 0.1), 30)
    assert not rung
    assert seconds >= 0.1


async def test_a_wait_that_is_broken_off_takes_no_ring() -> None:
    bell = Bell()
    task = asyncio.create_task(bell.wait(60))
    await asyncio.sleep(0)
    task.cancel()
    again = asyncio.create_task(bell.wait(60))
    await asyncio.gather(task, return_exceptions=True)
    bell.ring()
    assert await asyncio.wait_for(again, 30)
