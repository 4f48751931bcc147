"""Anthropic's endpoints and the shapes of their answers, for /openapi.json."""

from typing import Any, Literal

from pydantic import BaseModel

from ktqueue.anthropic.messages import PATH, CountBody, MessagesBody
from ktqueue.openai.document import Description
from ktqueue.openai.schema import ErrorDetail, Shape


class MessageUsage(BaseModel):
    """Token counts."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class AnswerMessage(Shape):
    """The answer of POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    """The answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class MessageError(BaseModel):
    """An error."""

    type: Literal["error"]
    error: ErrorDetail


DESCRIPTIONS = (
    Description(
        PATH, "createMessage", "Anthropic's messages.", AnswerMessage, MessageError, MessagesBody, "text/event-stream"
    ),
    Description(
        f"{PATH}/count_tokens",
        "countTokens",
        "Tokens of Anthropic's messages.",
        TokenCount,
        MessageError,
        CountBody,
        is_job=False,
    ),
)
