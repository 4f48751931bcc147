"""/v1/responses: create, retrieve, follow, cancel and delete responses. The id of a response has that of its job.

A response is its job: the journal has its answer, so it can be followed from any event, at any gateway. The
conversation, and the answer once somebody has it, are stored for `broker.response_ttl`, and so is the journal of a
response in the background.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import closing, suppress
from typing import Any

from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import Response

from ktqueue.broker.jobs import JobRecord
from ktqueue.broker.responses import StoredResponse
from ktqueue.core.codec import dumps
from ktqueue.core.errors import InvalidRequest, JobNotFound, KtqueueError, RequestTooLarge
from ktqueue.core.events import JobState, TokenEvent
from ktqueue.core.model_card import SHORT_DIGEST, ModelCard
from ktqueue.core.short_repr import short_repr
from ktqueue.gateway.answer import run_in_thread_if_large
from ktqueue.gateway.feed import Batch
from ktqueue.gateway.follow import JobFollower
from ktqueue.gateway.gateway import Gateway
from ktqueue.gateway.http.auth import tenant_of
from ktqueue.gateway.http.headers import idempotency_key, rate_headers
from ktqueue.gateway.http.responses import json_response
from ktqueue.gateway.http.sse import EventStream
from ktqueue.gateway.listing import limit_of, order_of, page_json
from ktqueue.openai.choices import Choices
from ktqueue.openai.client_names import client_names, rename
from ktqueue.openai.endpoint import ReplyHead
from ktqueue.openai.errors import JobEnded
from ktqueue.openai.responses.body import NAMES, PREFIX, ResponseCall, parse_response
from ktqueue.openai.responses.items import is_reference, items_of, response_of
from ktqueue.openai.responses.reply import ResponseReply, assistant_message
from ktqueue.openai.stream_format import EVENTS, named_event

_STATUS = {JobState.QUEUED: "queued", JobState.RUNNING: "in_progress", JobState.CANCELLED: "cancelled"}


class ResponseNotFound(KtqueueError):
    """No such response: it is unknown, was not stored, or has expired."""

    code = "response_not_found"
    status = 404


class ResponseWriter:
    """Writes one response from the events of its job."""

    def __init__(self, record: JobRecord, echo: dict[str, Any], digest: str = "") -> None:
        request = record.readable_request()
        fingerprint = (record.digest or digest)[:SHORT_DIGEST]
        self._record = record
        self._reply = ResponseReply(ReplyHead(PREFIX + record.id, int(record.created_at), fingerprint, request), echo)
        self._choices = Choices(1, request)

    def events(self, batch: Batch) -> list[dict[str, Any]]:
        """The stream's events for new events of the journal. They do not depend on how these arrive."""
        return [
            event
            for place_and_event in batch
            for delta in self._choices.absorb([place_and_event])
            for event in self._reply.chunks(delta)
        ]

    def last_event(self) -> dict[str, Any]:
        """The event that ends the stream."""
        return next(self._reply.last_chunks(self._choices.usage()))

    def whole(self, events: list[TokenEvent]) -> dict[str, Any]:
        """The response object of a job that is done."""
        return self._reply.whole(self._choices.whole([(0, event) for event in events]), self._choices.usage())

    def unfinished(self, record: JobRecord) -> dict[str, Any]:
        """The response object of a job that runs, or that ended without an answer."""
        error = None
        if record.error is not None:
            fault = JobEnded(record.error)
            rename(fault, NAMES)
            error = {"code": "server_error", "message": fault.message}
        return self._reply.response(_STATUS.get(record.state, "failed"), error=error)


async def create_response(request: Request) -> Response:
    """POST /v1/responses. Raises KtqueueError."""
    gateway: Gateway = request.app.state.gateway
    tenant = tenant_of(request).name
    body = await gateway.bodies.read(request)
    previous = body.value.get("previous_response_id")
    history = await _history(request, previous) if isinstance(previous, str) and previous else []
    if isinstance(body.value.get("input"), list):
        await _resolve_references(request, body.value["input"])

    def parse(value: dict[str, Any], card: ModelCard | None) -> ResponseCall:
        return parse_response(value, card, history)

    call = await gateway.parse_body(body, parse)
    # A client may ask for an answer in the background long after it is complete.
    keep_for = gateway.config.broker.response_ttl if call.background and call.store else 0.0
    with client_names(NAMES):
        record = await gateway.submit(
            tenant_of(request), call.generation, idempotency_key=idempotency_key(request.headers), keep=keep_for
        )
    response_id = PREFIX + record.id
    if call.store:
        await gateway.broker.responses.store(tenant, response_id, StoredResponse(call.messages, call.echo))
    writer = ResponseWriter(record, call.echo, call.digest)
    headers = {"x-job-id": record.id, **rate_headers(record.tenant_usage)}
    keep = call.background or idempotency_key(request.headers) is not None
    if call.background and not call.stream:
        return json_response(writer.unfinished(record), headers=headers)
    follower = JobFollower(gateway, request, [record], keep=keep, names=NAMES)
    if call.stream:
        return await _stream(gateway, follower, writer, headers, call, tenant, after=-1)
    events = [event for _, event in await follower.all()]
    answer = await run_in_thread_if_large(events, lambda: writer.whole(events))
    if call.store:
        await gateway.broker.responses.store(tenant, response_id, StoredResponse(call.messages, call.echo, answer))
    return json_response(answer, headers=headers)


class ResponseEndpoint(HTTPEndpoint):
    """/v1/responses/{id}."""

    async def get(self, request: Request) -> Response:
        """Send the response, or its events after `starting_after`. Raises ResponseNotFound."""
        gateway: Gateway = request.app.state.gateway
        response_id, stored = await _stored(request)
        if request.query_params.get("stream", "").lower() != "true":
            if stored.answer is not None:
                return json_response(stored.answer)
            return json_response(await _answer(request, response_id, stored))
        after = request.query_params.get("starting_after", "-1")
        if after != "-1" and not (after.isdecimal() and len(after) < 10):
            raise InvalidRequest(
                "starting_after must be the sequence_number of an event", param="starting_after", value=after[:80]
            )
        record = await _record(request, response_id)
        writer = ResponseWriter(record, dict(stored.echo))
        follower = JobFollower(gateway, request, [record], keep=True, counted=False, names=NAMES)
        return await _stream(gateway, follower, writer, {"x-job-id": record.id}, None, "", after=int(after))

    async def delete(self, request: Request) -> Response:
        """Forget the response, and cancel it if it still runs. Raises ResponseNotFound."""
        gateway: Gateway = request.app.state.gateway
        response_id, _ = await _stored(request)
        await gateway.broker.responses.delete(tenant_of(request).name, response_id)
        with suppress(JobNotFound):
            await gateway.broker.jobs.cancel((await _record(request, response_id)).id)
        return json_response({"id": response_id, "object": "response", "deleted": True})


async def cancel_response(request: Request) -> Response:
    """POST /v1/responses/{id}/cancel. A response that has ended stays as it is. Raises ResponseNotFound.

    The worker learns of it at its next commit. Until then, but not longer than `gateway.first_event_wait`, this waits.
    """
    gateway: Gateway = request.app.state.gateway
    response_id, stored = await _stored(request)
    if stored.answer is not None:
        return json_response(stored.answer)
    record = await gateway.broker.jobs.cancel((await _record(request, response_id)).id)
    if not record.state.terminal:
        await _wait_for_end(gateway, request, record)
    return json_response(await _answer(request, response_id, stored))


async def list_input_items(request: Request) -> Response:
    """GET /v1/responses/{id}/input_items: the conversation before the answer, its last item first by default.

    Raises InvalidRequest.
    """
    limit, order, after = limit_of(request, default=20, most=100), order_of(request), request.query_params.get("after")
    response_id, stored = await _stored(request)
    items = items_of(stored.messages, response_id.removeprefix(PREFIX))
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise InvalidRequest.must_be("after", "the id of an item", after[:80])
    start = 0 if after is None else ids.index(after) + 1
    page, has_more = items[start : start + limit], start + limit < len(items)
    return json_response(page_json(page, dict, has_more=has_more))


async def _stored(request: Request) -> tuple[str, StoredResponse]:
    gateway: Gateway = request.app.state.gateway
    response_id = request.path_params["response_id"]
    stored = await gateway.broker.responses.find(tenant_of(request).name, response_id)
    if stored is None:
        raise _not_found(response_id, "response_id")
    return response_id, stored


async def _record(request: Request, response_id: str) -> JobRecord:
    gateway: Gateway = request.app.state.gateway
    try:
        return tenant_of(request).check_sees(await gateway.broker.jobs.get(response_id.removeprefix(PREFIX)))
    except JobNotFound:
        raise _not_found(response_id, "response_id") from None


async def _wait_for_end(gateway: Gateway, request: Request, record: JobRecord) -> None:
    """Wait until the job has ended, at most `gateway.first_event_wait` seconds."""
    follower = JobFollower(gateway, request, [record], keep=True, counted=False)
    with closing(follower), suppress(TimeoutError, KtqueueError):
        async with asyncio.timeout(gateway.config.gateway.first_event_wait):
            while follower.running:
                await follower.take()


async def _answer(request: Request, response_id: str, stored: StoredResponse) -> dict[str, Any]:
    """The response object as its job is now."""
    gateway: Gateway = request.app.state.gateway
    record = await _record(request, response_id)
    writer = ResponseWriter(record, dict(stored.echo))
    if record.state is not JobState.DONE:
        return writer.unfinished(record)
    try:
        events = list(await gateway.broker.journal.replay(record.id))
    except JobNotFound:
        raise _not_found(response_id, "response_id") from None
    answer = await run_in_thread_if_large(events, lambda: writer.whole(events))
    tenant = tenant_of(request).name
    await gateway.broker.responses.store(tenant, response_id, StoredResponse(stored.messages, stored.echo, answer))
    return answer


async def _history(request: Request, previous: str) -> list[dict[str, Any]]:
    """The conversation that the response `previous` has ended. Raises ResponseNotFound, InvalidRequest."""
    gateway: Gateway = request.app.state.gateway
    stored = await gateway.broker.responses.find(tenant_of(request).name, previous)
    if stored is None:
        raise _not_found(previous, "previous_response_id")
    answer = stored.answer or await _answer(request, previous, stored)
    if answer["status"] not in ("completed", "incomplete"):
        raise InvalidRequest(
            f"previous_response_id must be a response that has ended, this one is {answer['status']}",
            param="previous_response_id",
            limit="completed",
            value=answer["status"],
        )
    return [*map(dict, stored.messages), assistant_message(answer)]


async def _resolve_references(request: Request, items: list[Any]) -> None:
    """Put stored items in the place of references to them.

    Together they may have as many bytes as a body, however often one is named. Raises ResponseNotFound and
    RequestTooLarge.
    """
    gateway: Gateway = request.app.state.gateway
    limit = gateway.config.gateway.max_body_bytes
    size = 0
    stored: dict[str, dict[str, tuple[Any, int]]] = {}  # the items of each response by their ids, with their bytes
    for place, reference in enumerate(items):
        if not is_reference(reference):
            continue
        item_id = reference.get("id")
        name = response_of(item_id)
        if name not in stored:
            stored[name] = await _items(request, name)
        if item_id not in stored[name]:
            shown = short_repr(item_id)
            raise ResponseNotFound(
                f"no item {shown} is stored: it is unknown, its response was created with store: false, or has expired",
                param=f"input[{place}].id",
                value=shown,
            )
        items[place], item_bytes = stored[name][item_id]
        size += item_bytes
        if size > limit:
            message = f"the items that input refers to must have at most {limit} bytes (gateway.max_body_bytes)"
            raise RequestTooLarge(message, param="input", limit=limit, value=size)


async def _items(request: Request, name: str) -> dict[str, tuple[Any, int]]:
    """The items before the answer and in the answer of a response, by their ids, and the bytes of each.

    `name`: its id without the prefix.
    """
    gateway: Gateway = request.app.state.gateway
    stored = await gateway.broker.responses.find(tenant_of(request).name, PREFIX + name) if name else None
    if stored is None:
        return {}
    answer = stored.answer or await _answer(request, PREFIX + name, stored)
    return {item["id"]: (item, len(dumps(item))) for item in [*items_of(stored.messages, name), *answer["output"]]}


def _not_found(response_id: str, param: str) -> ResponseNotFound:
    shown = response_id[:80]
    return ResponseNotFound(
        f"no response {shown!r} is stored: it is unknown, was created with store: false, or has expired",
        param=param,
        value=shown,
    )


async def _stream(
    gateway: Gateway,
    follower: JobFollower,
    writer: ResponseWriter,
    headers: dict[str, str],
    call: ResponseCall | None,
    tenant: str,
    *,
    after: int,
) -> Response:
    """The events after the number `after`. With `call` it is a new response, whose answer is stored at the end."""
    first: Batch = [] if call is None else await follower.first()

    async def frames() -> AsyncGenerator[bytes, None]:
        async for batch in follower.batches(first):
            found = [event for event in writer.events(batch) if event["sequence_number"] > after]
            if found:
                yield b"".join(named_event(event) for event in found)
            elif not batch:
                yield EVENTS.ping
        last = writer.last_event()
        if call is not None and call.store:
            stored = StoredResponse(call.messages, call.echo, last["response"])
            await gateway.broker.responses.store(tenant, last["response"]["id"], stored)
        if last["sequence_number"] > after:
            yield named_event(last)

    return EventStream(frames(), finished=follower.begin_stream(), headers=headers)
