"""Headers that carry meaning: the request id, the idempotency key, where a reader stopped; what a tenant has left."""

import re
from math import ceil, inf
from uuid import uuid4

from starlette.datastructures import Headers, QueryParams

from ktqueue.broker.limits import Standing
from ktqueue.core.errors import InvalidRequest

_ID = re.compile(r"[\x21-\x7e]{1,128}")
_KEY = re.compile(r"[\x20-\x7e]{1,255}")
_SEQ = re.compile(r"[0-9]{1,18}")
_PLACE = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,3}))?")
# Headers of answers that a page of another origin may read (CORS).
EXPOSED_HEADERS = (
    "location",
    "retry-after",
    "www-authenticate",
    "x-job-id",
    "x-request-id",
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)
Place = tuple[int, float]  # in a numbered stream: seq of an event, and how many of its frames; inf for all of them


def request_id(headers: Headers) -> str:
    """The client's `X-Request-Id` if it is a plain short word, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _ID.fullmatch(given) else new_request_id()


def new_request_id() -> str:
    """An id for a request that brought none."""
    return f"req-{uuid4().hex}"


def idempotency_key(headers: Headers) -> str | None:
    """The `Idempotency-Key`, if given. Raises InvalidRequest."""
    return checked_key("Idempotency-Key", headers.get("idempotency-key"))


def conversation_id(headers: Headers) -> str | None:
    """The `X-Conversation-Id`, if given. Raises InvalidRequest."""
    return checked_key("X-Conversation-Id", headers.get("x-conversation-id"))


def checked_key(name: str, given: str | None) -> str | None:
    """A word of the client's own. Raises InvalidRequest."""
    if given is not None and not _KEY.fullmatch(given):
        raise InvalidRequest(
            f"{name} must be 1 to 255 printable ASCII characters",
            param=name,
            limit="1 to 255 printable ASCII characters",
            value=len(given),
        )
    return given


def last_seq(headers: Headers, query: QueryParams) -> int:
    """The last event that a reader has: `Last-Event-ID`, else `?starting_after=`, else 0. Raises InvalidRequest."""
    name, given = _last_event(headers, query)
    if not given:
        return 0
    if not _SEQ.fullmatch(given):
        raise _no_event(name, given)
    return int(given)


def last_place(headers: Headers, query: QueryParams) -> Place:
    """The last frame that a reader of a numbered stream has, told as in `last_seq`. Raises InvalidRequest."""
    name, given = _last_event(headers, query)
    if not given:
        return 0, 0.0
    match = _PLACE.fullmatch(given)
    if match is None:
        raise _no_event(name, given)
    return int(match[1]), inf if match[2] is None else float(match[2])


def _last_event(headers: Headers, query: QueryParams) -> tuple[str, str | None]:
    header = headers.get("last-event-id")
    return ("Last-Event-ID", header) if header else ("starting_after", query.get("starting_after"))


def _no_event(name: str, given: str) -> InvalidRequest:
    return InvalidRequest(
        f"{name} must be the number of an event, got {given[:80]!r}",
        param=name,
        limit="0 or a positive integer",
        value=given[:80],
    )


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
