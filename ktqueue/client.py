"""The Python API over Redis: submit jobs, stream their tokens, fetch results. One async and one blocking client.

It needs only Redis: no gateway and no torch. Every call raises Unavailable if Redis does not answer.
"""

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from dataclasses import fields, replace
from types import TracebackType
from typing import Any, Self, TypeVar

from ktqueue.broker.broker import Broker
from ktqueue.broker.jobs import JobRecord
from ktqueue.core.completion import Completion, completion_of
from ktqueue.core.config import BrokerConfig, load_config
from ktqueue.core.errors import Unavailable
from ktqueue.core.events import TokenEvent
from ktqueue.core.request import GenerationRequest, SamplingParams

__all__ = ["Client", "Completion", "SyncClient"]

Result = TypeVar("Result")

_SAMPLING = frozenset(field.name for field in fields(SamplingParams))
_SUBMIT = frozenset({"job_id", "idempotency_key", "tenant"})


def make_request(**settings: Any) -> GenerationRequest:
    """Make a request from keywords of GenerationRequest and SamplingParams together. Lists become tuples.

    Raises InvalidRequest; TypeError for an unknown keyword.
    """
    plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    sampling = {key: plain.pop(key) for key in _SAMPLING & plain.keys()}
    if sampling:
        base: SamplingParams = plain.get("sampling") or SamplingParams()
        plain["sampling"] = replace(base, **sampling)
    return GenerationRequest(**plain)


class Client:
    """`async with Client(url) as client:`, or `client = await Client.open(url)` and `await client.close()`.

    Without a URL and a config, it uses the Redis of KTQUEUE_BROKER_URL, else that of the `ktqueue up` which runs on the
    state folder: `.ktqueue` in the current folder, unless KTQUEUE_BROKER_STATE_DIR names another.
    """

    def __init__(self, url: str | None = None, *, config: BrokerConfig | None = None) -> None:
        config = config or load_config(environment=os.environ).broker
        self._config = replace(config, url=url) if url is not None else config
        self._broker: Broker | None = None

    @classmethod
    async def open(cls, url: str | None = None, *, config: BrokerConfig | None = None) -> Self:
        """Make a connected client. Raises Unavailable."""
        return await cls(url, config=config).__aenter__()

    async def close(self) -> None:
        """Close the connections. Jobs continue."""
        if self._broker is not None:
            await self._broker.close()
            self._broker = None

    async def submit(self, request: GenerationRequest | None = None, **settings: Any) -> JobRecord:
        """Queue a job: a request, or its fields and sampling parameters as keywords.

        `job_id`, `idempotency_key` and `tenant` are further keywords. Without a `model`, the only served model is used.
        Raises InvalidRequest and what `Jobs.submit` raises.
        """
        options = {key: settings.pop(key) for key in _SUBMIT & settings.keys()}
        if request is None:
            if settings.get("model") is None:
                settings["model"] = await self._open_broker().models.only_name()
            request = make_request(**settings)
        elif settings:
            raise TypeError(f"give a request or keywords, not both: {', '.join(sorted(settings))}")
        return await self._open_broker().jobs.submit(request, **options)

    def stream(self, job_id: str, after: int = 0) -> AsyncGenerator[TokenEvent, None]:
        """Yield a job's events after seq `after` until its end. Raises JobNotFound or JournalRegressed."""
        return self._open_broker().journal.follow(job_id, after)

    async def result(self, job_id: str) -> Completion:
        """Wait for a job's end and return its completion. Raises JobNotFound, or the job's error."""
        broker = self._open_broker()
        record = await broker.jobs.get(job_id)
        events = [event async for event in broker.journal.follow(job_id)]
        return completion_of(job_id, record.readable_request().sampling.n, events)

    async def generate(self, request: GenerationRequest | None = None, **settings: Any) -> Completion:
        """Submit a job and wait for its completion. See `submit` and `result` for arguments and errors."""
        record = await self.submit(request, **settings)
        return await self.result(record.id)

    async def status(self, job_id: str) -> JobRecord:
        """A job's record. Raises JobNotFound."""
        return await self._open_broker().jobs.get(job_id)

    async def cancel(self, job_id: str) -> JobRecord:
        """Cancel a job. A job that has ended stays as it is. Raises JobNotFound."""
        return await self._open_broker().jobs.cancel(job_id)

    async def retry(self, job_id: str) -> JobRecord:
        """Submit a failed job again as a new job. Raises JobNotFound, JobConflict, and what `submit` raises."""
        return await self._open_broker().jobs.retry(job_id)

    def _open_broker(self) -> Broker:
        if self._broker is None:
            raise Unavailable("the client is not open")
        return self._broker

    async def __aenter__(self) -> Self:
        self._broker = await Broker.open(self._config)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class SyncClient:
    """A blocking client: `with SyncClient(url) as client:`. Several threads may share it."""

    def __init__(self, url: str | None = None, *, config: BrokerConfig | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._calls: set[asyncio.Task[Any]] = set()  # used by the event loop's thread only
        self._gate = threading.Lock()  # so that a call is either scheduled before `close` or refused
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="ktqueue-client", daemon=True)
        self._thread.start()
        self._client = Client(url, config=config)
        try:
            self._wait(lambda: self._client.__aenter__())
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, url: str | None = None, *, config: BrokerConfig | None = None) -> Self:
        """Make a connected client. Raises Unavailable."""
        return cls(url, config=config)

    def close(self) -> None:
        """Close the connections. Jobs continue. Running calls of other threads, and later calls, raise Unavailable."""
        with self._gate:
            closed, self._closed = self._closed, True
        if not closed:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def submit(self, request: GenerationRequest | None = None, **settings: Any) -> JobRecord:
        """See Client.submit."""
        return self._wait(lambda: self._client.submit(request, **settings))

    def stream(self, job_id: str, after: int = 0) -> Generator[TokenEvent, None, None]:
        """See Client.stream. Close the generator to stop before the end."""
        events = self._client.stream(job_id, after)
        try:
            while True:
                event = self._wait(lambda: _next(events))
                if event is None:
                    return
                yield event
        finally:
            if not self._closed:
                self._wait(lambda: events.aclose())

    def result(self, job_id: str) -> Completion:
        """See Client.result."""
        return self._wait(lambda: self._client.result(job_id))

    def generate(self, request: GenerationRequest | None = None, **settings: Any) -> Completion:
        """See Client.generate."""
        return self._wait(lambda: self._client.generate(request, **settings))

    def status(self, job_id: str) -> JobRecord:
        """See Client.status."""
        return self._wait(lambda: self._client.status(job_id))

    def cancel(self, job_id: str) -> JobRecord:
        """See Client.cancel."""
        return self._wait(lambda: self._client.cancel(job_id))

    def retry(self, job_id: str) -> JobRecord:
        """See Client.retry."""
        return self._wait(lambda: self._client.retry(job_id))

    def _wait(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Run `work` in the event loop and return its result.

        The loop's thread makes the coroutine, so that no Ctrl-C comes between making it and waiting for it.
        """
        tasks: list[asyncio.Task[Result]] = []
        ended = threading.Event()

        def begin() -> None:
            tasks.append(self._loop.create_task(work()))
            self._calls.add(tasks[0])
            tasks[0].add_done_callback(finish)

        def finish(task: asyncio.Task[Result]) -> None:
            self._calls.discard(task)
            ended.set()

        def stop() -> None:
            if tasks:
                tasks[0].cancel()
            else:  # interrupted before `begin` was scheduled
                ended.set()

        try:
            with self._gate:
                if not self._closed:
                    self._loop.call_soon_threadsafe(begin)
                else:
                    ended.set()
            ended.wait()
        except BaseException:  # Ctrl-C: the work must have ended before the caller continues
            self._loop.call_soon_threadsafe(stop)
            ended.wait()
            raise
        if not tasks:
            raise Unavailable("the client is closed")
        if tasks[0].cancelled():
            raise Unavailable("the client was closed during the call")
        return tasks[0].result()

    async def _end(self) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        await self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


async def _next(events: AsyncGenerator[TokenEvent, None]) -> TokenEvent | None:
    return await anext(events, None)
