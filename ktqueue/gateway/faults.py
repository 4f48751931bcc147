"""Errors of the HTTP border, and the JSON body that every error of ktqueue has over HTTP.

The shape is OpenAI's: `{"error": {message, type, param, code}}`, with `limit` and `value` added where
a bound was broken. Knows no starlette and no pydantic.
"""

import math
from typing import Any

from ktqueue.core.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineFailure,
    ErrorInfo,
    InvalidRequest,
    JournalRegressed,
    KtqueueError,
    Unavailable,
)
from ktqueue.core.events import JobState, TokenEvent

RETRY_AFTER = 1  # seconds, where the error itself gives no better advice
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 499: "cancelled_error"}
_SERVER_TYPES = {503: "unavailable_error", 504: "timeout_error"}


class UnsupportedParameter(InvalidRequest):
    """A field asks for something that this server cannot do, and must not silently leave out."""

    code = "unsupported_parameter"


class MalformedBody(InvalidRequest):
    """The body is not a JSON object in UTF-8."""

    code = "invalid_json"


class PermissionDenied(KtqueueError):
    """The key is known, and does not open this."""

    code = "permission_denied"
    status = 403


class UnsupportedMediaType(KtqueueError):
    """The body's content type is not JSON."""

    code = "unsupported_media_type"
    status = 415


class RouteNotFound(KtqueueError):
    """No such path."""

    code = "not_found"
    status = 404


class MethodNotAllowed(KtqueueError):
    """The path exists, the method does not."""

    code = "method_not_allowed"
    status = 405


class MalformedRequest(KtqueueError):
    """The bytes are no HTTP request."""

    code = "malformed_request"
    status = 400


class SlowBody(KtqueueError):
    """The body came too slowly, or stopped coming."""

    code = "request_timeout"
    status = 408


class SlowHeaders(KtqueueError):
    """The headers did not end in time."""

    code = "request_timeout"
    status = 408


class UrlTooLong(KtqueueError):
    """The request's target has too many bytes."""

    code = "url_too_long"
    status = 414


class HeadersTooLarge(KtqueueError):
    """There are too many headers, or too many bytes of them."""

    code = "headers_too_large"
    status = 431


class TooManyConnections(Unavailable):
    """The gateway has as many connections, or answers as many requests at once, as it may."""

    code = "too_many_connections"


class TooManyFromAddress(KtqueueError):
    """One address has as many connections as it may."""

    code = "too_many_connections_from_address"
    status = 429


class TooManyBodyBytes(Unavailable):
    """The bodies that are being read together have too many bytes."""

    code = "too_many_body_bytes"


class UnknownEvent(JournalRegressed):
    """A reader says that it has an event which the journal does not hold."""

    status = 400


class ShuttingDown(Unavailable):
    """The gateway stops; another one, or this one restarted, will answer."""

    code = "shutting_down"


class ClientGone(KtqueueError):
    """The client closed the connection: nobody is left to tell."""

    code = "client_closed_request"
    status = 499


class InternalError(KtqueueError):
    """A fault of ours; the log knows more."""


class JobEnded(KtqueueError):
    """A job ended in another state than done; carries the error of its last event as it is."""

    def __init__(self, ended: ErrorInfo) -> None:
        super().__init__(ended.message, param=ended.param, limit=ended.limit, value=ended.value)
        self._ended = ended

    def info(self) -> ErrorInfo:
        """The error of the job's last event."""
        return self._ended


def failure(event: TokenEvent) -> KtqueueError | None:
    """The error that an event stands for: None unless it ends its job in a state other than done."""
    if event.state is None or not event.state.terminal or event.state is JobState.DONE:
        return None
    if event.error is not None:
        return JobEnded(event.error)
    if event.state is JobState.CANCELLED:
        return Cancelled("the job was cancelled")
    if event.state is JobState.EXPIRED:
        return DeadlineExceeded("the job's deadline passed before it was done")
    return EngineFailure("the job failed without saying why")


def status_of(info: ErrorInfo) -> int:
    """The HTTP status of an error; 500 where it carries one that is no error."""
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
        # llama.cpp's two names for the same facts: its clients read them to cut their prompt.
        error["n_prompt_tokens"] = _whole(info.value)
        error["n_ctx"] = _whole(info.limit)
    return {"error": error}


def retry_headers(status: int, retry_after: float | None = None) -> dict[str, str]:
    """What another try needs: time (`Retry-After`, whole seconds, at least 1), or a key (`WWW-Authenticate`)."""
    if status == 401:
        return {"www-authenticate": "Bearer"}
    if status not in (429, 503):
        return {}
    return {"retry-after": str(max(RETRY_AFTER, math.ceil(retry_after or 0)))}


def _whole(value: float | str | None) -> int | None:
    try:
        return None if value is None else int(value)
    except ValueError:
        return None
