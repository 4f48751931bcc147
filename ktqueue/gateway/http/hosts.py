"""The names under which a gateway without keys answers.

A web page may let its own name resolve to 127.0.0.1 (DNS rebinding). For the browser the gateway then has the page's
origin, so only the `Host` header shows where the request is from.
"""

import re
from ipaddress import ip_address

from starlette.datastructures import Headers

from ktqueue.core.config import GatewayConfig
from ktqueue.gateway.errors import HostNotAllowed

_PORT = re.compile(r"\.?(:[0-9]*)?$")
_LOCAL = ("localhost", "*.localhost")  # browsers never ask a name server for these


class AllowedHosts:
    """The values of `Host` that are accepted: all if keys are needed, or if others can reach the gateway anyway."""

    def __init__(self, config: GatewayConfig) -> None:
        checked = config.allowed_hosts or (not config.needs_key and is_local(config.host))
        self._names = (*_LOCAL, *(name.lower() for name in config.allowed_hosts)) if checked else ("*",)

    def check(self, headers: Headers) -> None:
        """Raises HostNotAllowed. IP addresses are accepted, since no name server is asked for them."""
        name = _PORT.sub("", headers.get("host", "").lower())
        if not name or _is_address(name.strip("[]")) or any(_fits(name, allowed) for allowed in self._names):
            return
        raise HostNotAllowed(
            f"this gateway does not answer as {name[:80]!r}: use localhost or an IP address, or add the name to "
            "gateway.allowed_hosts",
            param="host",
            value=name[:80],
        )


def _fits(name: str, allowed: str) -> bool:
    return allowed in ("*", name) or (allowed.startswith("*.") and name.endswith(allowed[1:]))


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def is_local(host: str) -> bool:
    """Whether only this machine can reach the address."""
    return host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)
