"""/v1/stream: the answer that is being given in a conversation, taken up again. llama.cpp's form of it.

A request with `X-Conversation-Id` gave the conversation its job; see exchange.py.
"""

from contextlib import suppress

from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import Response

from ktqueue.broker.conversations import Turn
from ktqueue.core.errors import InvalidRequest, JobNotFound
from ktqueue.gateway.exchange import Exchange
from ktqueue.gateway.gateway import Gateway
from ktqueue.gateway.http.auth import tenant_of
from ktqueue.gateway.http.headers import checked_key, last_place
from ktqueue.openai.errors import UnsupportedParameter


class StreamEndpoint(HTTPEndpoint):
    """/v1/stream?conv_id=ID."""

    async def get(self, request: Request) -> Response:
        """Take a stream up again."""
        return await resume(request)

    async def delete(self, request: Request) -> Response:
        """Stop a stream."""
        return await stop(request)


async def resume(request: Request) -> Response:
    """The stream from its beginning, or from `Last-Event-ID`, in the chunks that the first reader gets.

    Raises JobNotFound where the conversation or its answer is unknown or forgotten, UnknownEvent, InvalidRequest.
    """
    gateway: Gateway = request.app.state.gateway
    if request.query_params.get("from", "0") != "0":
        raise UnsupportedParameter(
            "from counts bytes, of which each gateway writes its own; come back with Last-Event-ID",
            param="from",
            limit="0",
            value=request.query_params["from"][:80],
        )
    after = last_place(request.headers, request.query_params)
    turn = await _turn(request)
    if turn is None:
        raise JobNotFound("no answer of this conversation is known, or it has expired", param="conv_id")
    record = await gateway.broker.jobs.get(turn.job_id)
    # The whole journal is read again, since later chunks depend on it; that it is long enough must be asked.
    if after[0]:
        await gateway.events_after(record.id, after[0])
    exchange = Exchange(gateway, request, [record], keep=True, after=after, resumed=True)
    return await exchange.stream(include_usage=turn.include_usage)


async def stop(request: Request) -> Response:
    """Cancel the answer. 204, also where there is nothing to stop. Raises InvalidRequest."""
    gateway: Gateway = request.app.state.gateway
    turn = await _turn(request)
    if turn is not None:
        with suppress(JobNotFound):  # it ended long ago
            await gateway.broker.jobs.cancel(turn.job_id)
    return Response(status_code=204)


async def _turn(request: Request) -> Turn | None:
    gateway: Gateway = request.app.state.gateway
    conversation = checked_key("conv_id", request.query_params.get("conv_id"))
    if conversation is None:
        raise InvalidRequest("conv_id is missing: the X-Conversation-Id of the request", param="conv_id")
    return await gateway.broker.conversations.find(tenant_of(request).name, conversation)
