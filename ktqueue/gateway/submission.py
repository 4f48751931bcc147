"""Submits the jobs of one call: all of them or none, and registers them as a conversation's current answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from ktqueue.broker.conversations import LatestAnswer
from ktqueue.broker.jobs import JobRecord
from ktqueue.core.errors import InvalidRequest, KtqueueError
from ktqueue.core.request import GenerationRequest
from ktqueue.gateway.endpoints import endpoint_of
from ktqueue.gateway.gateway import Gateway
from ktqueue.gateway.http.auth import Tenant, tenant_of
from ktqueue.gateway.http.headers import conversation_id, idempotency_key
from ktqueue.openai.client_names import client_names
from ktqueue.openai.endpoint import Call


@dataclass(frozen=True, slots=True)
class Submission:
    """The jobs of one call.

    `keep`: the client sent an Idempotency-Key or a conversation, so it may come back. Its jobs are then not cancelled
    when it leaves. `in_conversation`: the stream can be resumed, so its frames carry ids.
    """

    records: Sequence[JobRecord]
    keep: bool
    in_conversation: bool


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
