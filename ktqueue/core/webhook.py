"""Webhook: whom to tell that a job has ended. Valid once made; knows no HTTP and resolves no names."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from ktqueue.core.errors import InvalidRequest
from ktqueue.core.short_repr import short_repr

EVENTS = ("completed", "failed")  # done; ended in any other state
MAX_URL = 2_048  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """A URL that gets a POST at the end of a job, if the end is one of `events`. Raises InvalidRequest."""

    url: str
    events: tuple[str, ...] = EVENTS

    def __post_init__(self) -> None:
        limit = f"an http or https URL of at most {MAX_URL} characters without user and password"
        if not isinstance(self.url, str) or len(self.url) > MAX_URL:
            raise _refuse("url", self.url, limit)
        try:
            parts = urlsplit(self.url)
            good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and "@" not in parts.netloc
        except ValueError:
            good = False
        if not good or not self.url.isascii() or any(one.isspace() or not one.isprintable() for one in self.url):
            raise _refuse("url", self.url, limit)
        if not isinstance(self.events, tuple) or not self.events or not set(self.events) <= set(EVENTS):
            raise _refuse("events", self.events, f"some of {', '.join(EVENTS)}")

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Self:
        """From JSON's types. Raises InvalidRequest."""
        unknown = value.keys() - {"url", "events"}
        if unknown or "url" not in value:
            raise _refuse(min(unknown, default="url"), dict(value), "an object of url and events")
        events = value.get("events", EVENTS)
        return cls(url=value["url"], events=tuple(events) if isinstance(events, list | tuple) else events)

    def check_allowed(self, secret: str | None, hosts: Collection[str]) -> None:
        """Would the control worker call it? It needs a secret to sign with, and https where `hosts` has not the host.

        Raises InvalidRequest.
        """
        if secret is None:
            raise InvalidRequest("webhooks are off: control.webhook_secret is not set", param="webhook")
        if not self.trusted(hosts) and urlsplit(self.url).scheme != "https":
            raise _refuse("url", self.url, "an https URL, or of a host in control.webhook_hosts")

    def trusted(self, hosts: Collection[str]) -> bool:
        """Is its `host` or `host:port` among those that may be on a private network, and without TLS?"""
        parts = urlsplit(self.url)
        return parts.hostname in hosts or f"{parts.hostname}:{parts.port}" in hosts


def _refuse(name: str, value: object, limit: str) -> InvalidRequest:
    shown = short_repr(value)
    return InvalidRequest(
        f"webhook.{name} must be {limit}, got {shown}", param=f"webhook.{name}", limit=limit, value=shown
    )
