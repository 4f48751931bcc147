"""WakeUp with a time limit: a wait ends when it is set or when its time is over, and not before."""

import asyncio

import pytest

from ktqueue.broker.redis.wake_up import WakeUp


async def wait(event: WakeUp, seconds: float) -> tuple[bool, float]:
    """Return the result of the wait, and how long it took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    return await event.wait(seconds), loop.time() - began


async def test_a_wake_up_that_was_set_before_ends_the_wait_at_once() -> None:
    event = WakeUp()
    event.set()
    assert await event.wait(60)
    event.clear()
    assert not await event.wait(0.01)


async def test_setting_a_wake_up_ends_the_wait() -> None:
    event = WakeUp()
    task = asyncio.create_task(event.wait(60))
    await asyncio.sleep(0)
    assert not task.done()
    event.set()
    assert await asyncio.wait_for(task, 30)


@pytest.mark.parametrize("first", [0.02, 60.0])
async def test_each_wait_has_its_own_limit(first: float) -> None:
    event = WakeUp()  # the timer of the first wait must not end the second
    task = asyncio.create_task(event.wait(first))
    await asyncio.sleep(0)
    event.set()
    assert await task
    event.clear()
    rung, seconds = await asyncio.wait_for(wait(event, 0.1), 30)
    assert not rung
    assert seconds >= 0.1


async def test_a_cancelled_wait_consumes_no_wake_up() -> None:
    event = WakeUp()
    task = asyncio.create_task(event.wait(60))
    await asyncio.sleep(0)
    task.cancel()
    again = asyncio.create_task(event.wait(60))
    await asyncio.gather(task, return_exceptions=True)
    event.set()
    assert await asyncio.wait_for(again, 30)
