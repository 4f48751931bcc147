"""HTTP responses from plain data and from errors."""

import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from ktqueue.core.codec import dumps
from ktqueue.core.errors import KtqueueError
from ktqueue.gateway.endpoints import error_body_of
from ktqueue.openai.errors import status_of

RETRY_AFTER = 1  # seconds, if the error itself has no better value


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`value` as a JSON response."""
    return Response(dumps(value), status_code=status, headers=headers, media_type="application/json")


def error_response(error: KtqueueError, headers: Mapping[str, str] | None = None, *, path: str = "") -> Response:
    """An error with its status and the headers that a retry needs, in the form of the API that `path` belongs to.

    A 408 also closes the connection.
    """
    info = error.info()
    status = status_of(info)
    more = {"connection": "close"} if status == 408 else retry_headers(status, error.retry_after)
    return json_response(error_body_of(path)(info), status=status, headers={**more, **(headers or {})})


def retry_headers(status: int, retry_after: float | None = None) -> dict[str, str]:
    """What the next attempt needs: time (`Retry-After`, whole seconds, at least 1), or a key (`WWW-Authenticate`)."""
    if status == 401:
        return {"www-authenticate": "Bearer"}
    if status not in (429, 503):
        return {}
    return {"retry-after": str(max(RETRY_AFTER, math.ceil(retry_after or 0)))}
