"""POST /v1/chat/completions. Knows only how the parts go together."""

from starlette.requests import Request
from starlette.responses import Response

from ktqueue.gateway.body import read_json
from ktqueue.gateway.exchange import answer
from ktqueue.gateway.openai_requests import parse_chat


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, streamed or whole. Raises KtqueueError."""
    body = parse_chat(await read_json(request))
    return await answer(
        request,
        [body.request()],
        stream=bool(body.stream),
        include_usage=body.wants_usage(),
    )
