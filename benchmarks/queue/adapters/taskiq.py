"""taskiq with taskiq-redis's stream broker, and no result kept, which is its fastest.

At its best: an idle timeout of the lease's length. Nothing renews it.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from taskiq.api import run_receiver_task
from taskiq_redis import RedisStreamBroker

from benchmarks.queue.adapters.roles import Settings, Submit, main, make_jobs
from benchmarks.queue.adapters.starts import StartWriter


def _broker(settings: Settings, starts: StartWriter | None) -> tuple[Any, dict[str, Any]]:
    options: dict[str, Any] = {}
    if settings.lease is not None:
        options = {"idle_timeout": round(1e3 * settings.lease), "unacknowledged_lock_timeout": settings.lease}
    broker: Any = RedisStreamBroker(settings.url, consumer_id="0", **options)
    return broker, {name: broker.task(task_name=name)(job) for name, job in make_jobs(starts).items()}


@asynccontextmanager
async def open_client(settings: Settings) -> AsyncIterator[Submit]:
    """Submit by a task's `kiq`."""
    broker, tasks = _broker(settings, None)
    await broker.startup()
    yield lambda number, *, hold: tasks["held" if hold else "go"].kiq(number)
    await broker.shutdown()


async def work(settings: Settings, starts: StartWriter, ready: Callable[[], None]) -> None:
    """Run jobs until the process ends."""
    broker, _ = _broker(settings, starts)
    await broker.startup()
    ready()
    await run_receiver_task(broker, max_async_tasks=settings.slots)


if __name__ == "__main__":
    main(open_client, work)
