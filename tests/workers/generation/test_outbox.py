"""Events on their way to the journals."""

import asyncio
from collections.abc import Sequence
from typing import Any

from ktqueue.core.events import TokenEvent
from ktqueue.workers.generation.outbox import Outbox


class HeldLease:
    """A lease whose commits end when `gate` is set."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.begun = asyncio.Event()

    async def commit(self, events: Sequence[tuple[str, TokenEvent]]) -> set[str]:
        self.begun.set()
        await self.gate.wait()
        return set()


async def test_committed_waits_for_the_commit_that_has_the_events_and_for_no_later_one() -> None:
    lease: Any = HeldLease()
    outbox = Outbox(lease, lambda _: None)
    running = asyncio.create_task(outbox.run())
    outbox.put("job-1", TokenEvent(seq=1))
    outbox.seal()
    await lease.begun.wait()
    waiting = asyncio.create_task(outbox.committed())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    lease.gate.set()
    async with asyncio.timeout(5):  # nothing follows: the worker has no other job
        await waiting
    running.cancel()
