"""Who may call: an API key as `Authorization: Bearer KEY` or `X-Api-Key: KEY`. Knows no tenants and no quotas."""

import hmac
from collections.abc import Sequence
from hashlib import sha256

from starlette.datastructures import Headers

from ktqueue.core.errors import AuthenticationFailed

OPEN_PATHS = frozenset({"/healthz", "/readyz"})  # probes carry no keys


class Keys:
    """The API keys that are let in; none given: everybody is."""

    def __init__(self, keys: Sequence[str]) -> None:
        # Digests have one length, so the comparison tells nothing of a key, not even how long it is.
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def check(self, path: str, headers: Headers) -> None:
        """Raises AuthenticationFailed unless `path` is open or a header carries a key."""
        if not self._digests or path in OPEN_PATHS:
            return
        key = _given(headers)
        if key is None:
            raise AuthenticationFailed(
                "no API key: give it as Authorization: Bearer KEY, or as X-Api-Key: KEY", param="Authorization"
            )
        digest = sha256(key.encode()).digest()
        # Every key is compared, in constant time: how long it takes does not tell which one was near.
        if not sum(hmac.compare_digest(digest, known) for known in self._digests):
            raise AuthenticationFailed("this API key is not known", param="Authorization")


def _given(headers: Headers) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key") or None
