"""The jobs API: submit a job now, read it later, any number of times. A reader that leaves cancels nothing."""

from collections.abc import AsyncGenerator
from contextlib import ExitStack, suppress

from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import Response

from ktqueue.broker.jobs import JobRecord
from ktqueue.core.codec import CodecError
from ktqueue.core.errors import InvalidRequest, JobConflict, JobNotFound
from ktqueue.core.events import JobState
from ktqueue.gateway.answer import run_in_thread_if_large
from ktqueue.gateway.errors import ShuttingDown
from ktqueue.gateway.feed import Feed
from ktqueue.gateway.gateway import Gateway
from ktqueue.gateway.http.auth import tenant_of
from ktqueue.gateway.http.headers import idempotency_key, last_seq, rate_headers
from ktqueue.gateway.http.responses import json_response
from ktqueue.gateway.http.sse import EventStream
from ktqueue.gateway.listing import limit_of
from ktqueue.openai.jobs import parse_job
from ktqueue.openai.records import event_json, record_json, result_json
from ktqueue.openai.stream_format import EVENTS, server_sent_event

MAX_LISTED = 1000  # jobs in one list
RETRY = b"retry: 1000\n\n"  # milliseconds that a browser's EventSource waits before it reconnects


class JobsEndpoint(HTTPEndpoint):
    """/v1/jobs."""

    async def get(self, request: Request) -> Response:
        """List jobs, newest first, filtered by `?state=`, at most `?limit=`. Raises InvalidRequest."""
        gateway: Gateway = request.app.state.gateway
        state = request.query_params.get("state")
        limit = limit_of(request, default=100, most=MAX_LISTED)
        if state is not None and state not in set(JobState):
            known = ", ".join(JobState)
            raise InvalidRequest(f"state must be one of {known}, got {state[:80]!r}", param="state", limit=known)
        records = await gateway.broker.jobs.list(
            state=None if state is None else JobState(state), limit=limit, tenant=tenant_of(request).view
        )
        return json_response({"object": "list", "data": [record_json(record) for record in records]})

    async def post(self, request: Request) -> Response:
        """Submit a job: 202 and its location. Raises KtqueueError."""
        gateway: Gateway = request.app.state.gateway
        generation = await gateway.read_body(request, parse_job)
        if generation.webhook is not None:
            generation.webhook.check_allowed(
                gateway.config.control.webhook_secret, gateway.config.control.webhook_hosts
            )
        record = await gateway.submit(tenant_of(request), generation, idempotency_key=idempotency_key(request.headers))
        return _accepted(record)


class JobEndpoint(HTTPEndpoint):
    """/v1/jobs/{job_id}."""

    async def get(self, request: Request) -> Response:
        """Return a job. Once it has ended, `result` holds the text of its choices. Raises JobNotFound."""
        gateway: Gateway = request.app.state.gateway
        record = await find_job(request)
        body = record_json(record)
        body["result"] = None
        if record.state.terminal:
            # The journal expires before the record, and a newer version may have written either of them.
            with suppress(JobNotFound, CodecError, InvalidRequest):
                events = list(await gateway.broker.journal.replay(record.id))
                return await run_in_thread_if_large(
                    events, lambda: json_response({**body, "result": result_json(record, events)})
                )
        return json_response(body)

    async def delete(self, request: Request) -> Response:
        """Cancel a job, which may be cancelled already. Raises JobNotFound, JobConflict if it ended otherwise."""
        gateway: Gateway = request.app.state.gateway
        record = await gateway.broker.jobs.cancel((await find_job(request)).id)
        if record.state.terminal and record.state is not JobState.CANCELLED:
            raise JobConflict(
                f"the job {record.id} is {record.state} already and cannot be cancelled",
                param="job_id",
                limit="a job that has not ended",
                value=record.state.value,
            )
        return json_response(record_json(record))


async def find_job(request: Request) -> JobRecord:
    """The job that the path names. Raises JobNotFound, also for a job of another tenant."""
    gateway: Gateway = request.app.state.gateway
    return tenant_of(request).check_sees(await gateway.broker.jobs.get(request.path_params["job_id"]))


def _accepted(record: JobRecord) -> Response:
    headers = {"location": f"/v1/jobs/{record.id}", "x-job-id": record.id, **rate_headers(record.tenant_usage)}
    return json_response(record_json(record), status=202, headers=headers)


async def retry_job(request: Request) -> Response:
    """Submit a failed job again as a new job: 202 and its location. Raises JobNotFound, JobConflict."""
    gateway: Gateway = request.app.state.gateway
    record = await gateway.retry(tenant_of(request), (await find_job(request)).id)
    return _accepted(record)


async def stream_events(request: Request) -> Response:
    """The journal as server-sent events after `Last-Event-ID`, until the event that ends the job.

    204 if the reader has that event already, so that a browser's EventSource does not reconnect.
    Raises JobNotFound, UnknownEvent, InvalidRequest.
    """
    gateway: Gateway = request.app.state.gateway
    after = last_seq(request.headers, request.query_params)
    record = await find_job(request)
    if after and not await gateway.events_after(record.id, after) and record.state.terminal:
        return Response(status_code=204)
    resources = ExitStack()
    feed = resources.enter_context(gateway.follow(request, [record.id], after=after, lenient=True))
    gateway.metrics.streams.inc()
    resources.callback(gateway.metrics.streams.dec)
    return EventStream(
        _frames(feed, gateway.config.gateway.heartbeat_seconds),
        finished=resources.close,
        headers={"x-job-id": record.id},
    )


async def _frames(feed: Feed, heartbeat_seconds: float) -> AsyncGenerator[bytes, None]:
    yield RETRY
    while not feed.ended:
        try:
            batch = await feed.take(heartbeat_seconds)
        except ShuttingDown:
            return  # the reader reconnects with Last-Event-ID and misses nothing
        if batch:
            yield b"".join(server_sent_event(event_json(event), event.seq) for _, event in batch)
        elif not feed.ended:
            yield EVENTS.ping
