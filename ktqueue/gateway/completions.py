"""POST /v1/completions: one job for each prompt. Knows only how the parts go together."""

from starlette.requests import Request
from starlette.responses import Response

from ktqueue.gateway.body import read_json
from ktqueue.gateway.exchange import answer
from ktqueue.gateway.openai_requests import parse_completion


async def create_completion(request: Request) -> Response:
    """Go on from one or several prompts, streamed or whole. Raises KtqueueError."""
    body = parse_completion(await read_json(request))
    return await answer(
        request,
        body.requests(),
        stream=bool(body.stream),
        include_usage=body.wants_usage(),
    )
