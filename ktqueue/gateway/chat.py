"""POST /v1/chat/completions. Knows only how the parts go together."""

from starlette.requests import Request
from starlette.responses import Response

from ktqueue.gateway.body import read_body
from ktqueue.gateway.exchange import answer
from ktqueue.gateway.openai_requests import chat_call


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, streamed or whole. Raises KtqueueError."""
    return await answer(request, await read_body(request, chat_call))
