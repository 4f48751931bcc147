"""The broker of one process: connections to Redis, and jobs, journals, models and more on top of them."""

import asyncio
from pathlib import Path
from typing import Self

from ktqueue.broker.batches import Batches
from ktqueue.broker.conversations import Conversations
from ktqueue.broker.files import Files
from ktqueue.broker.jobs import Jobs
from ktqueue.broker.journal import Journal
from ktqueue.broker.keys import Keys
from ktqueue.broker.models import Models
from ktqueue.broker.reaper import Reaper
from ktqueue.broker.redis.connection import RedisConnection
from ktqueue.broker.redis.hub import Hub
from ktqueue.broker.redis.node import ServerLost
from ktqueue.broker.redis.private_server import running_url
from ktqueue.broker.responses import Responses
from ktqueue.broker.scripts import Scripts
from ktqueue.broker.webhooks import Webhooks
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import Unavailable

MAILBOX_BYTES = 1 << 20  # default size of a journal reader's mailbox
OPEN_PAUSE = 0.1  # seconds between attempts to find a server


class Broker:
    """One per process, made by `open`. It is an async context manager."""

    def __init__(
        self, connection: RedisConnection, config: BrokerConfig, max_mailbox_bytes: int = MAILBOX_BYTES
    ) -> None:
        self.config = config
        self.keys = Keys(config.prefix)
        self.scripts = Scripts(connection, self.keys, config)
        self.hub = Hub(connection.subscriber)
        self.jobs = Jobs(self.scripts, config)
        self.conversations = Conversations(self.scripts, config)
        self.responses = Responses(self.scripts, config)
        self.journal = Journal(self.scripts, self.hub, self.keys, config, max_mailbox_bytes)
        self.models = Models(self.scripts)
        self.webhooks = Webhooks(self.scripts)
        self.files = Files(self.scripts)
        self.batches = Batches(self.scripts, config)
        self._connection = connection

    @classmethod
    async def open(cls, config: BrokerConfig, *, max_mailbox_bytes: int = MAILBOX_BYTES, patience: float = 0.0) -> Self:
        """Find the server and check it: version 6.2 or newer, no eviction, no replica, durable as the settings require.

        Without a URL, this is the private server that runs on the state folder. While no server answers, the search is
        repeated for `patience` seconds. Raises Unavailable or ConfigError.
        """
        url = config.url or running_url(config.state_dir)
        if url is None:
            raise _nothing_runs(config)
        connection = RedisConnection(url, config, Keys(config.prefix).tag)
        end = asyncio.get_running_loop().time() + patience
        try:
            while True:
                try:
                    await connection.open()
                    break
                except ServerLost:
                    if asyncio.get_running_loop().time() + OPEN_PAUSE > end:
                        raise
                await asyncio.sleep(OPEN_PAUSE)
        except BaseException:
            await connection.close()
            raise
        return cls(connection, config, max_mailbox_bytes)

    def reaper(self) -> Reaper:
        """Make the housekeeping loop of this process."""
        return Reaper(self.scripts, self.config)

    async def close(self) -> None:
        """Close all connections. Close leases before."""
        await self.journal.close()
        await self.hub.close()
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _nothing_runs(config: BrokerConfig) -> Unavailable:
    return Unavailable(
        f"no Redis: broker.url is not set, and no `ktqueue up` runs on {Path(config.state_dir).absolute()}; "
        "start one there, or name one that runs: KTQUEUE_BROKER_STATE_DIR or --state-dir for its folder, "
        "KTQUEUE_BROKER_URL or --redis-url for its Redis",
        param="broker.url",
    )
