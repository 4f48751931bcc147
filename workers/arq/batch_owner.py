"""The owner of batches: takes batches over HTTP that no living control worker runs, and runs several at once."""

import asyncio
import contextlib
import logging
import secrets

from ktqueue.batches.run import LEAST_WINDOW, window_for
from ktqueue.batches.stored.batch import Owner, StoredBatch
from ktqueue.batches.stored.window import Window
from ktqueue.broker.batches import BatchLease, BatchRecord
from ktqueue.broker.broker import Broker
from ktqueue.broker.scripts import ScriptRefused
from ktqueue.core.config import Config
from ktqueue.core.errors import KtqueueError, LeaseLost, Unavailable
from ktqueue.storage.store import Store

MAX_BATCHES = 16  # that one control worker runs at once; and as many more, of callers none of whose batches run
POLL_SECONDS = 0.5  # between searches for batches
WINDOW_SECONDS = 5.0  # between looks at how many rows the workers have
LEAVE_SECONDS = 5.0  # in which a batch is given back at the end

log = logging.getLogger(__name__)


class BatchOwner:
    """Runs batches until cancelled. What this process does not finish, another one continues."""

    def __init__(self, broker: Broker, store: Store, config: Config) -> None:
        self._owner = Owner(broker, store, Window(LEAST_WINDOW), config.storage.file_ttl)
        self._broker = broker
        self._limits = {tenant.name: tenant for tenant in config.gateway.tenants}
        self._name = f"control-{secrets.token_hex(6)}"
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Take and run batches until cancelled, also through outages of Redis."""
        window = asyncio.create_task(self._follow_fleet(), name="window of batches")
        trouble = ""
        try:
            while True:
                taken = None
                try:
                    count = len(self._running)
                    if count < 2 * MAX_BATCHES:
                        taken = await self._broker.batches.take(self._name, of_newcomers=count >= MAX_BATCHES)
                    trouble = ""
                except (KtqueueError, ScriptRefused) as error:
                    if str(error) != trouble:
                        log.warning("batches wait: %s", error)
                    trouble = str(error)
                if taken is None:
                    await asyncio.sleep(POLL_SECONDS)
                else:
                    lease, record = taken
                    self._running[record.id] = asyncio.create_task(self._run(lease, record), name=record.id)
        finally:
            tasks = [window, *self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, lease: BatchLease, record: BatchRecord) -> None:
        """Run one batch. An error leaves it to the next owner, after the lease."""
        log.info("%s of %s is %s; it runs here now", record.id, record.tenant, record.status)
        batch = StoredBatch(self._owner, lease, record, self._limits.get(record.tenant))
        try:
            await batch.run()
            log.info("%s has ended", record.id)
        except asyncio.CancelledError:
            with contextlib.suppress(KtqueueError, TimeoutError):
                async with asyncio.timeout(LEAVE_SECONDS):
                    await batch.leave()
            raise
        except LeaseLost:
            log.warning("%s has another owner now", record.id)
        except Exception:
            log.exception("%s stopped; it is tried again after its lease", record.id)
            with contextlib.suppress(KtqueueError, ScriptRefused):
                await batch.note_failure()
        finally:
            self._running.pop(record.id, None)

    async def _follow_fleet(self) -> None:
        """Keep twice as many lines in the queue as all workers have rows."""
        while True:
            with contextlib.suppress(Unavailable, ScriptRefused):
                self._owner.window.resize(await window_for(self._broker))
            await asyncio.sleep(WINDOW_SECONDS)
