"""Webhook: whom to tell that a job has ended. Valid once made; knows no HTTP and resolves no names."""

import ipaddress
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from ktqueue.core.errors import InvalidRequest
from ktqueue.core.short_repr import short_repr

NAT64 = ipaddress.ip_network("64:ff9b::/96")  # RFC 6052: the IPv4 address is in the last 32 bits
NAT64_LOCAL = ipaddress.ip_network("64:ff9b:1::/48")  # RFC 8215
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
        """Would the control worker call it? It needs a secret to sign with; and where `hosts` has not the host, https
        and a host that is not plainly a private one. What a name leads to is known when it is called.

        Raises InvalidRequest.
        """
        if secret is None:
            raise InvalidRequest("webhooks are off: control.webhook_secret is not set", param="webhook")
        if self.trusted(hosts):
            return
        parts = urlsplit(self.url)
        if parts.scheme != "https":
            raise _refuse("url", self.url, "an https URL, or of a host in control.webhook_hosts")
        if _is_private(parts.hostname or ""):
            raise _refuse("url", self.url, "on the public Internet, or of a host in control.webhook_hosts")

    def trusted(self, hosts: Collection[str]) -> bool:
        """Is its `host` or `host:port` among those that may be on a private network, and without TLS?"""
        parts = urlsplit(self.url)
        return parts.hostname in hosts or f"{parts.hostname}:{parts.port}" in hosts


def is_public(address: str) -> bool:
    """May a stranger name this address? Not a private, local, shared, reserved or multicast one."""
    one = ipaddress.ip_address(address)
    if isinstance(one, ipaddress.IPv6Address):
        if one in NAT64_LOCAL:
            return False
        if one in NAT64:
            return is_public(str(ipaddress.IPv4Address(int(one) & 0xFFFFFFFF)))
        inner = one.ipv4_mapped or one.sixtofour or (one.teredo[1] if one.teredo else None)
        if inner is not None:
            return is_public(str(inner))
    return one.is_global and not one.is_multicast


def _is_private(host: str) -> bool:
    """Is it `localhost`, or the address itself of a host that no stranger may name? 127.1 and 0x7f000001 are, too."""
    name = host.partition("%")[0].rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return not is_public(name if ":" in name else socket.inet_ntoa(socket.inet_aton(name)))
    except (OSError, ValueError):
        return False


def _refuse(name: str, value: object, limit: str) -> InvalidRequest:
    shown = short_repr(value)
    return InvalidRequest(
        f"webhook.{name} must be {limit}, got {shown}", param=f"webhook.{name}", limit=limit, value=shown
    )
