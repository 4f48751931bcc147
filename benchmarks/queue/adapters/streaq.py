"""streaq. At its best: an idle timeout of the lease's length, which its worker renews by itself."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from streaq import Worker

from benchmarks.queue.adapters.roles import Settings, Submit, main
from benchmarks.queue.adapters.starts import StartWriter


def _worker(settings: Settings, starts: StartWriter | None) -> tuple[Any, Any, Any]:
    options: dict[str, Any] = {} if settings.lease is None else {"idle_timeout": settings.lease}
    worker: Any = Worker(redis_url=settings.url, concurrency=settings.slots, handle_signals=False, **options)

    async def go(number: int) -> None:
        assert starts is not None
        starts.record(number)

    async def held(number: int) -> None:
        assert starts is not None
        starts.record(number)
        await asyncio.sleep(3_600)

    return worker, worker.task(name="go")(go), worker.task(name="held")(held)


@asynccontextmanager
async def open_client(settings: Settings) -> AsyncIterator[Submit]:
    """Submit by a registered task's `enqueue`."""
    worker, go, held = _worker(settings, None)
    async with worker:

        async def submit(number: int, *, hold: bool) -> None:
            await (held if hold else go).enqueue(number)

        yield submit


async def work(settings: Settings, starts: StartWriter, ready: Callable[[], None]) -> None:
    """Run jobs until the process ends."""
    worker, _, _ = _worker(settings, starts)
    ready()
    await worker.run_async()


if __name__ == "__main__":
    main(open_client, work, fast_worker=True)
