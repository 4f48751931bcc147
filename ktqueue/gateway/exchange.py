"""One OpenAI-style HTTP request from its GenerationRequests to its answer, streamed or whole.

Submits the jobs, follows their journals, gives the first moments' errors an HTTP status of their own,
and cancels the jobs when the client leaves. What the answer looks like is the Reply's business.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack

from starlette.requests import Request
from starlette.responses import Response

from ktqueue.broker.conversations import Turn
from ktqueue.broker.jobs import JobRecord
from ktqueue.core.codec import dumps
from ktqueue.core.errors import InvalidRequest, JournalRegressed, KtqueueError
from ktqueue.core.events import JobState
from ktqueue.core.request import GenerationRequest
from ktqueue.gateway.feed import Batch, Feed
from ktqueue.gateway.gateway import Gateway
from ktqueue.gateway.http.auth import Tenant, tenant_of
from ktqueue.gateway.http.headers import Place, conversation_id, idempotency_key, rate_headers
from ktqueue.gateway.http.sse import DONE, PING, EventStream, frame, watch_disconnect
from ktqueue.gateway.stopwatch import Stopwatch
from ktqueue.openai.choices import Choices
from ktqueue.openai.endpoint import Call
from ktqueue.openai.endpoints import endpoint_of
from ktqueue.openai.errors import failure


async def answer(request: Request, call: Call) -> Response:
    """The response to one request. Raises KtqueueError where the answer is an error with its own status."""
    gateway: Gateway = request.app.state.gateway
    generations = call.generations
    key, conversation = idempotency_key(request.headers), conversation_id(request.headers)
    if conversation is not None and len(generations) > 1:
        raise InvalidRequest(
            "a conversation takes one prompt at a time", param="X-Conversation-Id", limit=1, value=len(generations)
        )
    records = await submit(gateway, generations, key, tenant_of(request))
    if conversation is not None:
        await begin_turn(gateway, tenant_of(request), conversation, Turn(records[0].id, call.include_usage), key)
    exchange = Exchange(
        gateway,
        request,
        records,
        keep=key is not None or conversation is not None,
        after=None if conversation is None else (0, 0.0),
    )
    if call.stream:
        return await exchange.stream(include_usage=call.include_usage)
    return await exchange.whole()


async def submit(
    gateway: Gateway, generations: Sequence[GenerationRequest], key: str | None, tenant: Tenant
) -> list[JobRecord]:
    """Submit all jobs of a request, or none: when one is refused, those before it are cancelled.

    With an idempotency key they stay: they may be those of an earlier request, and the next one will look for them.
    """
    records: list[JobRecord] = []
    try:
        for place, generation in enumerate(generations):
            one = key if key is None or len(generations) == 1 else f"{key}#{place}"
            records.append(await gateway.submit(tenant, generation, idempotency_key=one))
    except BaseException as error:
        if key is None:
            gateway.abandon(record.id for record in records)
        if isinstance(error, KtqueueError):
            gateway.metrics.failed(generations[0].model, error.info().code)
        raise
    return records


async def begin_turn(gateway: Gateway, tenant: Tenant, conversation: str, turn: Turn, key: str | None) -> None:
    """From now on the conversation's stream is this job's; the one before it, which nobody waits for, is cancelled."""
    try:
        former = await gateway.broker.conversations.begin(tenant.name, conversation, turn)
    except BaseException:
        if key is None:
            gateway.abandon([turn.job_id])
        raise
    if former is not None and former.job_id != turn.job_id:
        gateway.abandon([former.job_id])


class Exchange:
    """The jobs of one HTTP request and what their journals have told so far.

    `keep`: an Idempotency-Key or a conversation announces that the client may come back for the same job, so its jobs
    are not cancelled when it leaves. `after`: frames of the stream are numbered, and those up to there left out; then
    there is one job. `resumed`: the request began before, and was counted then.
    """

    def __init__(
        self,
        gateway: Gateway,
        request: Request,
        records: Sequence[JobRecord],
        *,
        keep: bool,
        after: Place | None = None,
        resumed: bool = False,
    ) -> None:
        self._gateway = gateway
        request_of_first = records[0].readable_request()
        self._reply = endpoint_of(request_of_first).reply_to(
            request_of_first, records[0].id, int(records[0].created_at)
        )
        self._keep = keep
        self._after = after
        self._resumed = resumed
        self._job_ids = [record.id for record in records]
        self._rates = rate_headers(records[-1].standing)
        self._choices = Choices(len(records), request_of_first.sampling.n)
        self._stopwatch = Stopwatch(None if resumed else gateway.metrics, records[0].model)
        self._open = set(range(len(records)))
        self._resources = ExitStack()
        self._feed: Feed = self._resources.enter_context(gateway.feed(self._job_ids))
        watcher = asyncio.create_task(watch_disconnect(request.receive, self._feed.interrupt))
        self._resources.callback(watcher.cancel)

    @property
    def _headers(self) -> dict[str, str]:
        return {"x-job-id": ",".join(self._job_ids), **self._rates}

    async def whole(self) -> Response:
        """The body once all jobs are done."""
        try:
            events: Batch = []
            while self._open:
                batch = await self._take(self._gateway.config.gateway.heartbeat_seconds)
                self._raise_failure(batch)
                events += batch
            body = self._reply.whole(self._choices.whole(events), self._choices.usage())
            return Response(dumps(body), media_type="application/json", headers=self._headers)
        finally:
            self._close()

    async def stream(self, *, include_usage: bool) -> Response:
        """The stream; an error among the first events is raised instead, for a status of its own."""
        settings = self._gateway.config.gateway
        try:
            first = await self._take(min(settings.first_event_wait, settings.heartbeat_seconds))
            if not self._resumed:  # what a job said before it failed is in its stream
                self._raise_failure(first)
        except BaseException:
            self._close()
            raise
        self._gateway.metrics.streams.inc()
        return EventStream(
            self._frames(first, include_usage),
            finished=self._end_stream,
            headers=self._headers,
        )

    async def _frames(self, batch: Batch, include_usage: bool) -> AsyncGenerator[bytes, None]:
        while True:
            frames = b"".join(self._chunks(batch) if self._after is None else self._numbered(batch, self._after))
            if frames:
                yield frames
            elif not batch:
                yield PING
            self._raise_failure(batch)
            if not self._open:
                break
            batch = await self._take(self._gateway.config.gateway.heartbeat_seconds)
        if include_usage:
            yield frame(self._reply.usage_chunk(self._choices.usage()))
        yield DONE

    def _chunks(self, batch: Batch) -> Iterator[bytes]:
        for delta in self._choices.absorb(batch):
            for chunk in self._reply.chunks(delta):
                yield frame(chunk)

    def _numbered(self, batch: Batch, after: Place) -> Iterator[bytes]:
        """Frames with ids, event by event: the same for every reader, however the events came together.

        The id of an event's last frame is its seq, that of one before it `SEQ.PART`.
        """
        for one in batch:
            chunks = [chunk for delta in self._choices.absorb([one]) for chunk in self._reply.chunks(delta)]
            seq = one[1].seq
            for part, chunk in enumerate(chunks, 1):
                last = part == len(chunks)
                if (seq, math.inf if last else part) > after:
                    yield frame(chunk, event_id=seq if last else f"{seq}.{part}")

    async def _take(self, timeout_seconds: float) -> Batch:
        try:
            batch = await self._feed.take(timeout_seconds)
            if not batch and self._feed.ended:
                raise JournalRegressed("a job's journal stopped before its last event")
        except KtqueueError as error:
            self._stopwatch.failed(error)
            raise
        self._stopwatch.saw(batch)
        for place, event in batch:
            if event.state is not None and event.state.terminal:
                self._open.discard(place)
                if event.state is JobState.DONE:
                    self._stopwatch.done(event)
        return batch

    def _raise_failure(self, batch: Batch) -> None:
        for _, event in batch:
            error = failure(event)
            if error is not None:
                self._stopwatch.failed(error)
                raise error

    def _end_stream(self) -> None:
        self._gateway.metrics.streams.dec()
        self._close()

    def _close(self) -> None:
        self._resources.close()
        if not self._keep:
            self._gateway.abandon(self._job_ids[place] for place in self._open)
