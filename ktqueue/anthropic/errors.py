"""Errors in Anthropic's form. Source: https://docs.anthropic.com/en/api/errors"""

from collections.abc import Mapping
from typing import Any

from ktqueue.core.errors import ErrorInfo
from ktqueue.openai.errors import UnsupportedParameter, status_of
from ktqueue.openai.errors import error_body as openai_error_body

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ThreadUnsupported(UnsupportedParameter):
    """The conversation should be kept on the server. Anthropic's clients then send all of it with each request."""

    code = "thread_unsupported_request"


def error_body(info: ErrorInfo) -> dict[str, Any]:
    """The JSON body of an error: Anthropic's type and message, then our param, code, limit and value."""
    status = status_of(info)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error = {**openai_error_body(info)["error"], "type": kind}
    if info.code == ThreadUnsupported.code:
        error["details"] = {"error_code": info.code, "unsupported": ["thread"]}
    return {"type": "error", "error": error}
