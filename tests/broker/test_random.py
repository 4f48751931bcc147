"""Several lease holders run random operations with faults. In the end, all promises hold.

The holders are small drivers of the protocol; the scripts and the server are the real ones. Every event names its
parent, so that two generations of one job's tokens could not hide behind right numbers.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from ktqueue.broker.broker import Broker
from ktqueue.broker.jobs import QueueDepth
from ktqueue.broker.lease import Lease
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import LeaseLost
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest, JobClass

JOBS, HOLDERS = 200, 3


@dataclass
class OpenJob:
    """A job that a holder runs: the seq of its last event, and the token in it."""

    seq: int
    token: str


class Holder:
    """A worker without a model. Each step makes one token for each job, and each token names the one before it."""

    def __init__(self, broker: Any, card: Any, rng: Any, stalls: Any) -> None:
        self.broker, self.card, self.rng, self.stalls = broker, card, rng, stalls
        self.incarnations = 0

    async def run(self) -> None:
        while True:
            with contextlib.suppress(LeaseLost):
                await self.incarnation()

    async def incarnation(self) -> None:
        lease = await Lease.register(self.broker, self.card)
        self.incarnations += 1
        jobs: dict[str, OpenJob] = {}
        beat = 0.0
        loop = asyncio.get_running_loop()
        try:
            while True:
                if loop.time() - beat > self.broker.config.lease_seconds / 4:
                    await lease.beat({})
                    beat = loop.time()
                claims = await lease.claim(16 - len(jobs), wait=not jobs)
                for claim in claims or ([] if jobs else await lease.wait_for_work(0.05)):
                    token = claim.events[-1].text.split("<")[0] if claim.events else ""
                    jobs[claim.job_id] = OpenJob(len(claim.events), token)
                dice = self.rng.random()
                if dice < 0.02:
                    return  # like kill -9: it stops without a word, and the lease expires
                if dice < 0.03 and self.stalls:
                    await asyncio.sleep(self.broker.config.lease_seconds * 1.5)  # like SIGSTOP: it continues too late
                if dice < 0.06 and jobs:
                    back = self.rng.sample(sorted(jobs), self.rng.randint(1, len(jobs)))
                    await lease.release(back)
                    for job_id in back:
                        del jobs[job_id]
                events = [(job_id, self.next_event(job)) for job_id, job in jobs.items()]
                stop = await lease.commit(events)
                for job_id in [job_id for job_id, event in events if event.state is not None]:
                    del jobs[job_id]
                late = [(job_id, jobs.pop(job_id)) for job_id in stop & jobs.keys()]
                await lease.commit(
                    [
                        (job_id, TokenEvent(seq=job.seq + 1, text=f"<{job.token}", state=JobState.CANCELLED))
                        for job_id, job in late
                    ]
                )
        finally:
            await self.broker.hub.unsubscribe(lease.mailbox)

    def next_event(self, job: OpenJob) -> TokenEvent:
        """Make the next token of a job, which names the token before it. From the sixth on it may be the last."""
        token, parent = f"{self.rng.getrandbits(32)}", job.token
        job.seq, job.token = job.seq + 1, token
        last = job.seq >= 6 and self.rng.random() < 0.3
        return TokenEvent(seq=job.seq, text=f"{token}<{parent}", state=JobState.DONE if last else None)


async def reader(broker: Any, job_id: Any, rng: Any) -> Any:
    """Read a job to its end. Now and then the reader leaves and continues after the last seq that it saw."""
    seen: list[Any] = []
    while not seen or seen[-1].state is None:
        events = broker.journal.follow(job_id, seen[-1].seq if seen else 0)
        async with contextlib.aclosing(events):
            async for event in events:
                seen.append(event)
                if rng.random() < 0.02:
                    break
    return seen


@pytest.mark.parametrize(("seed", "stalls"), [(1, False), (2, True), (3, True)])
async def test_random_faults_break_no_promise_of_two_hundred_jobs(
    config: BrokerConfig,
    card: ModelCard,
    make_request: Callable[..., GenerationRequest],
    raw: Any,
    seed: int,
    stalls: Any,
) -> None:
    rng = random.Random(seed)
    settings = replace(config, lease_seconds=0.4, max_attempts=40)
    async with contextlib.AsyncExitStack() as stack:
        brokers = [await stack.enter_async_context(await Broker.open(settings)) for _ in range(HOLDERS + 1)]
        front = brokers[-1]
        await (await Lease.register(front, card)).close()
        holders = [Holder(broker, card, random.Random(seed * 10 + k), stalls) for k, broker in enumerate(brokers[:-1])]
        tasks = [asyncio.create_task(holder.run()) for holder in holders]
        tasks += [asyncio.create_task(broker.reaper().run()) for broker in brokers[::2]]

        async def client(k: Any) -> Any:
            await asyncio.sleep(rng.random() * 2)
            job_class = rng.choice(list(JobClass))
            # Some jobs always expire, however fast the machine is; others may or may not.
            expires_in = 0.001 if k % 20 == 0 else rng.uniform(0.002, 0.5) if rng.random() < 0.1 else None
            request = make_request(job_class=job_class, expires_in=expires_in)
            first = await front.jobs.submit(request, idempotency_key=f"{k}")
            again = await front.jobs.submit(request, idempotency_key=f"{k}")
            assert again.id == first.id
            if rng.random() < 0.2:
                background.append(asyncio.create_task(cancel_later(first.id, rng.random() ** 4)))
            return first.id, await reader(front, first.id, rng)

        async def cancel_later(job_id: Any, seconds: Any) -> None:
            await asyncio.sleep(seconds)
            await front.jobs.cancel(job_id)

        async def cutter() -> None:
            while True:
                await asyncio.sleep(rng.uniform(0.2, 0.6))
                raw.client_kill_filter(_type="pubsub")

        background: list[Any] = []
        tasks.append(asyncio.create_task(cutter()))
        try:
            async with asyncio.timeout(60):
                views = await asyncio.gather(*(client(k) for k in range(JOBS)))
        finally:
            for task in (*tasks, *background):
                task.cancel()
            await asyncio.gather(*tasks, *background, return_exceptions=True)

        assert len({job_id for job_id, _ in views}) == JOBS
        states: Counter[JobState] = Counter()
        for job_id, seen in views:
            record = await front.jobs.get(job_id)
            journal = await front.journal.replay(job_id)
            states[record.state] += 1
            assert seen == journal
            assert [event.seq for event in journal] == list(range(1, len(journal) + 1))
            assert [event.state for event in journal if event.state] == [record.state]
            assert journal[-1].state is record.state
            parent = ""
            for event in journal:
                if event.text:
                    token, _, named = event.text.partition("<")
                    assert named == parent, "a token was made from another prefix"
                    parent = token
        assert states[JobState.DONE] > JOBS / 2
        assert states[JobState.CANCELLED] > 0
        assert states[JobState.EXPIRED] > 0
        assert sum(states.values()) == JOBS
        assert await front.jobs.depth() == [QueueDepth("tale", 0, 0, 0)]
        assert raw.exists(*(f"{front.keys.tag}:{name}" for name in ("live", "deadlines", "backlog"))) == 0
        assert sum(holder.incarnations for holder in holders) > HOLDERS
