"""A process's hold on the broker: one connection pool, one subscription, and the nouns over them."""

from types import TracebackType
from typing import Self

from ktqueue.broker.connection import Connection, ReplyError
from ktqueue.broker.hub import Hub
from ktqueue.broker.jobs import Jobs
from ktqueue.broker.journal import Journal
from ktqueue.broker.keys import Keys
from ktqueue.broker.models import Models
from ktqueue.broker.reaper import Reaper
from ktqueue.broker.scripts import Scripts
from ktqueue.broker.server import running_url
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import Unavailable

LOWEST_VERSION = (6, 2)
MAILBOX_BYTES = 1 << 20  # of one journal reader, unless said otherwise


class Broker:
    """One per process; made by `open`. Usable as an async context manager."""

    def __init__(self, connection: Connection, config: BrokerConfig, max_mailbox_bytes: int = MAILBOX_BYTES) -> None:
        self.config = config
        self.keys = Keys(config.prefix)
        self.scripts = Scripts(connection, self.keys, config)
        self.hub = Hub(connection.subscriber)
        self.jobs = Jobs(self.scripts, config)
        self.journal = Journal(self.scripts, self.hub, self.keys, config, max_mailbox_bytes)
        self.models = Models(self.scripts)
        self._connection = connection

    @classmethod
    async def open(cls, config: BrokerConfig, *, max_mailbox_bytes: int = MAILBOX_BYTES) -> Self:
        """Connect and check the server: version 6.2 at least, nothing evicted.

        Without a URL: the private server that runs on the state folder. Raises Unavailable.
        """
        url = config.url or running_url(config.state_dir)
        if url is None:
            raise Unavailable(
                f"no broker.url is set and no private server runs in {config.state_dir}; start one with `ktqueue up`",
                param="broker.url",
            )
        connection = Connection(url, config)
        try:
            try:
                facts = await connection.facts()
            except ReplyError as error:
                raise Unavailable(f"Redis refuses INFO: {error}", param="broker.url") from error
            version = tuple(int(part) for part in str(facts["redis_version"]).split(".")[:2])
            if version < LOWEST_VERSION:
                raise Unavailable(f"Redis is {facts['redis_version']}, 6.2 is needed", limit="6.2")
            policy = facts["maxmemory_policy"]
            if policy != "noeviction":
                raise Unavailable(f"Redis has maxmemory-policy {policy}, noeviction is needed", limit="noeviction")
        except BaseException:
            await connection.close()
            raise
        return cls(connection, config, max_mailbox_bytes)

    def reaper(self) -> Reaper:
        """The housekeeping loop of this process."""
        return Reaper(self.scripts, self.config)

    async def close(self) -> None:
        """Drop all connections. Leases are closed by their owners, before."""
        await self.hub.close()
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
