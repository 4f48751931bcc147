"""The table of endpoints that generate text."""

from collections.abc import Mapping

from ktqueue.core.request import GenerationRequest
from ktqueue.openai.chat import ChatReply, parse_chat
from ktqueue.openai.client_names import CHAT_NAMES
from ktqueue.openai.completions import CompletionReply, parse_completion
from ktqueue.openai.endpoint import Endpoint

CHAT = Endpoint("/v1/chat/completions", parse_chat, ChatReply, "chatcmpl", names=CHAT_NAMES)
COMPLETIONS = Endpoint(
    "/v1/completions", parse_completion, CompletionReply, "cmpl", names=((r"prompt_token_ids", "prompt"),)
)
ENDPOINTS: Mapping[str, Endpoint] = {endpoint.path: endpoint for endpoint in (CHAT, COMPLETIONS)}


def endpoint_of(request: GenerationRequest) -> Endpoint:
    """The endpoint whose answers fit a stored request. Only a chat has messages."""
    return CHAT if request.messages is not None else COMPLETIONS
