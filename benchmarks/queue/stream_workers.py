"""Plays many workers: submits jobs, claims them under real leases, and commits one event a job and step, on time.

It answers questions (see `json_lines`): "submit" with the job ids, of which the last is the heavy one, if there is one;
"run" with what was committed. The text of an event is the time at which its commit began, in nanoseconds of the
monotonic clock. A heavy job's text is filled up to `heavy_bytes`.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.json_lines import answer_questions_async
from benchmarks.queue.adapters.ours import keep_lease, model_card
from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Claim, Lease
from ktqueue.core.config import BrokerConfig
from ktqueue.core.events import FinishReason, JobState, TokenEvent, Usage
from ktqueue.core.request import GenerationRequest, SamplingParams

ROWS = 128  # of each worker


class Workers:
    """As many leases as the streams need. Each has its own heartbeat and its own steps."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._leases: list[tuple[Lease, list[Claim]]] = []
        self._beats: list[asyncio.Task[None]] = []
        self._heavy = ("", 0)
        self._latest = 0.0

    async def submit(self, streams: int, heavy_bytes: int) -> dict[str, Any]:
        """Queue jobs and claim them all."""
        count = -(-streams // ROWS)
        card = model_card(ROWS, max_model_len=1 << 20)
        leases = [await Lease.register(self._broker, card) for _ in range(count)]
        self._beats = [asyncio.create_task(keep_lease(lease, self._broker.config)) for lease in leases]
        request = GenerationRequest(model=card.name, prompt="go", sampling=SamplingParams(max_tokens=1 << 19))
        job_ids = [(await self._broker.jobs.submit(request)).id for _ in range(streams)]
        if heavy_bytes:
            self._heavy = (job_ids[-1], heavy_bytes)
        share = -(-streams // count)
        self._leases = [(lease, await lease.claim(share)) for lease in leases]
        return {"job_ids": job_ids}

    async def run(self, rate: float, seconds: float) -> dict[str, Any]:
        """A step of every worker `rate` times a second, their beginnings spread evenly; the last one ends all jobs."""
        steps = round(rate * seconds)
        began = time.monotonic() + 0.1
        self._latest = 0.0
        count = len(self._leases)
        await asyncio.gather(
            *(
                self._work(lease, claims, [began + (place / count + step) / rate for step in range(steps)])
                for place, (lease, claims) in enumerate(self._leases)
            )
        )
        for beat in self._beats:
            beat.cancel()
        return {"steps": steps, "latest_step_ms": 1e3 * self._latest}

    async def _work(self, lease: Lease, claims: Sequence[Claim], due: Sequence[float]) -> None:
        for step, moment in enumerate(due):
            await asyncio.sleep(max(0.0, moment - time.monotonic()))
            now = time.monotonic()
            self._latest = max(self._latest, now - moment)
            last = step == len(due) - 1
            await lease.commit([(claim.job_id, self._event(claim.job_id, step + 1, last=last)) for claim in claims])

    def _event(self, job_id: str, seq: int, *, last: bool) -> TokenEvent:
        text = str(time.monotonic_ns())
        if job_id == self._heavy[0]:
            text = text.ljust(self._heavy[1])
        if not last:
            return TokenEvent(seq=seq, token_ids=(seq,), text=text)
        return TokenEvent(seq=seq, token_ids=(seq,), text=text, finish_reason=FinishReason.LENGTH,
                          state=JobState.DONE, usage=Usage(prompt_tokens=1, completion_tokens=seq))  # fmt: skip


async def serve(url: str) -> None:
    """Answer until standard input ends."""
    async with await Broker.open(BrokerConfig(url=url)) as broker:
        await answer_questions_async(Workers(broker))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    asyncio.run(serve(parser.parse_args().url))
