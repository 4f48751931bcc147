"""Listeners: the TCP sockets of a gateway. All are opened before it starts, so that a wrong address is one error."""

import errno
import socket
from contextlib import ExitStack
from typing import NamedTuple

from ktqueue.core.errors import ConfigError
from ktqueue.core.settings.gateway import GatewayConfig

BACKLOG = 2_048  # connections that the system accepts before the gateway does


class PortTaken(ConfigError):
    """Another process listens on the port. It may end, so a later try may succeed."""


class Listeners(NamedTuple):
    """Listening sockets, one for each address of `gateway.host`. Without `gateway.probe_port` there are no `probes`."""

    main: list[socket.socket]
    probes: list[socket.socket]

    @property
    def port(self) -> int:
        """The port, also if `gateway.port` is 0."""
        return int(self.main[0].getsockname()[1])

    def close(self) -> None:
        """Stop listening."""
        for listener in (*self.main, *self.probes):
            listener.close()


def listen(settings: GatewayConfig) -> Listeners:
    """Listen on the port, and on the port for probes. Port 0 becomes any free one. Raises ConfigError or PortTaken."""
    with ExitStack() as opened:
        main = _listen(settings.host, settings.port, "gateway.port", opened)
        probes: list[socket.socket] = []
        if settings.probe_port is not None:
            probes = _listen(settings.host, settings.probe_port, "gateway.probe_port", opened)
        opened.pop_all()
    return Listeners(main, probes)


def _listen(host: str, port: int, key: str, opened: ExitStack) -> list[socket.socket]:
    """Sockets for the addresses of a host. One that this machine lacks is left out if there is another."""
    listeners: list[socket.socket] = []
    missing: OSError | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                listener = opened.enter_context(socket.socket(family, kind, protocol))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind((address[0], port, *address[2:]))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                missing = error
            else:
                listener.listen(BACKLOG)  # only now the system says whether another socket listens
                port = listener.getsockname()[1]  # all addresses have the same port
                listeners.append(listener)
        if missing is not None and not listeners:
            raise missing
    except (OSError, ValueError) as error:  # ValueError: no host can have this name
        reason = getattr(error, "strerror", None) or "no host can have this name"
        code = getattr(error, "errno", None)
        message = f"the gateway cannot listen on gateway.host {host}, {key} {port}: {reason}"
        if code == errno.EADDRINUSE:
            raise PortTaken(message, param=key, value=port) from error
        if code in (errno.EACCES, errno.EPERM):
            raise ConfigError(message, param=key, value=port) from error
        raise ConfigError(message, param="gateway.host", value=host) from error
    return listeners
