"""A task that is cancelled in the middle of a call ends, at whatever moment it is cancelled."""

import asyncio

from ktqueue.broker.broker import Broker


async def test_a_cancelled_call_always_ends(broker: Broker) -> None:
    async def call_for_ever() -> None:
        while True:
            await broker.models.cards()

    for turns in range(240):
        task = asyncio.create_task(call_for_ever())
        for _ in range(turns % 12):
            await asyncio.sleep(0)
        task.cancel()
        _, pending = await asyncio.wait([task], timeout=5)
        assert not pending
