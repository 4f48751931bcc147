"""Prompts as the model reads them: a worker renders and tokenises them, since it has the tokenizer.

Such a job takes no row of an engine and is first in its queue, so it is answered while others generate.
"""

from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ktqueue.core.completion import JoinedPrompt
from ktqueue.core.events import PromptPart
from ktqueue.core.request import MAX_PRIORITY, GenerationRequest, JobClass
from ktqueue.gateway.endpoints import PROMPT_ENDPOINTS
from ktqueue.gateway.follow import JobFollower
from ktqueue.gateway.gateway import Gateway
from ktqueue.gateway.http.auth import tenant_of
from ktqueue.gateway.http.responses import json_response
from ktqueue.openai.client_names import client_names
from ktqueue.openai.prompt_endpoints import PromptEndpoint

PROMPT_SECONDS = 30.0  # a prompt that no worker has encoded by then is a 504


def prompt_routes() -> list[Route]:
    """One route for each endpoint of the table."""
    return [Route(each.path, partial(_answer, endpoint=each), methods=["POST"]) for each in PROMPT_ENDPOINTS]


async def read_prompt(gateway: Gateway, request: Request, generation: GenerationRequest) -> PromptPart:
    """The text and token ids of the prompt of `generation`, which is not run.

    The body of `request` must have been read before. Raises what `Gateway.submit` raises, the error of a prompt that
    cannot be encoded, and DeadlineExceeded after PROMPT_SECONDS.
    """
    made = replace(
        generation,
        prompt_only=True,
        job_class=JobClass.INTERACTIVE,
        priority=-MAX_PRIORITY,
        expires_in=PROMPT_SECONDS,
        webhook=None,
    )
    record = await gateway.submit(tenant_of(request), made, idempotency_key=None)
    follower = JobFollower(gateway, request, [record], keep=False, counted=False, names=())
    prompt = JoinedPrompt()
    for _, event in await follower.all():
        if event.prompt is not None:
            prompt.add(event.prompt)
    return prompt.whole() or PromptPart()


async def _answer(request: Request, endpoint: PromptEndpoint) -> Response:
    gateway: Gateway = request.app.state.gateway
    with client_names(endpoint.names):
        call = await gateway.read_body(request, endpoint.parse)
        prompt = PromptPart() if call.generation is None else await read_prompt(gateway, request, call.generation)
    return json_response(call.answer(prompt))
