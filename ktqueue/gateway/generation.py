"""POST routes of the endpoints that generate text, such as /v1/chat/completions.

A request's way: `Gateway.read_body` reads and checks the body, `submit_call` makes it jobs, `follow` takes their
events, `answer` writes the response.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ktqueue.broker.conversations import LatestAnswer
from ktqueue.broker.jobs import JobRecord
from ktqueue.core.errors import InvalidRequest, KtqueueError
from ktqueue.core.request import GenerationRequest
from ktqueue.gateway.answer import AnswerWriter, stream_answer, whole_answer
from ktqueue.gateway.endpoints import ENDPOINTS, endpoint_of
from ktqueue.gateway.follow import JobFollower
from ktqueue.gateway.gateway import Gateway
from ktqueue.gateway.http.auth import Tenant, tenant_of
from ktqueue.gateway.http.headers import STREAM_START, conversation_id, idempotency_key
from ktqueue.gateway.http.responses import json_response
from ktqueue.openai.client_names import client_names
from ktqueue.openai.endpoint import Call, Endpoint


@dataclass(frozen=True, slots=True)
class Submission:
    """The jobs of one call.

    `keep`: the client sent an Idempotency-Key or a conversation, so it may come back. Its jobs are then not cancelled
    when it leaves. `in_conversation`: the stream can be resumed, so its frames carry ids.
    """

    records: Sequence[JobRecord]
    keep: bool
    in_conversation: bool


def generation_routes() -> list[Route]:
    """One route for each endpoint of the table."""
    return [Route(each.path, partial(generate, endpoint=each), methods=["POST"]) for each in ENDPOINTS.values()]


async def generate(request: Request, endpoint: Endpoint) -> Response:
    """The response to one request. Raises KtqueueError for an error that has its own status."""
    gateway: Gateway = request.app.state.gateway
    with client_names(endpoint.names):
        call = await gateway.read_body(request, endpoint.parse_call)
        if call.at_once is not None:
            idempotency_key(request.headers)  # a wrong one is refused here too
            conversation_id(request.headers)
            return json_response(call.at_once)
    submission = await submit_call(gateway, request, call)
    writer = AnswerWriter(submission.records, call.digest)
    follower = JobFollower(gateway, request, submission.records, keep=submission.keep)
    if not call.stream:
        return await whole_answer(follower, writer)
    after = STREAM_START if submission.in_conversation else None
    return await stream_answer(follower, writer, include_usage=call.include_usage, after=after)


async def submit_call(gateway: Gateway, request: Request, call: Call) -> Submission:
    """Submit the jobs of a call. Raises InvalidRequest and what `Gateway.submit` raises."""
    key, conversation = idempotency_key(request.headers), conversation_id(request.headers)
    if conversation is not None and len(call.generations) > 1:
        raise InvalidRequest(
            "a conversation takes one prompt at a time", param="X-Conversation-Id", limit=1, value=len(call.generations)
        )
    tenant = tenant_of(request)
    records = await _submit_all(gateway, tenant, call.generations, key)
    if conversation is not None:
        await _begin_turn(gateway, tenant, conversation, LatestAnswer(records[0].id, call.include_usage), key)
    return Submission(
        records, keep=key is not None or conversation is not None, in_conversation=conversation is not None
    )


async def _submit_all(
    gateway: Gateway, tenant: Tenant, generations: Sequence[GenerationRequest], key: str | None
) -> list[JobRecord]:
    """Submit every job. If one is refused, those before it are cancelled.

    With an idempotency key they stay: they may belong to an earlier request, and a retry will find them.
    """
    records: list[JobRecord] = []
    try:
        for place, generation in enumerate(generations):
            job_key = key if key is None or len(generations) == 1 else f"{key}#{place}"
            with client_names(endpoint_of(generation).names_in(generation)):
                records.append(await gateway.submit(tenant, generation, idempotency_key=job_key))
    except BaseException as error:
        if key is None:
            gateway.abandon(record.id for record in records)
        if isinstance(error, KtqueueError):
            gateway.metrics.failed(generations[0].model, error.info().code)
        raise
    return records


async def _begin_turn(gateway: Gateway, tenant: Tenant, conversation: str, turn: LatestAnswer, key: str | None) -> None:
    """Make this job the conversation's current answer, and cancel the one before it: nobody waits for that."""
    try:
        former = await gateway.broker.conversations.begin(tenant.name, conversation, turn)
    except BaseException:
        if key is None:
            gateway.abandon([turn.job_id])
        raise
    if former is not None and former.job_id != turn.job_id:
        gateway.abandon([former.job_id])
