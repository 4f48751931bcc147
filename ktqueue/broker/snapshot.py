"""What an installation does at one moment: workers, queues, and the memory of Redis."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ktqueue.broker.batches import BatchLoad
from ktqueue.broker.broker import Broker
from ktqueue.broker.jobs import BoundJobs, QueueDepth
from ktqueue.broker.models import WorkerInfo
from ktqueue.core.model_card import SHORT_DIGEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State at `taken_at` (Unix seconds by this machine's clock). Memory is in bytes; `memory_limit` is 0 for none."""

    taken_at: float
    workers: list[WorkerInfo]
    depths: list[QueueDepth]
    bound: Sequence[BoundJobs] = ()
    batches: BatchLoad = field(default_factory=BatchLoad)
    memory_used: int
    memory_limit: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second that all workers generated in their last seconds."""
        return sum(worker.stats.get("generation_tokens_per_second", 0.0) for worker in self.workers)

    def document(self) -> dict[str, Any]:
        """The snapshot as JSON values, with times in seconds."""
        return {
            "time": self.taken_at,
            "tokens_per_second": self.tokens_per_second,
            "redis": {"memory_used": self.memory_used, "memory_limit": self.memory_limit or None},
            "workers": [
                {
                    "id": worker.worker_id,
                    "model": worker.model,
                    "digest": worker.digest[:SHORT_DIGEST],
                    "host": worker.host,
                    "pid": worker.pid,
                    "started_at": worker.started_at,
                    "lease_left": worker.lease_left,
                    "step_age": worker.step_age,
                    "jobs": worker.running,
                    "max_num_seqs": worker.max_num_seqs,
                    "stats": dict(worker.stats),
                }
                for worker in self.workers
            ],
            "queues": [
                {
                    "model": depth.model,
                    "job_class": job_class,
                    "waiting": waiting,
                    "running": running,
                    "oldest_wait": wait,
                }
                for depth in self.depths
                for job_class, waiting, running, wait in depth.by_class()
            ],
            "bound": [asdict(jobs) for jobs in self.bound],
            "batches": {
                "by_status": dict(self.batches.by_status),
                "unowned": self.batches.unowned,
                "lines_left": self.batches.lines_left,
                "seconds_left": self.batches.seconds_left,
            },
        }


async def take_snapshot(broker: Broker) -> Snapshot:
    """Take a snapshot now. Raises Unavailable if Redis does not answer."""
    workers, depths, bound, batches, memory = await asyncio.gather(
        broker.models.workers(),
        broker.jobs.depth(),
        broker.jobs.bound(),
        broker.batches.load(),
        broker.scripts.call("server_memory"),
    )
    return Snapshot(
        taken_at=time.time(),
        workers=workers,
        depths=depths,
        bound=bound,
        batches=batches,
        memory_used=memory[0],
        memory_limit=memory[1],
    )
