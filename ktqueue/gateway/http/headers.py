"""Request headers: request id, origin, idempotency key, conversation, last event. Response headers: rate limits."""

import re
from math import ceil, inf
from uuid import uuid4

from starlette.datastructures import Headers, QueryParams

from ktqueue.broker.limits import TenantUsage
from ktqueue.core.errors import InvalidRequest
from ktqueue.gateway.errors import PermissionDenied

_ID = re.compile(r"[\x21-\x7e]{1,128}")
_KEY = re.compile(r"[\x20-\x7e]{1,255}")
_PLACE = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,3}))?")
# Response headers that a page of another origin may read (CORS).
EXPOSED_HEADERS = (
    "location",
    "retry-after",
    "www-authenticate",
    "x-job-id",
    "x-request-id",
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)
# A place in a numbered stream: seq of an event, and the number of its frames; inf for all of them.
StreamPlace = tuple[int, float]
STREAM_START: StreamPlace = (0, 0.0)


def request_id(headers: Headers) -> str:
    """The client's `X-Request-Id` if it is 1 to 128 visible ASCII characters, else a new id."""
    sent = headers.get("x-request-id", "")
    return sent if _ID.fullmatch(sent) else new_request_id()


def new_request_id() -> str:
    """An id for a request that has none."""
    return f"req-{uuid4().hex}"


def check_origin(headers: Headers, allowed: tuple[str, ...], what: str) -> None:
    """Refuse what browsers let foreign web pages send without a preflight. Raises PermissionDenied."""
    origin = headers.get("origin")
    if origin is None or "*" in allowed or origin in allowed or origin.partition("://")[2] == headers.get("host"):
        return
    raise PermissionDenied(
        f"pages of {origin[:80]} may not {what} (gateway.cors_origins)", param="origin", value=origin[:80]
    )


def idempotency_key(headers: Headers) -> str | None:
    """The `Idempotency-Key`, if sent. Raises InvalidRequest."""
    return checked_key("Idempotency-Key", headers.get("idempotency-key"))


def conversation_id(headers: Headers) -> str | None:
    """The `X-Conversation-Id`, if sent. Raises InvalidRequest."""
    return checked_key("X-Conversation-Id", headers.get("x-conversation-id"))


def checked_key(name: str, key: str | None) -> str | None:
    """`key`, if it is a valid name chosen by a client. Raises InvalidRequest."""
    if key is not None and not _KEY.fullmatch(key):
        raise InvalidRequest(
            f"{name} must be 1 to 255 printable ASCII characters",
            param=name,
            limit="1 to 255 printable ASCII characters",
            value=len(key),
        )
    return key


def last_seq(headers: Headers, query: QueryParams) -> int:
    """The last event that a reader has: `Last-Event-ID`, else `?starting_after=`, else 0. Raises InvalidRequest."""
    return int(_last_event(headers, query, parts_allowed=False)[0])


def last_place(headers: Headers, query: QueryParams) -> StreamPlace:
    """The last frame that a reader of a numbered stream has, sent like `last_seq`. Raises InvalidRequest."""
    return _last_event(headers, query, parts_allowed=True)


def _last_event(headers: Headers, query: QueryParams, *, parts_allowed: bool) -> StreamPlace:
    place = _checked_place("starting_after", query.get("starting_after"), parts_allowed)
    sent = _checked_place("Last-Event-ID", headers.get("last-event-id"), parts_allowed)
    return sent or place or STREAM_START


def _checked_place(name: str, text: str | None, parts_allowed: bool) -> StreamPlace | None:
    if not text:
        return None
    match = _PLACE.fullmatch(text)
    if match is None or (match[2] is not None and not parts_allowed):
        raise InvalidRequest.must_be(name, "the number of an event", text[:80], limit="0 or a positive integer")
    return int(match[1]), inf if match[2] is None else float(match[2])


def rate_headers(standing: TenantUsage | None) -> dict[str, str]:
    """OpenAI's `x-ratelimit-*` headers: for each rate its limit, what remains, and the time until it is full again."""
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
