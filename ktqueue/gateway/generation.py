"""POST routes of the endpoints that generate text, such as /v1/chat/completions."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ktqueue.gateway.exchange import answer
from ktqueue.gateway.gateway import Gateway
from ktqueue.openai.endpoint import Endpoint
from ktqueue.openai.endpoints import ENDPOINTS


def generation_routes() -> list[Route]:
    """One route for each endpoint of the table."""
    return [Route(endpoint.path, _handler(endpoint), methods=["POST"]) for endpoint in ENDPOINTS.values()]


def _handler(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        gateway: Gateway = request.app.state.gateway
        return await answer(request, await gateway.read_body(request, endpoint.parse_call))

    return handle
