"""Teller, a worker without a model under a real lease, and `read`, a reader of its events."""

import asyncio
import contextlib

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.core.errors import LeaseLost, Unavailable
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.core.model_card import ModelCard


class Teller:
    """Runs all jobs of the card's model. A job gets `length` events; a step makes one for each job, with its number.

    If the lease is lost, it registers again.
    """

    def __init__(self, broker: Broker, card: ModelCard, *, length: int, pause: float = 0.01) -> None:
        self._broker, self._card, self._length, self._pause = broker, card, length, pause
        self.incarnations = 0
        self.going = asyncio.Event()
        self.going.set()
        self.halted = asyncio.Event()
        self.made: list[tuple[str, int]] = []  # (job id, seq) of all acknowledged events

    async def run(self) -> None:
        """Run jobs until cancelled."""
        while True:
            with contextlib.suppress(LeaseLost, Unavailable):
                await self._incarnation()
            await asyncio.sleep(0.05)

    async def halt(self) -> None:
        """Make no step until `going` is set. Returns when the current step is acknowledged."""
        self.going.clear()
        self.halted.clear()
        await self.halted.wait()

    async def _incarnation(self) -> None:
        lease = await Lease.register(self._broker, self._card)
        self.incarnations += 1
        jobs: dict[str, int] = {}
        beat = 0.0
        loop = asyncio.get_running_loop()
        try:
            while True:
                if loop.time() - beat > self._broker.config.lease_seconds / 4:
                    await lease.beat({})
                    beat = loop.time()
                if not self.going.is_set():
                    self.halted.set()
                    await asyncio.sleep(0.02)
                    continue
                for claim in await lease.claim(16 - len(jobs)):
                    jobs[claim.job_id] = len(claim.events)
                events = []
                for job_id in jobs:
                    jobs[job_id] += 1
                    events.append((job_id, self._event(jobs[job_id])))
                stop = await lease.commit(events)
                self.made += [(job_id, event.seq) for job_id, event in events if job_id not in stop]
                jobs = {job_id: seq for job_id, seq in jobs.items() if seq < self._length and job_id not in stop}
                await asyncio.sleep(self._pause)
        finally:
            await self._broker.hub.unsubscribe(lease.mailbox)

    def _event(self, seq: int) -> TokenEvent:
        return TokenEvent(seq=seq, text=f"{seq} ", state=JobState.DONE if seq == self._length else None)


async def read(broker: Broker, job_id: str, seen: list[int] | None = None) -> list[int]:
    """Follow a job to its end and return its seqs. `seen` gets each seq as it arrives."""
    seen = [] if seen is None else seen
    async with contextlib.aclosing(broker.journal.follow(job_id)) as events:
        async for event in events:
            seen.append(event.seq)
    return seen
