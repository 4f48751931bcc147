"""SAQ. At its best: a heartbeat of the lease's length that the job renews, a sweep every second, several tries."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from saq import Job, Queue, Worker

from benchmarks.queue.adapters.roles import Settings, Submit, main
from benchmarks.queue.adapters.starts import StartWriter


@asynccontextmanager
async def open_client(settings: Settings) -> AsyncIterator[Submit]:
    """Submit by `Queue.enqueue`."""
    queue = Queue.from_url(settings.url)
    await queue.connect()
    options: dict[str, Any] = {}
    if settings.lease is not None:
        options = {"timeout": 0, "heartbeat": round(settings.lease), "retries": 10}

    async def submit(number: int, *, hold: bool) -> None:
        await queue.enqueue(Job(function="held" if hold else "go", kwargs={"number": number}, **options))

    yield submit
    await queue.disconnect()


async def work(settings: Settings, starts: StartWriter, ready: Callable[[], None]) -> None:
    """Run jobs until the process ends."""

    async def go(_: Any, *, number: int) -> None:
        starts.record(number)

    async def held(context: Any, *, number: int) -> None:
        starts.record(number)
        while True:
            await asyncio.sleep(0.25)
            if settings.lease is not None:
                await context["job"].update()

    queue = Queue.from_url(settings.url)
    await queue.connect()
    timers: Any = {} if settings.lease is None else {"sweep": 1}
    worker: Any = Worker(queue, functions=[("go", go), ("held", held)], concurrency=settings.slots, timers=timers)
    ready()
    await worker.start()


if __name__ == "__main__":
    main(open_client, work)
