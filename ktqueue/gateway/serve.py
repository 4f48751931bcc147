"""`ktqueue gateway`: the application under uvicorn, and a stop that lets streams end (the door to uvicorn)."""

import asyncio
import gc
import resource
import socket
from types import FrameType

import uvicorn

from ktqueue.broker.broker import Broker
from ktqueue.core.config import Config
from ktqueue.gateway.app import create_app
from ktqueue.gateway.gateway import Gateway

GARBAGE = 20_000  # new objects between two looks for cycles: a token makes some, and none of them in a cycle
CONNECTIONS_PER_REQUEST = 2  # idle keep-alive connections beside the active ones, before new ones are refused


class GatewayServer(uvicorn.Server):
    """A server that stops in order: no new connections, open streams may end, then they are ended.

    SIGTERM or SIGINT begins the stop; the same signal again ends it at once.
    """

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway

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
    server_config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        access_log=False,  # ours has more to say: access_log.py
        log_config=None,  # as the process logs
        server_header=False,
        limit_concurrency=CONNECTIONS_PER_REQUEST * settings.max_connections + 64,
        timeout_graceful_shutdown=max(1, round(settings.drain_seconds + 5)),
    )
    return GatewayServer(server_config, app.state.gateway)


def serve(config: Config) -> None:
    """Serve until SIGTERM or SIGINT. Raises Unavailable or ConfigError when there is no usable broker.

    Ends the process with 3 when the address cannot be listened on.
    """
    asyncio.run(_check_broker(config))
    _allow_files(2 * CONNECTIONS_PER_REQUEST * config.gateway.max_connections)
    server = build_server(config)
    gc.freeze()  # what is there now stays; looking through it again and again took a fifth of the time
    gc.set_threshold(GARBAGE)
    server.run()


async def _check_broker(config: Config) -> None:
    """Fail here, by name; inside the server the same error would be a long traceback."""
    await (await Broker.open(config.broker, patience=config.broker.connect_timeout)).close()


def _allow_files(wanted: int) -> None:
    """Raise the limit of open files, each connection being one, as far as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
