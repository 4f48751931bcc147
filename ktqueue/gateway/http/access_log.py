"""The access log: one line for each answered HTTP request, without its query, headers or body."""

import logging
from typing import Any

from starlette.types import Scope

MAX_PATH = 200  # characters of a path that are logged
_UNNAMED = ("method", "path", "status")  # logged as values alone

logger = logging.getLogger("ktqueue.access")


def log_request(scope: Scope, *, status: int, seconds: float, request_id: str, job_ids: str | None) -> None:
    """Log one request. `status` 0 means that the client left before the answer, and is logged as 499."""
    if not logger.isEnabledFor(logging.INFO):
        return
    tenant = getattr(scope.get("tenant"), "name", None)
    path = scope["path"][:MAX_PATH].encode("unicode_escape").decode()  # it may contain line breaks
    fields: dict[str, Any] = {
        "method": scope["method"],
        "path": path,
        "status": status or 499,
        "milliseconds": round(seconds * 1000, 1),
        "tenant": tenant,
        "request_id": request_id,
        "job_id": job_ids,
    }
    words = " ".join(f"{name}={value}" for name, value in fields.items() if name not in _UNNAMED and value is not None)
    logger.info("%s %s %d %s", scope["method"], path, status or 499, words, extra={"fields": fields})
