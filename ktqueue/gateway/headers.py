"""Headers that carry meaning: the request id, the idempotency key, where a reader stopped; what a tenant has left."""

import re
from math import ceil
from uuid import uuid4

from starlette.datastructures import Headers, QueryParams

from ktqueue.broker.limits import Standing
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


def rate_headers(standing: Standing | None) -> dict[str, str]:
    """OpenAI's `x-ratelimit-*`: of each rate the most at once, what is left, and when all of it will be again."""
    headers: dict[str, str] = {}
    if standing is not None:
        for what, rate in (("requests", standing.requests), ("tokens", standing.tokens)):
            if rate is not None:
                headers[f"x-ratelimit-limit-{what}"] = str(rate.limit)
                headers[f"x-ratelimit-remaining-{what}"] = str(rate.remaining)
                headers[f"x-ratelimit-reset-{what}"] = duration(rate.reset)
    return headers


def duration(seconds: float) -> str:
    """Seconds as OpenAI writes them, in whole milliseconds rounded up: "120ms", "6.5s", "1h0m2s"."""
    milliseconds = ceil(seconds * 1_000)
    if milliseconds < 1_000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    last = f"{rest / 1_000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{last}"
    return f"{minutes}m{last}" if minutes else last
