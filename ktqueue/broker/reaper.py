"""The housekeeping loop that every worker and gateway runs: expired leases, deadlines, inconsistent records."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ktqueue.broker.scripts import ScriptRefused, Scripts
from ktqueue.broker.terminal_events import TerminalEvents, microseconds, milliseconds
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import Unavailable

TICK_SECONDS = 0.25
SLOW_SECONDS = 1.0  # between searches for jobs that no worker can take, and for the next pass of `scrub`
MAX_EXPIRED = 256  # deadlines that one call of `reap` handles
SCRUBBED = 200  # keys that one call of `scrub` checks
PASS_LEASES = 5  # lease times between two passes of `scrub` over all keys

logger = logging.getLogger(__name__)


class Reaper:
    """Runs `reap` four times a second, also `scrub` during a pass, and `fail_unserved` once.

    Any number of reapers may run at once.
    """

    def __init__(self, scripts: Scripts, config: BrokerConfig) -> None:
        self._scripts = scripts
        self._config = config
        self._terminal = TerminalEvents.of(config)
        self._pass_is_over = False

    async def run(self) -> None:
        """Run until cancelled, also through outages of Redis. Any other error is logged, and the loop goes on."""
        faults: dict[str, str] = {}
        loop = asyncio.get_running_loop()
        next_slow = loop.time() + SLOW_SECONDS
        while True:
            steps: list[Callable[[], Awaitable[object]]] = [self._reap_all]
            is_slow = loop.time() >= next_slow
            if is_slow or not self._pass_is_over:
                steps.append(self.scrub)
            if is_slow:
                next_slow = loop.time() + SLOW_SECONDS
                steps.append(self.fail_unserved)
            for step in steps:  # one that fails does not keep the others from repairing what it met
                await self._run_step(step, faults)
            await asyncio.sleep(min(TICK_SECONDS, self._config.lease_seconds / 8))

    async def _run_step(self, step: Callable[[], Awaitable[object]], faults: dict[str, str]) -> None:
        """Run a step. Its fault is logged unless it is the same as last time, which `faults` has by name."""
        name = step.__name__.strip("_")
        try:
            await step()
            faults.pop(name, None)
        except Exception as error:
            if faults.get(name) != str(error):
                is_known = isinstance(error, Unavailable | ScriptRefused)
                logger.warning("%s will be tried again: %s", name, error, exc_info=None if is_known else error)
            faults[name] = str(error)

    async def _reap_all(self) -> None:
        while (await self.reap())[1] >= MAX_EXPIRED:
            pass

    async def release_lease(self, worker_id: str, *, blameless: bool = False) -> None:
        """Release the lease of a worker whose process has exited, so that its jobs restart now.

        `blameless`: no job can have caused the exit, so it does not count as a death for any. Raises Unavailable.
        """
        await self._scripts.call("release_lease", worker_id, "1" if blameless else "")
        await self.reap()

    async def reap(self) -> tuple[int, int]:
        """Reap once. Returns the numbers of jobs taken from dead workers and of expired jobs. Raises Unavailable."""
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
        """Fail the jobs that no worker of their model could take for `broker.digest_wait`. Returns how many.

        Raises Unavailable.
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
            logger.warning("failed %d jobs that no worker of their model can take", failed)
        return failed

    async def scrub(self, *, keys: int = SCRUBBED, pause: float | None = None) -> bool:
        """Check the next `keys` keys and repair what contradicts the jobs' records. Returns whether the pass is over.

        Between two passes nothing happens for `pause` seconds, by default five lease times. Raises Unavailable.
        """
        if pause is None:
            pause = PASS_LEASES * self._config.lease_seconds
        terminal = self._terminal
        repaired, over = await self._scripts.call(
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
        if repaired:
            logger.warning("repaired %d entries that contradicted the jobs' records", repaired)
        self._pass_is_over = bool(over)
        return self._pass_is_over
