"""The housekeeping loop that every worker and gateway runs: dead leases, deadlines, trimming."""

import asyncio
import logging

from ktqueue.broker.scripts import Scripts
from ktqueue.broker.terminal import Terminal, microseconds, milliseconds
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import Unavailable

TICK_SECONDS = 0.25
MAX_EXPIRED = 256  # deadlines that one call handles
SCRUBBED = 200  # keys that one call of `scrub` looks at
PASS_LEASES = 5  # from the end of a look at all keys to the beginning of the next, in leases

logger = logging.getLogger(__name__)


class Reaper:
    """Runs the `reap` and `scrub` scripts four times a second; any number of them may run at once."""

    def __init__(self, scripts: Scripts, config: BrokerConfig) -> None:
        self._scripts = scripts
        self._config = config
        self._terminal = Terminal.of(config)

    async def run(self) -> None:
        """Until cancelled. Goes on over outages of Redis."""
        away = False
        while True:
            try:
                while (await self.reap())[1] >= MAX_EXPIRED:
                    pass
                await self.scrub()
                away = False
            except Unavailable as error:
                if not away:
                    logger.warning("%s", error)
                away = True
            await asyncio.sleep(min(TICK_SECONDS, self._config.lease_seconds / 8))

    async def bury(self, worker_id: str) -> None:
        """Take a worker's jobs back now, since its process is known to have ended. Raises Unavailable."""
        await self._scripts.call("bury", worker_id)
        await self.reap()

    async def reap(self) -> tuple[int, int]:
        """One tick. Returns the jobs taken from dead workers and the jobs expired. Raises Unavailable."""
        terminal = self._terminal
        orphans, expired = await self._scripts.call(
            "reap",
            microseconds(self._config.lease_seconds),
            self._config.max_attempts,
            terminal.cancelled,
            terminal.expired,
            terminal.poison,
            terminal.job_ttl,
            terminal.journal_ttl,
            milliseconds(self._config.model_ttl),
        )
        if orphans:
            logger.warning("took %d jobs from dead workers", orphans)
        return orphans, expired

    async def scrub(self, *, keys: int = SCRUBBED, pause: float | None = None) -> bool:
        """Look at so many keys more and mend what does not fit the jobs' records; True at the end of a pass.

        Between passes nothing is done for `pause` seconds, by default five leases. Raises Unavailable.
        """
        if pause is None:
            pause = PASS_LEASES * self._config.lease_seconds
        terminal = self._terminal
        mended, over = await self._scripts.call(
            "scrub",
            terminal.cancelled,
            terminal.expired,
            terminal.poison,
            self._config.max_attempts,
            terminal.job_ttl,
            terminal.journal_ttl,
            keys,
            round(pause * 1_000_000),
        )
        if mended:
            logger.warning("mended %d entries that did not fit the jobs' records", mended)
        return bool(over)
