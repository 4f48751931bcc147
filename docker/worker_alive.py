"""Health check of the worker image: exit code 0 if a worker of this host (the container) has a live lease."""

import asyncio
import os
import socket
import sys

from ktqueue.broker.broker import Broker
from ktqueue.core.config import load_config


async def alive() -> bool:
    """Whether Redis has a live worker of this host."""
    async with await Broker.open(load_config(environment=os.environ).broker) as broker:
        return any(worker.host == socket.gethostname() for worker in await broker.models.workers())


if __name__ == "__main__":
    sys.exit(not asyncio.run(alive()))
