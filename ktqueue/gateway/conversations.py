"""/v1/stream: resumes or stops the current answer of a conversation. The form is llama.cpp's.

A request with `X-Conversation-Id` registers its job in the conversation (`generation`). This module only finds
that job again. Following and writing are the same as for the first reader.
"""

from contextlib import suppress

from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import Response

from ktqueue.broker.conversations import LatestAnswer
from ktqueue.core.errors import InvalidRequest, JobNotFound
from ktqueue.gateway.answer import AnswerWriter, stream_answer
from ktqueue.gateway.follow import JobFollower
from ktqueue.gateway.gateway import Gateway
from ktqueue.gateway.http.auth import tenant_of
from ktqueue.gateway.http.headers import checked_key, last_place
from ktqueue.openai.errors import UnsupportedParameter


class StreamEndpoint(HTTPEndpoint):
    """/v1/stream?conv_id=ID."""

    async def get(self, request: Request) -> Response:
        """Send the stream from its beginning, or from `Last-Event-ID`, in the same chunks as to the first reader.

        Raises JobNotFound if the conversation or its answer is unknown or has expired, UnknownEvent, InvalidRequest.
        """
        gateway: Gateway = request.app.state.gateway
        if request.query_params.get("from", "0") != "0":
            raise UnsupportedParameter(
                "from counts bytes, which differ between gateways; use Last-Event-ID instead",
                param="from",
                limit="0",
                value=request.query_params["from"][:80],
            )
        after = last_place(request.headers, request.query_params)
        turn = await _find_turn(request)
        if turn is None:
            raise JobNotFound("no answer of this conversation is known, or it has expired", param="conv_id")
        record = await gateway.broker.jobs.get(turn.job_id)
        # The whole journal is read again, since later chunks depend on earlier events. It must reach `after`.
        if after[0]:
            await gateway.events_after(record.id, after[0])
        writer = AnswerWriter([record])
        follower = JobFollower(gateway, request, [record], keep=True, counted=False)
        return await stream_answer(follower, writer, include_usage=turn.include_usage, after=after, resumed=True)

    async def delete(self, request: Request) -> Response:
        """Cancel the answer: 204, also if none is running. Raises InvalidRequest."""
        gateway: Gateway = request.app.state.gateway
        turn = await _find_turn(request)
        if turn is not None:
            with suppress(JobNotFound):  # it has expired
                await gateway.broker.jobs.cancel(turn.job_id)
        return Response(status_code=204)


async def _find_turn(request: Request) -> LatestAnswer | None:
    gateway: Gateway = request.app.state.gateway
    conversation = checked_key("conv_id", request.query_params.get("conv_id"))
    if conversation is None:
        raise InvalidRequest("conv_id is missing: the X-Conversation-Id of the request", param="conv_id")
    return await gateway.broker.conversations.find(tenant_of(request).name, conversation)
