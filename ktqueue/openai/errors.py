"""Errors as JSON: the one body that every error of ktqueue has over HTTP and in batch files.

The shape is OpenAI's, `{"error": {message, type, param, code}}`, with `limit` and `value` where a limit was broken.
"""

from dataclasses import replace
from typing import Any

from ktqueue.core.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineFailure,
    ErrorInfo,
    InvalidRequest,
    KtqueueError,
)
from ktqueue.core.events import JobState, TokenEvent

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 499: "cancelled_error"}
_SERVER_TYPES = {503: "unavailable_error", 504: "timeout_error"}


class UnsupportedParameter(InvalidRequest):
    """A field asks for something that this server cannot do and must not silently ignore."""

    code = "unsupported_parameter"


class JobEnded(KtqueueError):
    """A job ended in another state than done. Has the error of its last event, with its code and status."""

    def __init__(self, ended: ErrorInfo) -> None:
        super().__init__(ended.message, param=ended.param, limit=ended.limit, value=ended.value)
        self._ended = ended

    def info(self) -> ErrorInfo:
        """The error of the job's last event. Its field may have been renamed since."""
        return replace(self._ended, message=self.message, param=self.param)


def failure(event: TokenEvent) -> KtqueueError | None:
    """The error of an event that ends its job in another state than done, else None."""
    if event.state is None or not event.state.terminal or event.state is JobState.DONE:
        return None
    if event.error is not None:
        return JobEnded(event.error)
    if event.state is JobState.CANCELLED:
        return Cancelled("the job was cancelled")
    if event.state is JobState.EXPIRED:
        return DeadlineExceeded("the job's deadline passed before it was done")
    return EngineFailure("the job failed, and its worker gave no reason")


def status_of(info: ErrorInfo) -> int:
    """The HTTP status of an error, or 500 if its status is not an error's."""
    return info.status if 400 <= info.status <= 599 else 500


def error_body(info: ErrorInfo) -> dict[str, Any]:
    """The JSON body of an error."""
    status = status_of(info)
    kind = _TYPES.get(status, "invalid_request_error") if status < 500 else _SERVER_TYPES.get(status, "server_error")
    error: dict[str, Any] = {"message": info.message, "type": kind, "param": info.param, "code": info.code}
    if info.limit is not None:
        error["limit"] = info.limit
    if info.value is not None:
        error["value"] = info.value
    if info.code == ContextLengthExceeded.code:
        # llama.cpp's names of the two numbers: its clients read them to shorten their prompt.
        error["n_prompt_tokens"] = _as_int(info.value)
        error["n_ctx"] = _as_int(info.limit)
    return {"error": error}


def _as_int(value: float | str | None) -> int | None:
    try:
        return None if value is None else int(value)
    except ValueError:
        return None
