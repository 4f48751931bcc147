"""Which API a path belongs to, so that every error is in the form that its clients read."""

from collections.abc import Callable
from typing import Any

from ktqueue.anthropic.errors import error_body as anthropic_error_body
from ktqueue.core.errors import ErrorInfo
from ktqueue.ollama.endpoints import error_body as ollama_error_body
from ktqueue.openai.errors import error_body


def error_body_of(path: str) -> Callable[[ErrorInfo], dict[str, Any]]:
    """What makes the JSON body of an error at this path."""
    if path.startswith(("/v1/messages", "/messages")):
        return anthropic_error_body
    if path.startswith("/api/"):
        return ollama_error_body
    return error_body
