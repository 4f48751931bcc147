"""A worker without an engine: it claims jobs through a real lease and plays a script of events for each."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Self

from processes import until

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Claim, Lease
from ktqueue.core.events import FinishReason, JobState, PositionLogprobs, TokenEvent, TokenLogprob, Usage
from ktqueue.core.model_card import ModelCard

CARD = ModelCard(
    name="tale", created=1_700_000_000, max_model_len=512, vocab_size=256, architecture="test", quantization="none",
    max_num_seqs=512,
)  # fmt: skip
USAGE = Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=2)
Step = dict[str, Any] | float  # fields of an event, or seconds to wait
Script = Callable[[Claim], AsyncIterator[Step]]


def token(text: str, **fields: Any) -> Step:
    """Fields of an event with one token."""
    return {"token_ids": (7,), "text": text, **fields}


def logprob(data: bytes, value: float = -0.5) -> PositionLogprobs:
    """A position whose chosen token has these bytes, with two alternatives."""
    chosen = TokenLogprob(7, data, value)
    return PositionLogprobs(chosen, (chosen, TokenLogprob(8, b"\xff", float("-inf"))))


def ended(claim: Claim, state: JobState = JobState.DONE, **fields: Any) -> dict[str, Any]:
    """Return the fields of a job's last event."""
    return {"state": state, "usage": USAGE, **fields}


async def tale(claim: Claim) -> AsyncIterator[Step]:
    """Three tokens for each choice, then the end."""
    n = claim.request.sampling.n
    has_logprobs = claim.request.sampling.logprobs is not None
    for word in ("Once", " upon", " a time"):
        for index in range(n):
            yield token(word, index=index, logprobs=(logprob(word.encode()),) if has_logprobs else ())
    for index in range(n):
        yield {"index": index, "finish_reason": FinishReason.STOP}
    yield ended(claim)


@dataclass
class ScriptedWorker:
    """Claims jobs and commits what `script` yields for each, step by step. A cancelled job stops.

    As a context manager it works until the end of the block.

    `claims`: every claim so far. `stopped`: ids of cancelled jobs. `ready`: set once the worker is registered.
    """

    broker: Broker
    script: Script = tale
    card: ModelCard = CARD
    claims: list[Claim] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    _plays: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _events: list[tuple[str, TokenEvent]] = field(default_factory=list)
    _seqs: dict[str, int] = field(default_factory=dict)

    async def __aenter__(self) -> Self:
        self._running = asyncio.create_task(self.run())
        await self.ready.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    async def run(self) -> None:
        """Work until cancelled."""
        lease = await Lease.register(self.broker, self.card)
        self.ready.set()
        tasks = [asyncio.create_task(self._beat(lease)), asyncio.create_task(self._step(lease))]
        try:
            while True:
                for claim in await lease.claim(CARD.max_num_seqs):
                    self._seqs[claim.job_id] = len(claim.events)
                    self._plays[claim.job_id] = asyncio.create_task(self._play(claim))
                    self.claims.append(claim)
                await lease.wait_for_work(0.05)
        finally:
            tasks += self._plays.values()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await lease.close()

    async def claimed(self, count: int) -> None:
        """Wait until `count` jobs were claimed."""
        await until(lambda: len(self.claims) >= count, 10)

    async def _beat(self, lease: Lease) -> None:
        while True:
            await lease.beat({"running": 1.0, "free_pages": 25.0, "total_pages": 100.0, "generation_tokens": 9.0})
            await asyncio.sleep(0.2)

    async def _step(self, lease: Lease) -> None:
        while True:
            events, self._events = self._events, []
            for job_id in await lease.commit(events):
                if job_id in self._plays and job_id not in self.stopped:
                    self.stopped.append(job_id)
                    self._plays[job_id].cancel()
                    self._say(job_id, {"state": JobState.CANCELLED, "usage": USAGE})
            await asyncio.sleep(0.005)

    def _say(self, job_id: str, event: dict[str, Any]) -> None:
        self._seqs[job_id] += 1
        self._events.append((job_id, TokenEvent(seq=self._seqs[job_id], **event)))

    async def _play(self, claim: Claim) -> None:
        async for step in self.script(claim):
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                self._say(claim.job_id, step)
                await asyncio.sleep(0)
