"""Servers to measure, in temporary folders: Redis alone, or all that `ktqueue up` runs."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from ktqueue.broker.redis.private_server import PrivateServer
from ktqueue.core.config import BrokerConfig, Config, EngineConfig, GatewayConfig, ProfileConfig, WorkerConfig
from ktqueue.workers.supervision.supervisor import Supervisor


@contextmanager
def private_redis(**options: Any) -> Iterator[tuple[str, int]]:
    """The URL and the process id of a new Redis server. `options`: arguments of `PrivateServer.start`."""
    with tempfile.TemporaryDirectory() as folder:
        server = PrivateServer()
        url = server.start(folder, **options)
        try:
            assert server.pid is not None
            yield url, server.pid
        finally:
            server.stop()


@asynccontextmanager
async def whole_system(
    engine: EngineConfig, workers: int = 1, worker: WorkerConfig | None = None, profile: ProfileConfig | None = None
) -> AsyncIterator[Supervisor]:
    """Redis, gateway and workers, as under `ktqueue up`. The engines are ready."""
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            broker=BrokerConfig(state_dir=str(Path(folder) / "state")),
            engine=engine,
            worker=worker or WorkerConfig(),
            gateway=GatewayConfig(port=0),
            profile=profile or ProfileConfig(),
        )
        async with Supervisor(config, workers=workers) as up:
            yield up
