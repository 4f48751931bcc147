"""Measures a deep queue: memory of a waiting job, and the time of submit and claim behind few and many jobs.

Two servers have a queue each and are measured in turns. In each turn one job is submitted and one is claimed and ended,
so the depth stays the same. Times are those of a client around one call. `python -m benchmarks.queue.depth`.
"""

import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack
from typing import Any

import redis

from benchmarks.command import command_line, integers
from benchmarks.machine import Bystanders
from benchmarks.percentiles import percentiles
from benchmarks.queue.adapters.ours import LAST, keep_lease, model_card
from benchmarks.queue.servers import private_redis
from benchmarks.results import write
from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.core.config import BrokerConfig
from ktqueue.core.request import GenerationRequest, JobClass, SamplingParams

PROMPT = "Once upon a time there was a queue. " * 11  # about 400 bytes
AT_ONCE = 16  # submits under way while a queue is filled
MARGIN = 1_000  # jobs that the cap allows beyond the depth
SERVER_BYTES = 2 << 30


class Queue:
    """A server of its own with `depth` jobs in its queue, and a worker that takes some."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.job_bytes = 0.0
        self.process_id = 0  # of the server
        self._stack = AsyncExitStack()
        self._request = GenerationRequest(
            model="none", prompt=PROMPT, job_class=JobClass.BATCH, sampling=SamplingParams(max_tokens=16)
        )
        self._broker: Broker
        self._lease: Lease

    async def __aenter__(self) -> "Queue":
        url, self.process_id = self._stack.enter_context(private_redis(max_memory=SERVER_BYTES))
        self._redis = self._stack.enter_context(redis.Redis.from_url(url))
        config = BrokerConfig(url=url, max_queued_batch=self.depth + MARGIN)
        self._broker = await self._stack.enter_async_context(await Broker.open(config))
        self._lease = await Lease.register(self._broker, model_card(1))
        beat = asyncio.create_task(keep_lease(self._lease, config))
        self._stack.callback(beat.cancel)
        before = self._info("memory")["used_memory"]
        numbers = iter(range(self.depth))

        async def submit() -> None:
            for _ in numbers:
                await self._broker.jobs.submit(self._request)

        await asyncio.gather(*(submit() for _ in range(AT_ONCE)))
        self.job_bytes = (self._info("memory")["used_memory"] - before) / self.depth
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def wait_for_rewrite(self) -> None:
        """Wait until the server does not rewrite its file, which takes it time and memory."""
        while self._info("persistence")["aof_rewrite_in_progress"]:  # noqa: ASYNC110
            await asyncio.sleep(0.2)

    async def turn(self) -> tuple[float, float]:
        """Milliseconds of one submit and one claim."""
        began = time.perf_counter()
        await self._broker.jobs.submit(self._request)
        submitted = time.perf_counter()
        claims = await self._lease.claim(1)
        claimed = time.perf_counter()
        await self._lease.commit([(claim.job_id, LAST) for claim in claims])
        return 1e3 * (submitted - began), 1e3 * (claimed - submitted)

    def _info(self, section: str) -> dict[str, Any]:
        facts: dict[str, Any] = self._redis.info(section)
        return facts


async def measure(depths: list[int], rounds: int, turns: int) -> dict[str, Any]:
    """All rounds; in each the queues take turns."""
    figures: list[dict[str, Any]] = []
    async with AsyncExitStack() as stack:
        queues = [await stack.enter_async_context(Queue(depth)) for depth in depths]
        for number in range(rounds):
            for queue in queues:
                await queue.wait_for_rewrite()
            bystanders = Bystanders([queue.process_id for queue in queues])
            times = [[await queue.turn() for queue in queues] for _ in range(turns)]
            disturbance = bystanders.end()
            for queue, pairs in zip(queues, zip(*times, strict=True), strict=True):
                submits, claims = zip(*pairs, strict=True)
                figure = {
                    "round": number, "depth": queue.depth, "job_bytes": queue.job_bytes,
                    **percentiles(submits, 50, 99, prefix="submit_"), **percentiles(claims, 50, 99, prefix="claim_"),
                    **disturbance,
                }  # fmt: skip
                sys.stderr.write(json.dumps(figure) + "\n")
                figures.append(figure)
    return {"what": "submit and claim at two depths of a queue", "prompt_bytes": len(PROMPT), "turns": turns,
            "figures": figures}  # fmt: skip


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--depths", type=integers, default="1000,100000", help="jobs that wait")
    parser.add_argument("--rounds", type=int, default=5, help="how often each point is taken")
    parser.add_argument("--turns", type=int, default=2_000, help="submits and claims of a point")
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments.depths, arguments.rounds, arguments.turns))
    write(arguments.results / "depth.json", result)


if __name__ == "__main__":
    main()
