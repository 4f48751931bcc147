"""Measures a deep queue: memory of a waiting job, and the time of submit and claim behind few and many jobs.

Two servers have a queue each and are measured in turns. In each turn one job is submitted and one is claimed and ended,
so the depth stays the same. Times are those of a client around one call. `python -m benchmarks.queue.depth`.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import redis

from benchmarks import machine
from benchmarks.queue.adapters.ours import LAST, card
from benchmarks.queue.system import percentile
from benchmarks.results import RESULTS, write
from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.broker.redis.private_server import PrivateServer
from ktqueue.core.config import BrokerConfig
from ktqueue.core.request import GenerationRequest, JobClass, SamplingParams
from ktqueue.workers.generation.heartbeat import BEATS_PER_LEASE

PROMPT = "Once upon a time there was a queue. " * 11  # about 400 bytes
AT_ONCE = 16  # submits under way while a queue is filled
MARGIN = 1_000  # jobs that the cap allows beyond the depth
SERVER_BYTES = 2 << 30


class Queue:
    """A server of its own with `depth` jobs in its queue, and a worker that takes some."""

    def __init__(self, depth: int, folder: Path) -> None:
        self.depth = depth
        self.job_bytes = 0.0
        self._server = PrivateServer()
        self._url = self._server.start(folder / f"redis-{depth}", max_memory=SERVER_BYTES)
        self._request = GenerationRequest(
            model="none", prompt=PROMPT, job_class=JobClass.BATCH, sampling=SamplingParams(max_tokens=16)
        )
        self._broker: Broker
        self._lease: Lease

    @property
    def process_id(self) -> int:
        """Of the server."""
        assert self._server.pid is not None
        return self._server.pid

    async def __aenter__(self) -> "Queue":
        self._broker = await Broker.open(BrokerConfig(url=self._url, max_queued_batch=self.depth + MARGIN))
        self._lease = await Lease.register(self._broker, card(1))
        self._beat = asyncio.create_task(self._keep())
        before = self._info("memory")["used_memory"]
        numbers = iter(range(self.depth))

        async def some() -> None:
            for _ in numbers:
                await self._broker.jobs.submit(self._request)

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))
        self.job_bytes = (self._info("memory")["used_memory"] - before) / self.depth
        return self

    async def __aexit__(self, *_: object) -> None:
        self._beat.cancel()
        await self._broker.close()
        self._server.stop()

    async def settle(self) -> None:
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
        with redis.Redis.from_url(self._url) as client:
            facts: dict[str, Any] = client.info(section)
            return facts

    async def _keep(self) -> None:
        while True:
            await self._lease.beat({})
            await asyncio.sleep(self._broker.config.lease_seconds / BEATS_PER_LEASE)


async def _measure(depths: list[int], rounds: int, turns: int) -> dict[str, Any]:
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        async with AsyncExitStack() as stack:
            queues = [await stack.enter_async_context(Queue(depth, Path(folder))) for depth in depths]
            servers = [queue.process_id for queue in queues]
            for number in range(rounds):
                for queue in queues:
                    await queue.settle()
                bystanders = machine.Bystanders(servers)
                bystanders.begin()
                taken: dict[int, list[tuple[float, float]]] = {queue.depth: [] for queue in queues}
                for _ in range(turns):
                    for queue in queues:
                        taken[queue.depth].append(await queue.turn())
                seen = bystanders.end()
                for queue in queues:
                    submits, claims = (list(one) for one in zip(*taken[queue.depth], strict=True))
                    figure = {
                        "round": number, "depth": queue.depth, "job_bytes": queue.job_bytes,
                        "submit_p50_ms": percentile(submits, 0.5), "submit_p99_ms": percentile(submits, 0.99),
                        "claim_p50_ms": percentile(claims, 0.5), "claim_p99_ms": percentile(claims, 0.99), **seen,
                    }  # fmt: skip
                    sys.stderr.write(json.dumps(figure) + "\n")
                    figures.append(figure)
    return {"what": "submit and claim at two depths of a queue", "prompt_bytes": len(PROMPT), "turns": turns,
            "figures": figures}  # fmt: skip


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--depths", default="1000,100000", help="jobs that wait")
    parser.add_argument("--rounds", type=int, default=5, help="how often each point is taken")
    parser.add_argument("--turns", type=int, default=2_000, help="submits and claims of a point")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    depths = [int(one) for one in arguments.depths.split(",")]
    write(arguments.results / "depth.json", asyncio.run(_measure(depths, arguments.rounds, arguments.turns)))


if __name__ == "__main__":
    main()
