"""Follows the jobs of one HTTP response: takes their events, times them, and cancels what nobody waits for."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack

from starlette.requests import Request

from ktqueue.broker.jobs import JobRecord
from ktqueue.core.errors import JournalRegressed, KtqueueError
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.gateway.endpoints import endpoint_of
from ktqueue.gateway.feed import Batch
from ktqueue.gateway.gateway import Gateway
from ktqueue.gateway.metrics import Metrics
from ktqueue.openai.client_names import Names, rename
from ktqueue.openai.errors import failure


class JobFollower:
    """The jobs of one response, from their submission to their last events.

    `keep`: jobs that are still running when it is closed go on. `counted`: the request is counted in the metrics; a
    resumed stream is not, since its request was. `names`: the client's names of fields, for errors; None: those of the
    endpoint that the jobs came from.
    """

    def __init__(
        self,
        gateway: Gateway,
        request: Request,
        records: Sequence[JobRecord],
        *,
        keep: bool,
        counted: bool = True,
        names: Names | None = None,
    ) -> None:
        self.job_ids = [record.id for record in records]
        self.heartbeat_seconds = gateway.config.gateway.heartbeat_seconds
        self._gateway = gateway
        self._keep = keep
        self._records = records
        self._names = names
        self._stopwatch = Stopwatch(gateway.metrics if counted else None, records[0].model)
        self._running = set(range(len(records)))
        self._resources = ExitStack()
        self._feed = self._resources.enter_context(gateway.follow(request, self.job_ids))

    @property
    def running(self) -> bool:
        """Whether a job has not ended yet."""
        return bool(self._running)

    async def take(self, timeout_seconds: float | None = None) -> Batch:
        """The next events, or nothing if none arrived in time; by default within the heartbeat's time.

        Raises JournalRegressed if a journal ends before its job, and what `Feed.take` raises.
        """
        try:
            batch = await self._feed.take(self.heartbeat_seconds if timeout_seconds is None else timeout_seconds)
            if not batch and self._feed.ended:
                raise JournalRegressed("a job's journal stopped before its last event")
        except KtqueueError as error:
            self._stopwatch.failed(error)
            raise
        self._stopwatch.saw(batch)
        for place, event in batch:
            if event.state is not None and event.state.terminal:
                self._running.discard(place)
                if event.state is JobState.DONE:
                    self._stopwatch.done(event)
        return batch

    async def first(self, *, raises: bool = True) -> Batch:
        """The first events, or nothing if none arrived within `gateway.first_event_wait`.

        Closes the follower if it raises: what `take` does, and, unless `raises` is false, the error of a job.
        """
        try:
            wait = self._gateway.config.gateway.first_event_wait
            batch = await self.take(min(wait, self.heartbeat_seconds))
            if raises:
                self.raise_failure(batch)
        except BaseException:
            self.close()
            raise
        return batch

    async def batches(self, first: Batch) -> AsyncGenerator[Batch, None]:
        """The events, beginning with `first`, until all jobs are done. Empty if none arrived in the heartbeat's time.

        Raises what `take` does, and the error of a job, after its last events.
        """
        batch = first
        yield batch
        while True:
            self.raise_failure(batch)
            if not self.running:
                return
            batch = await self.take()
            yield batch

    async def all(self) -> Batch:
        """All events, once all jobs are done. Closes the follower. Raises what `batches` does."""
        try:
            return [entry async for batch in self.batches([]) for entry in batch]
        finally:
            self.close()

    def begin_stream(self) -> Callable[[], None]:
        """Count an open stream. Call what it returns at the end of the stream: that closes the follower too."""
        streams = self._gateway.metrics.streams
        streams.inc()

        def end() -> None:
            streams.dec()
            self.close()

        return end

    def raise_failure(self, batch: Batch) -> None:
        """Raise the error of the first job in the batch that ended in another state than done."""
        for place, event in batch:
            error = failure(event)
            if error is not None:
                rename(error, self._names_of(self._records[place]))
                self._stopwatch.failed(error)
                raise error

    def _names_of(self, record: JobRecord) -> Names:
        if self._names is not None:
            return self._names
        request = record.readable_request()
        return endpoint_of(request).names_in(request)

    def close(self) -> None:
        """Stop following. Jobs that are still running are cancelled unless they are kept."""
        self._resources.close()
        if not self._keep:
            self._gateway.abandon(self.job_ids[place] for place in self._running)


class Stopwatch:
    """Times one request for the metrics: to the first token, between tokens, to the end.

    It starts when it is made, right after the submission. Without metrics it does nothing.
    """

    def __init__(self, metrics: Metrics | None, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._begun = time.monotonic()
        self._last_token: float | None = None

    def saw(self, batch: Batch) -> None:
        """Count events that arrived just now."""
        if self._metrics is None:
            return
        now = time.monotonic()
        for _, event in batch:
            if event.finish_reason is not None:
                self._metrics.success.labels(self._model, event.finish_reason.value).inc()
        if any(event.token_ids for _, event in batch):
            if self._last_token is None:
                self._metrics.first_token.labels(self._model).observe(now - self._begun)
            else:
                self._metrics.inter_token.labels(self._model).observe(now - self._last_token)
            self._last_token = now

    def done(self, event: TokenEvent) -> None:
        """Count a job that is done; `event` is its last."""
        if self._metrics is None:
            return
        self._metrics.end_to_end.labels(self._model).observe(time.monotonic() - self._begun)
        if event.usage is not None:
            self._metrics.prompt_tokens.labels(self._model).observe(event.usage.prompt_tokens)
            self._metrics.generation_tokens.labels(self._model).observe(event.usage.completion_tokens)

    def failed(self, error: KtqueueError) -> None:
        """Count a request that ends in an error."""
        if self._metrics is None:
            return
        self._metrics.failed(self._model, error.info().code)
