"""`ktqueue gateway`: the application under uvicorn, and a stop that lets streams end (the door to uvicorn)."""

import asyncio
import gc
import logging
import resource
import socket
import sys
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from ktqueue.broker.broker import Broker
from ktqueue.core.config import Config
from ktqueue.gateway.app import create_app
from ktqueue.gateway.gateway import Gateway
from ktqueue.gateway.http.connections import OVERFLOW, Connections
from ktqueue.gateway.http.http10 import Http10
from ktqueue.gateway.http.protocol import LimitedProtocol

GARBAGE = 20_000  # new objects between two looks for cycles: a token makes some, and none of them in a cycle
OTHER_FILES = 256  # open files that are no client's connection: those to Redis, logs, libraries
PROBE_CONNECTIONS = 64  # of the listener for probes
ADDRESS_IN_USE = 3  # exit code, as uvicorn's own
logger = logging.getLogger(__name__)


class GatewayServer(uvicorn.Server):
    """A server that stops in order: no new connections, open streams may end, then they are ended.

    SIGTERM or SIGINT begins the stop; the same signal again ends it at once.
    """

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, for probes too where they have a port of their own. Ends the process with 3 where that can't be."""
        await super().startup(sockets)
        settings = self._gateway.config.gateway
        if settings.probe_port is None or self.should_exit:
            return
        protocol = partial(
            LimitedProtocol,
            settings=settings,
            metrics=self._gateway.metrics,
            connections=Connections(PROBE_CONNECTIONS),
            probes_only=True,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        try:
            loop = asyncio.get_running_loop()
            self.servers.append(await loop.create_server(protocol, settings.host, settings.probe_port))
        except OSError as error:
            logger.error("gateway.probe_port %d cannot be listened on: %s", settings.probe_port, error)
            await self.lifespan.shutdown()
            sys.exit(ADDRESS_IN_USE)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the stop, or hurry it; unlike the parent's, the process then exits with 0."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
        self._gateway.draining = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting; after `drain_seconds` tell the streams that are left to end."""
        self._gateway.draining = True
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._gateway.config.gateway.drain_seconds, self._gateway.interrupt)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def build_server(config: Config) -> GatewayServer:
    """A server for `config`, not yet running."""
    settings = config.gateway
    app = create_app(config)
    gateway: Gateway = app.state.gateway
    connections = Connections(
        settings.socket_limit, per_address=settings.max_sockets_per_address, trusted=settings.trusted_addresses
    )
    protocol: Any = partial(
        LimitedProtocol, settings=settings, metrics=gateway.metrics, connections=connections, probes_only=False
    )
    server_config = uvicorn.Config(
        Http10(app),
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=protocol,
        ws="none",
        lifespan="on",
        access_log=False,  # ours has more to say: access_log.py
        log_config=None,  # as the process logs
        server_header=False,
        timeout_keep_alive=settings.keep_alive_timeout,  # type: ignore[arg-type]  # a number of seconds all the same
        timeout_graceful_shutdown=max(1, round(settings.drain_seconds + 5)),
    )
    return GatewayServer(server_config, gateway)


def serve(config: Config) -> None:
    """Serve until SIGTERM or SIGINT. Raises Unavailable or ConfigError when there is no usable broker.

    Ends the process with 3 when the address cannot be listened on.
    """
    asyncio.run(_check_broker(config))
    server = build_server(_within_files(config))
    gc.freeze()  # what is there now stays; looking through it again and again took a fifth of the time
    gc.set_threshold(GARBAGE)
    server.run()


async def _check_broker(config: Config) -> None:
    """Fail here, by name; inside the server the same error would be a long traceback."""
    await (await Broker.open(config.broker, patience=config.broker.connect_timeout)).close()


def _within_files(config: Config) -> Config:
    """Raise the limit of open files, each connection being one; what the system does not let us have is no socket."""
    wanted = config.gateway.socket_limit
    files = _allow_files(wanted + OVERFLOW + PROBE_CONNECTIONS + OTHER_FILES)
    possible = max(1, files - OVERFLOW - PROBE_CONNECTIONS - OTHER_FILES)
    if possible >= wanted:
        return config
    logger.warning("%d open files are allowed, so gateway.max_sockets is %d instead of %d", files, possible, wanted)
    return replace(config, gateway=replace(config.gateway, max_sockets=possible))


def _allow_files(wanted: int) -> int:
    """Raise the limit of open files as far as the system lets us; what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(soft, allowed)
