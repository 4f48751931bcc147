"""What an installation is doing at one moment: workers, queues, the server's memory. Knows nothing of who looks."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ktqueue.broker.broker import Broker
from ktqueue.broker.jobs import BoundJobs, QueueDepth
from ktqueue.broker.models import WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One look. `taken_at` in Unix seconds by this machine's clock; memory in bytes, `memory_limit` 0 for none."""

    taken_at: float
    workers: list[WorkerInfo]
    depths: list[QueueDepth]
    bound: Sequence[BoundJobs] = ()
    memory_used: int
    memory_limit: int

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all workers, over their last seconds."""
        return sum(worker.stats.get("generation_tokens_per_second", 0.0) for worker in self.workers)


async def take_snapshot(broker: Broker) -> Snapshot:
    """Look now. Raises Unavailable when Redis is away."""
    workers, depths, bound, memory = await asyncio.gather(
        broker.models.workers(), broker.jobs.depth(), broker.jobs.bound(), broker.scripts.call("server_memory")
    )
    return Snapshot(
        taken_at=time.time(),
        workers=workers,
        depths=depths,
        bound=bound,
        memory_used=memory[0],
        memory_limit=memory[1],
    )
