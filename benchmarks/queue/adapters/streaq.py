"""streaq. At its best: an idle timeout of the lease's length, which its worker renews by itself."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from streaq import Worker

from benchmarks.queue.adapters.roles import Settings, Submit, main, make_jobs
from benchmarks.queue.adapters.starts import StartWriter


def _worker(settings: Settings, starts: StartWriter | None) -> tuple[Any, dict[str, Any]]:
    options: dict[str, Any] = {} if settings.lease is None else {"idle_timeout": settings.lease}
    worker: Any = Worker(redis_url=settings.url, concurrency=settings.slots, handle_signals=False, **options)
    return worker, {name: worker.task(name=name)(job) for name, job in make_jobs(starts).items()}


@asynccontextmanager
async def open_client(settings: Settings) -> AsyncIterator[Submit]:
    """Submit by a registered task's `enqueue`."""
    worker, tasks = _worker(settings, None)
    async with worker:
        yield lambda number, *, hold: tasks["held" if hold else "go"].enqueue(number)


async def work(settings: Settings, starts: StartWriter, ready: Callable[[], None]) -> None:
    """Run jobs until the process ends."""
    worker, _ = _worker(settings, starts)
    ready()
    await worker.run_async()


if __name__ == "__main__":
    main(open_client, work)
