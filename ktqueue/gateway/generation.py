"""POST routes of the endpoints that generate text, such as /v1/chat/completions.

A request's way: `Gateway.read_body` reads and checks the body, `submission` makes it jobs, `follow` takes their events,
`answer` writes the response.
"""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ktqueue.gateway.answer import AnswerWriter, stream_answer, whole_answer
from ktqueue.gateway.endpoints import ENDPOINTS
from ktqueue.gateway.follow import JobFollower
from ktqueue.gateway.gateway import Gateway
from ktqueue.gateway.http.headers import STREAM_START, conversation_id, idempotency_key
from ktqueue.gateway.http.responses import json_response
from ktqueue.gateway.submission import submit_call
from ktqueue.openai.client_names import client_names
from ktqueue.openai.endpoint import Endpoint


def generation_routes() -> list[Route]:
    """One route for each endpoint of the table."""
    return [Route(endpoint.path, _handler(endpoint), methods=["POST"]) for endpoint in ENDPOINTS.values()]


def _handler(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        return await generate(request, endpoint)

    return handle


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
