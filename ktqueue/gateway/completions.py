"""POST /v1/completions: one job for each prompt. Knows only how the parts go together."""

from starlette.requests import Request
from starlette.responses import Response

from ktqueue.gateway.body import read_body
from ktqueue.gateway.exchange import answer
from ktqueue.gateway.openai_requests import completion_call


async def create_completion(request: Request) -> Response:
    """Go on from one or several prompts, streamed or whole. Raises KtqueueError."""
    return await answer(request, await read_body(request, completion_call))
