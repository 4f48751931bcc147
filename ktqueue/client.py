"""The Python API over Redis: submit jobs, stream their tokens, fetch results. One async and one blocking client.

It needs only Redis: no gateway and no torch. Every call raises Unavailable if Redis does not answer.
"""

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from dataclasses import fields, replace
from typing import Any, Generic, Self, TypeVar

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
        events = [event async for event in broker.journal.follow(job_id)]  # it waits while Redis is away
        record = await broker.jobs.get(job_id)
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

    async def __aexit__(self, *_: object) -> None:
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
            try:
                self._wait(lambda: self._end(), closing=True)
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()

    def submit(self, request: GenerationRequest | None = None, **settings: Any) -> JobRecord:
        """See Client.submit."""
        return self._wait(lambda: self._client.submit(request, **settings))

    def stream(self, job_id: str, after: int = 0) -> Generator[TokenEvent, None, None]:
        """See Client.stream. Close the generator to stop before the end."""
        streams = [self._client.stream(job_id, after)]
        try:
            while True:
                event = self._wait(lambda: _next(streams))
                if event is None:
                    return
                yield event
        finally:
            if not self._closed:
                self._wait(lambda: _close(streams))

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

    def _wait(self, work: Callable[[], Coroutine[Any, Any, Result]], *, closing: bool = False) -> Result:
        """Run `work` in the event loop and return its result. After a Ctrl-C, the work ends before this call does."""
        call = _Call(work, self._calls)
        try:
            with self._gate:
                refused = self._closed and not closing
                if not refused:
                    self._loop.call_soon_threadsafe(call.begin)
            if not refused:
                call.wait()
        except BaseException:
            with self._gate:
                runs = closing or not self._closed  # else `close` has ended it
                if runs:
                    self._loop.call_soon_threadsafe(call.stop)
            if runs:
                call.wait()
            raise
        if refused:
            raise Unavailable("the client is closed")
        return call.result()

    async def _end(self) -> None:
        calls = [call for call in self._calls if call is not asyncio.current_task()]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        await self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _next(streams: list[AsyncGenerator[TokenEvent, None]]) -> TokenEvent | None:
    return await anext(streams[0], None)


async def _close(streams: list[AsyncGenerator[TokenEvent, None]]) -> None:
    await streams.pop().aclose()  # so that the event loop's thread drops it, like the tasks of `_Call`


class _Call(Generic[Result]):
    """A coroutine that runs in an event loop while another thread waits for its end.

    Ctrl-C may interrupt that thread at any moment. So it makes no coroutine and drops no task, because Python ignores
    an interrupt in a callback of a weak reference. It waits for a plain lock, because an interrupt can leave the locks
    of a threading.Event wrong.
    """

    def __init__(self, work: Callable[[], Coroutine[Any, Any, Result]], calls: set[asyncio.Task[Any]]) -> None:
        self._work = work
        self._calls = calls  # of the client, which has this call's task while that runs
        self._task: asyncio.Task[Result] | None = None
        self._results: list[Result] = []  # one, unless the work failed
        self._error: BaseException | None = None
        self._ended = False
        self._until_ended = threading.Lock()
        self._until_ended.acquire()

    def begin(self) -> None:
        """Start the work. The event loop's thread calls this."""
        self._task = asyncio.get_running_loop().create_task(self._work())
        self._calls.add(self._task)
        self._task.add_done_callback(self._finish)

    def stop(self) -> None:
        """Cancel the work. Without `begin` it ends at once. The event loop's thread calls this."""
        if self._task is not None:
            self._task.cancel()
        elif not self._ended:
            self._end()

    def wait(self) -> None:
        """Wait until the work has ended. After an interrupt it may be called again."""
        if not self._ended:
            self._until_ended.acquire()

    def result(self) -> Result:
        """Return what the work returned, or raise what it raised. Raises Unavailable if it was cancelled."""
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _finish(self, task: asyncio.Task[Result]) -> None:
        self._calls.discard(task)
        self._task = None
        if task.cancelled():
            self._error = Unavailable("the client was closed during the call")
        elif (error := task.exception()) is not None:
            self._error = error
        else:
            self._results.append(task.result())
        self._end()

    def _end(self) -> None:
        self._ended = True
        self._until_ended.release()
