"""`ktqueue gateway`: runs the application under uvicorn. At a stop, open streams may end first."""

import asyncio
import logging
import resource
import socket
from contextlib import closing
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from ktqueue.broker.broker import Broker
from ktqueue.core import garbage
from ktqueue.core.config import Config, GatewayConfig
from ktqueue.core.listeners import BACKLOG, listen
from ktqueue.gateway.app import create_app
from ktqueue.gateway.gateway import Gateway
from ktqueue.gateway.http.connections import MAX_OVERFLOW, Connections
from ktqueue.gateway.http.hosts import is_local
from ktqueue.gateway.http.http10 import Http10
from ktqueue.gateway.http.protocol import LimitedProtocol
from ktqueue.gateway.http.uvicorn_internals import check_uvicorn

OTHER_FILES = 256  # open files that are not client connections: Redis, logs, libraries
PROBE_CONNECTIONS = 64  # on the port for probes
logger = logging.getLogger(__name__)


class GatewayServer(uvicorn.Server):
    """A server that stops in order: it accepts no connections, lets open streams end, then ends the others.

    SIGTERM or SIGINT begins the stop. A second signal ends the process at once.
    """

    def __init__(self, config: uvicorn.Config, gateway: Gateway, connections: Connections) -> None:
        super().__init__(config)
        self.gateway = gateway
        self.connections = connections  # without those of the port for probes

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, also on the port for probes if there is one, and serve until the stop.

        Raises ConfigError if it cannot listen, before anything has started or is logged.
        """
        with closing(listen(self.gateway.config.gateway)) as self._listeners:
            warn_without_keys(self.gateway.config.gateway)
            await super().serve(self._listeners.main)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, and accept connections."""
        await super().startup(sockets)
        protocol = partial(
            _protocol(self.gateway, Connections(PROBE_CONNECTIONS), probes_only=True),
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        loop = asyncio.get_running_loop()
        for listener in self._listeners.probes:
            self.servers.append(await loop.create_server(protocol, sock=listener, backlog=BACKLOG))
        for listener in (*self._listeners.main, *self._listeners.probes):
            logger.info("listening on %s:%d", *listener.getsockname()[:2])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the stop, or end it at once. Unlike with the parent class, the process exits with 0."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
        self.gateway.draining = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, and after `drain_seconds` end the streams that are still open."""
        self.gateway.draining = True
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self.gateway.config.gateway.drain_seconds, self.gateway.interrupt)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def build_server(config: Config) -> GatewayServer:
    """A server for `config` that is not running yet. Raises ConfigError if the installed uvicorn does not fit."""
    check_uvicorn()
    settings = config.gateway
    app = create_app(config)
    gateway: Gateway = app.state.gateway
    connections = Connections(
        settings.socket_limit, per_address=settings.max_sockets_per_address, trusted=settings.trusted_addresses
    )
    server_config = uvicorn.Config(
        Http10(app),
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=_protocol(gateway, connections, probes_only=False),
        ws="none",
        lifespan="on",
        access_log=False,  # `http/access_log.py` logs requests
        log_config=None,  # logging is set up by the process
        server_header=False,
        timeout_keep_alive=settings.keep_alive_timeout,  # type: ignore[arg-type]  # fractions of a second work too
        timeout_graceful_shutdown=max(1, round(settings.drain_seconds + 5)),
    )
    return GatewayServer(server_config, gateway, connections)


def _protocol(gateway: Gateway, connections: Connections, *, probes_only: bool) -> Any:
    """What makes a protocol for each connection of a port."""
    return partial(LimitedProtocol, gateway.config, gateway.metrics, connections, probes_only=probes_only)


def serve(config: Config) -> None:
    """Serve until SIGTERM or SIGINT. Raises Unavailable or ConfigError: no usable broker, or no usable address."""
    asyncio.run(_check_broker(config))
    server = build_server(_within_files(config))
    garbage.settle()  # collecting present objects again and again took a fifth of the time
    server.run()


def warn_without_keys(settings: GatewayConfig) -> None:
    """Log that strangers may use the gateway, if they can reach it and need no key."""
    if not settings.needs_key and not is_local(settings.host):
        logger.warning(
            "everybody who reaches %s:%d may use this gateway, since no API key is set; `ktqueue keys new` makes one",
            settings.host,
            settings.port,
        )


async def _check_broker(config: Config) -> None:
    """Open and close a broker. The same error inside the server would print a long traceback."""
    await (await Broker.open(config.broker, patience=config.broker.connect_timeout)).close()


def _within_files(config: Config) -> Config:
    """Raise the process's limit of open files for its connections. If the system refuses, lower `max_sockets`."""
    wanted = config.gateway.socket_limit
    files = _allow_files(wanted + MAX_OVERFLOW + PROBE_CONNECTIONS + OTHER_FILES)
    possible = max(1, files - MAX_OVERFLOW - PROBE_CONNECTIONS - OTHER_FILES)
    if possible >= wanted:
        return config
    logger.warning(
        "only %d open files are allowed, so gateway.max_sockets is %d instead of %d", files, possible, wanted
    )
    return replace(config, gateway=replace(config.gateway, max_sockets=possible))


def _allow_files(wanted: int) -> int:
    """Raise the limit of open files to `wanted`, as far as the system allows. Returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(soft, allowed)
