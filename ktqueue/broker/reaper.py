"""The housekeeping loop that every worker and gateway runs: dead leases, deadlines, trimming."""

import asyncio
import logging

from ktqueue.broker.scripts import Scripts
from ktqueue.broker.terminal_events import Terminal, microseconds, milliseconds
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import Unavailable

TICK_SECONDS = 0.25
UNSERVED_SECONDS = 1.0  # between looks for jobs that no worker can take
MAX_EXPIRED = 256  # deadlines that one call handles
SCRUBBED = 200  # keys that one call of `scrub` looks at
PASS_LEASES = 5  # from the end of a look at all keys to the beginning of the next, in leases

logger = logging.getLogger(__name__)


class Reaper:
    """Runs the `reap` and `scrub` scripts four times a second and `unserved` once; any number may run at once."""

    def __init__(self, scripts: Scripts, config: BrokerConfig) -> None:
        self._scripts = scripts
        self._config = config
        self._terminal = Terminal.of(config)

    async def run(self) -> None:
        """Until cancelled. Goes on over outages of Redis."""
        away = False
        loop = asyncio.get_running_loop()
        look = loop.time() + UNSERVED_SECONDS
        while True:
            try:
                while (await self.reap())[1] >= MAX_EXPIRED:
                    pass
                await self.scrub()
                if loop.time() >= look:
                    look = loop.time() + UNSERVED_SECONDS
                    await self.fail_unserved()
                away = False
            except Unavailable as error:
                if not away:
                    logger.warning("%s", error)
                away = True
            await asyncio.sleep(min(TICK_SECONDS, self._config.lease_seconds / 8))

    async def bury(self, worker_id: str, *, blameless: bool = False) -> None:
        """Take a worker's jobs back now, since its process is known to have ended.

        `blameless`: none of its jobs can have been the cause, so that this is nobody's try. Raises Unavailable.
        """
        await self._scripts.call("release_lease", worker_id, "1" if blameless else "")
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

    async def fail_unserved(self) -> int:
        """Fail jobs that none of their model's workers can take, and none could for `broker.digest_wait`.

        Returns how many. Raises Unavailable.
        """
        terminal = self._terminal
        failed: int = await self._scripts.call(
            "fail_unserved",
            microseconds(self._config.digest_wait),
            terminal.model_changed,
            terminal.version_changed,
            terminal.job_ttl,
            terminal.journal_ttl,
        )
        if failed:
            logger.warning("failed %d jobs that no worker of their model can go on with", failed)
        return failed

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
