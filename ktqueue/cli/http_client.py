"""A connection to a gateway, or to any other server with OpenAI's API, and what its refusals mean."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from ktqueue.core.errors import InvalidRequest, KtqueueError, Unavailable

KEY_VARIABLE = "OPENAI_API_KEY"  # as OpenAI's packages call it
TIMEOUT = httpx.Timeout(600.0, connect=5.0)  # seconds without a byte


def connect(base_url: str, api_key: str | None) -> httpx.Client:
    """Return a client. `base_url` is that of the openai client, with or without /v1. Raises InvalidRequest."""
    base = base_url.strip().rstrip("/").removesuffix("/v1")
    key = (api_key or "").strip()
    try:
        is_web = httpx.URL(base).scheme in ("http", "https") and bool(httpx.URL(base).host)
    except httpx.InvalidURL:
        is_web = False
    if not is_web:
        raise InvalidRequest(f"--base-url must be a URL such as http://127.0.0.1:8000/v1, got {base_url[:80]!r}")
    if not key.isascii() or not key.isprintable():
        raise InvalidRequest("--api-key must be made of printable ASCII characters")
    return httpx.Client(base_url=base, headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=TIMEOUT)


def check(response: httpx.Response) -> None:
    """Raise the error for an HTTP status, with the message of its body, which must have been read.

    Unavailable, and an error with `retry_after`, may pass.
    """
    if response.is_redirect:
        location = response.headers.get("location", "")
        raise InvalidRequest(f"{response.url} leads to {location[:200]}: change --base-url")
    if not response.is_error:
        return
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"{response.url}: HTTP {response.status_code}"
    if response.status_code == 401:
        message += f"; the key is --api-key, or the variable {KEY_VARIABLE}"
    if response.status_code in (502, 503, 504):
        raise Unavailable(message)
    if response.status_code in (400, 413, 422):
        raise InvalidRequest(message)
    may_pass = response.status_code in (408, 429) or response.status_code >= 500
    raise KtqueueError(message, retry_after=_retry_after(response) if may_pass else None)


def _retry_after(response: httpx.Response) -> float:
    """Return the seconds after which the server wants to be asked again, one if it does not say."""
    stated = response.headers.get("retry-after", "")
    return float(stated) if stated.isdecimal() and len(stated) < 6 else 1.0


@contextmanager
def answered(client: httpx.Client, *further: type[Exception]) -> Iterator[None]:
    """Raise Unavailable for a request that gets no answer, and for `further` errors of reading it."""
    errors: tuple[type[Exception], ...] = (httpx.TransportError, *further)
    try:
        yield
    except errors as error:
        raise Unavailable(f"{client.base_url} cannot be reached: {error or type(error).__name__}") from error
