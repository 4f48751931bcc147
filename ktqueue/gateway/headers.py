"""Request headers that carry meaning: the request id, the idempotency key, where a reader stopped."""

import re
from uuid import uuid4

from starlette.datastructures import Headers, QueryParams

from ktqueue.core.errors import InvalidRequest

_ID = re.compile(r"[\x21-\x7e]{1,128}")
_KEY = re.compile(r"[\x20-\x7e]{1,255}")
_SEQ = re.compile(r"[0-9]{1,18}")


def request_id(headers: Headers) -> str:
    """The client's `X-Request-Id` if it is a plain short word, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _ID.fullmatch(given) else f"req-{uuid4().hex}"


def idempotency_key(headers: Headers) -> str | None:
    """The `Idempotency-Key`, if given. Raises InvalidRequest."""
    given = headers.get("idempotency-key")
    if given is not None and not _KEY.fullmatch(given):
        raise InvalidRequest(
            "Idempotency-Key must be 1 to 255 printable ASCII characters",
            param="Idempotency-Key",
            limit="1 to 255 printable ASCII characters",
            value=len(given),
        )
    return given


def last_seq(headers: Headers, query: QueryParams) -> int:
    """The last event that a reader has: `Last-Event-ID`, else `?after=`, else 0. Raises InvalidRequest."""
    for name, given in (("Last-Event-ID", headers.get("last-event-id")), ("after", query.get("after"))):
        if given:
            if not _SEQ.fullmatch(given):
                raise InvalidRequest(
                    f"{name} must be the number of an event, got {given[:80]!r}",
                    param=name,
                    limit="0 or a positive integer",
                    value=given[:80],
                )
            return int(given)
    return 0
