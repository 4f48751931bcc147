"""Settings of the gateway."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_network

from ktqueue.core.errors import ConfigError
from ktqueue.core.settings.setting import check_order, check_settings, setting
from ktqueue.core.tenants import TenantConfig, check_hashes, check_tenants

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s@*]+")  # as browsers send it: no path, no slash at the end
_HOST = re.compile(r"\*|(\*\.)?[a-zA-Z0-9_-]+(\.[a-zA-Z0-9_-]+)*")  # no port


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """The HTTP server. Times in seconds, sizes in bytes."""

    host: str = setting("127.0.0.1", "Address to listen on.", metavar="ADDRESS", panel="Gateway")
    port: int = setting(
        8000,
        "Port to listen on.",
        details="0: any free port, which the log names.",
        at_most=65535,
        metavar="N",
        panel="Gateway",
    )
    api_keys: tuple[str, ...] = setting(
        (),
        "SHA-256 of a key that clients must send (see ktqueue keys new); several with commas.",
        details="Without keys here or of tenants, every request is accepted.",
        flags=("--api-key-hash",),
        metavar="HASH",
        panel="Gateway",
    )
    tenants: tuple[TenantConfig, ...] = setting(
        (),
        "Owners of further keys.",
        details="Tables `[[gateway.tenants]]`, in the environment JSON: see [tenants](../guides/tenants.md).",
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "Origins whose pages may call the API from a browser, such as `https://chat.example.org`; `*`: any.",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "Names in a URL under which the gateway answers, such as `llm.example.org` or `*.example.org`; `*`: any.",
        details="Without names here, a gateway that listens on a loopback address and has no keys answers only as "
        "`localhost`, `*.localhost` or an IP address.",
    )
    web_page: bool = setting(
        True,
        "Serve a web page with a chat and the state of the queue at /.",
        flags=("--web-page/--no-web-page",),
        panel="Gateway",
    )
    max_body_bytes: int = setting(8 << 20, "Largest request body. A larger one is refused with 413.", at_least=1)
    max_bodies_bytes: int = setting(
        64 << 20, "Bytes of all bodies that are being read. Beyond it the largest are refused with 503."
    )
    max_connections: int = setting(
        2_000,
        "Requests that are answered at once. More are refused with 503.",
        details="A request whose body is still arriving does not count.",
        at_least=1,
    )
    max_sockets: int | None = setting(
        None,
        "Open TCP connections. Beyond it, one that waits for its client is closed.",
        shown="twice `max_connections`, and 64",
        at_least=1,
    )
    max_sockets_per_address: int = setting(
        512, "Open TCP connections of one client address (of IPv6: one /64). 0: no limit.", at_least=0
    )
    trusted_addresses: tuple[str, ...] = setting(
        ("127.0.0.1", "::1"), "Addresses or networks without that limit, such as a reverse proxy's."
    )
    probe_port: int | None = setting(
        None, "A second port, for `/healthz`, `/readyz` and `/metrics` only. 0: any free port.", at_most=65535
    )
    max_url_bytes: int = setting(8 << 10, "Longest URL. A longer one is refused with 414.", at_least=256)
    max_header_bytes: int = setting(
        16 << 10, "URL, headers and trailers of a request together. More is refused with 431.", at_least=256
    )
    max_headers: int = setting(
        100, "Number of headers and trailers of a request. More are refused with 431.", at_least=1
    )
    header_timeout: float = setting(
        10.0,
        "From the connection, or the first byte of a later request, to the end of the headers. Then 408.",
        details="If the client sent nothing, the connection is closed without an answer.",
        at_least=0.01,
    )
    body_timeout: float = setting(60.0, "From the end of the headers to the end of the body. Then 408.", at_least=0.01)
    min_body_rate: int = setting(
        1 << 10, "Bytes a second that a body must average after its first 5 seconds. Else 408.", at_least=1
    )
    keep_alive_timeout: float = setting(15.0, "How long a connection stays open between two requests.", at_least=0.01)
    heartbeat_seconds: float = setting(15.0, "A stream without events sends a comment so often.", at_least=0.01)
    first_event_wait: float = setting(2.0, "An error within this time still gets its own HTTP status in a stream.")
    max_mailbox_bytes: int = setting(
        1 << 20, "Events that are kept for one slow reader, who then continues from the journal.", at_least=1
    )
    stall_seconds: float = setting(
        60.0, "A client that neither sends its body nor reads its response for so long is dropped.", at_least=0.01
    )
    drain_seconds: float = setting(10.0, "Open streams may end within this time before the gateway stops.")

    def __post_init__(self) -> None:
        """Raises ConfigError naming the key."""
        check_hashes(self.api_keys, "gateway.api_keys", "gateway.api_keys")
        check_tenants(self.tenants, self.api_keys)
        check_settings("gateway", self)
        check_order("gateway", self, "max_body_bytes", "max_bodies_bytes")
        _networks(self.trusted_addresses, "gateway.trusted_addresses")
        _origins(self.cors_origins, "gateway.cors_origins")
        _hosts(self.allowed_hosts, "gateway.allowed_hosts")

    @property
    def needs_key(self) -> bool:
        """Whether clients must send a key."""
        return bool(self.api_keys or self.tenants)

    @property
    def socket_limit(self) -> int:
        """How many TCP connections may be open at once."""
        return 2 * self.max_connections + 64 if self.max_sockets is None else self.max_sockets


def _networks(values: Iterable[str], key: str) -> None:
    """Check IP addresses, or networks such as 10.0.0.0/8. Raises ConfigError."""
    for value in values:
        try:
            ip_network(value, strict=False)
        except ValueError as error:
            raise ConfigError.must_be(key, "IP addresses or networks", value, limit="addresses or networks") from error


def _origins(values: Iterable[str], key: str) -> None:
    """Check origins as browsers send them, or * for all. Raises ConfigError."""
    for value in values:
        if value != "*" and not _ORIGIN.fullmatch(value):
            limit = "* or scheme://host[:port]"
            raise ConfigError.must_be(key, "origins such as https://example.org:8443, or *", value, limit=limit)


def _hosts(values: Iterable[str], key: str) -> None:
    """Check names of hosts, or * for all. Raises ConfigError."""
    for value in values:
        if not _HOST.fullmatch(value):
            limit = "*, name or *.name"
            raise ConfigError.must_be(key, "names without a port such as llm.example.org, or *", value, limit=limit)
