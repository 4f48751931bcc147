"""All endpoints that answer with generated text or with a prompt, and the errors, in the forms of every API."""

from collections.abc import Callable, Mapping
from typing import Any

from ktqueue.anthropic.document import DESCRIPTIONS as ANTHROPIC_DESCRIPTIONS
from ktqueue.anthropic.endpoints import COUNT_TOKENS, MESSAGES
from ktqueue.anthropic.errors import error_body as anthropic_error_body
from ktqueue.core.errors import ErrorInfo
from ktqueue.core.request import GenerationRequest
from ktqueue.ollama import endpoints as ollama
from ktqueue.ollama.document import DESCRIPTIONS as OLLAMA_DESCRIPTIONS
from ktqueue.openai import endpoints as openai
from ktqueue.openai.document import Description
from ktqueue.openai.endpoint import Endpoint
from ktqueue.openai.errors import error_body
from ktqueue.openai.prompt_endpoints import PROMPT_ENDPOINTS as OPENAI_PROMPT_ENDPOINTS
from ktqueue.openai.prompt_endpoints import PromptEndpoint
from ktqueue.openai.responses.body import INPUT_TOKENS

ENDPOINTS: Mapping[str, Endpoint] = {
    **openai.ENDPOINTS,
    **{endpoint.path: endpoint for endpoint in (MESSAGES, ollama.CHAT, ollama.GENERATE)},
}
PROMPT_ENDPOINTS: tuple[PromptEndpoint, ...] = (*OPENAI_PROMPT_ENDPOINTS, INPUT_TOKENS, COUNT_TOKENS)
DESCRIPTIONS: tuple[Description, ...] = (*ANTHROPIC_DESCRIPTIONS, *OLLAMA_DESCRIPTIONS)


def endpoint_of(request: GenerationRequest) -> Endpoint:
    """The endpoint whose answers fit a stored request."""
    return ENDPOINTS.get(request.endpoint) or openai.endpoint_of(request)


def error_body_of(path: str) -> Callable[[ErrorInfo], dict[str, Any]]:
    """What makes the JSON body of an error at this path."""
    if path.startswith(("/v1/messages", "/messages")):
        return anthropic_error_body
    if path.startswith("/api/"):
        return ollama.error_body
    return error_body
