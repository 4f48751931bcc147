"""taskiq with taskiq-redis's stream broker, and no result kept, which is its fastest.

At its best: an idle timeout of the lease's length. Nothing renews it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from taskiq.api import run_receiver_task
from taskiq_redis import RedisStreamBroker

from benchmarks.queue.adapters.roles import Settings, Submit, main
from benchmarks.queue.adapters.starts import StartWriter


def _broker(settings: Settings, starts: StartWriter | None) -> tuple[Any, Any, Any]:
    options: dict[str, Any] = {}
    if settings.lease is not None:
        seconds = settings.lease
        options = {"idle_timeout": round(1e3 * seconds), "unacknowledged_lock_timeout": seconds}
    broker: Any = RedisStreamBroker(settings.url, consumer_id="0", **options)

    async def go(number: int) -> None:
        assert starts is not None
        starts.record(number)

    async def held(number: int) -> None:
        assert starts is not None
        starts.record(number)
        await asyncio.sleep(3_600)

    return broker, broker.task(task_name="go")(go), broker.task(task_name="held")(held)


@asynccontextmanager
async def open_client(settings: Settings) -> AsyncIterator[Submit]:
    """Submit by a task's `kiq`."""
    broker, go, held = _broker(settings, None)
    await broker.startup()

    async def submit(number: int, *, hold: bool) -> None:
        await (held if hold else go).kiq(number)

    yield submit
    await broker.shutdown()


async def work(settings: Settings, starts: StartWriter, ready: Callable[[], None]) -> None:
    """Run jobs until the process ends."""
    broker, _, _ = _broker(settings, starts)
    await broker.startup()
    ready()
    await run_receiver_task(broker, max_async_tasks=settings.slots)


if __name__ == "__main__":
    main(open_client, work, fast_worker=True)
