"""Plain data to HTTP responses: JSON bodies, and errors in their one shape."""

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from ktqueue.core.codec import dumps
from ktqueue.core.errors import KtqueueError
from ktqueue.gateway.faults import error_body, retry_headers, status_of


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`value` as a JSON response."""
    return Response(dumps(value), status_code=status, headers=headers, media_type="application/json")


def error_response(error: KtqueueError, headers: Mapping[str, str] | None = None) -> Response:
    """An error with its status, and with Retry-After where another try may help. The connection ends after a 408."""
    info = error.info()
    status = status_of(info)
    more = {"connection": "close"} if status == 408 else retry_headers(status, error.retry_after)
    return json_response(error_body(info), status=status, headers={**more, **(headers or {})})
