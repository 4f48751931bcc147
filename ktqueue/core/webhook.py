"""Webhook: the URL to call when a job has ended. It is checked when it is made, without resolving names."""

import ipaddress
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from ktqueue.core.errors import InvalidRequest
from ktqueue.core.short_repr import short_repr

NAT64 = ipaddress.ip_network("64:ff9b::/96")  # RFC 6052: the IPv4 address is in the last 32 bits
UNICAST = ipaddress.ip_network("2000::/3")  # all that is assigned for the public Internet
NAT64_LOCAL = ipaddress.ip_network("64:ff9b:1::/48")  # RFC 8215
EVENTS = ("completed", "failed")  # the job is done, or ended in any other state
MAX_URL = 2_048  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """A URL that gets a POST request when a job ends with one of `events`. Raises InvalidRequest."""

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
        if not good or not self.url.isascii() or any(c.isspace() or not c.isprintable() for c in self.url):
            raise _refuse("url", self.url, limit)
        if not isinstance(self.events, tuple) or not self.events or not set(self.events) <= set(EVENTS):
            raise _refuse("events", self.events, f"some of {', '.join(EVENTS)}")

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Self:
        """Make a webhook from JSON values. Raises InvalidRequest."""
        unknown = value.keys() - {"url", "events"}
        if unknown or "url" not in value:
            raise _refuse(min(unknown, default="url"), dict(value), "an object of url and events")
        events = value.get("events", EVENTS)
        return cls(url=value["url"], events=tuple(events) if isinstance(events, list | tuple) else events)

    def check_allowed(self, secret: str | None, hosts: Collection[str]) -> None:
        """Check that the control worker would call it.

        There must be a secret to sign with. Unless the host is in `hosts`, the URL must be https and its host not
        obviously private. Names are resolved only when the webhook is called.

        Raises InvalidRequest.
        """
        if secret is None:
            raise InvalidRequest("webhooks are off: control.webhook_secret is not set", param="webhook")
        if self.trusted(hosts):
            return
        parts = urlsplit(self.url)
        try:
            (parts.hostname or "").encode("idna")
        except UnicodeError:
            raise _refuse("url", self.url, "a URL whose host has parts of 1 to 63 characters") from None
        if parts.scheme != "https":
            raise _refuse("url", self.url, "an https URL, or of a host in control.webhook_hosts")
        if _is_private(parts.hostname or ""):
            raise _refuse("url", self.url, "on the public Internet, or of a host in control.webhook_hosts")

    def trusted(self, hosts: Collection[str]) -> bool:
        """Whether its `host` or `host:port` is in `hosts`, which may be on a private network and without TLS."""
        parts = urlsplit(self.url)
        return parts.hostname in hosts or f"{parts.hostname}:{parts.port}" in hosts


def is_public(address: str) -> bool:
    """Whether an address is public: not private, local, shared, reserved or multicast."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in NAT64_LOCAL:
            return False
        if ip in NAT64:
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is not None:
            return is_public(str(inner))
        if ip not in UNICAST:  # such as fec0::/10, which was for sites, and ::/96, which were IPv4 addresses
            return False
    return ip.is_global and not ip.is_multicast


def _is_private(host: str) -> bool:
    """Whether the host is `localhost` or a private address, also written like 127.1 or 0x7f000001."""
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
