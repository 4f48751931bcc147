"""A connection to a gateway, or to any other server with OpenAI's API, and what its refusals mean."""

import httpx

from ktqueue.core.errors import InvalidRequest, KtqueueError, Unavailable

TIMEOUT = httpx.Timeout(600.0, connect=5.0)  # seconds without a byte


def connect(base_url: str, api_key: str | None) -> httpx.Client:
    """Return a client. `base_url` is that of the openai client, with or without /v1."""
    base = base_url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.Client(base_url=base, headers=headers, timeout=TIMEOUT)


def check(response: httpx.Response) -> None:
    """Raise the error for an HTTP status, with the message of its body, which must have been read.

    Unavailable, and an error with `retry_after`, may pass.
    """
    if not response.is_error:
        return
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"{response.url}: HTTP {response.status_code}"
    if response.status_code in (502, 503, 504):
        raise Unavailable(message)
    if response.status_code in (400, 404, 413, 422):
        raise InvalidRequest(message)
    may_pass = response.status_code in (408, 429) or response.status_code >= 500
    raise KtqueueError(message, retry_after=_retry_after(response) if may_pass else None)


def _retry_after(response: httpx.Response) -> float:
    """Return the seconds after which the server wants to be asked again, one if it does not say."""
    stated = response.headers.get("retry-after", "")
    return float(stated) if stated.isdecimal() and len(stated) < 6 else 1.0


def unreachable(client: httpx.Client, error: Exception) -> Unavailable:
    """Return the error for a request without an answer."""
    return Unavailable(f"{client.base_url}: {error or type(error).__name__}")
