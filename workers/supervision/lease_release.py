"""Releases the leases of a worker process that has exited. Knows Redis, and no processes."""

import logging
import signal

from ktqueue.broker.broker import Broker
from ktqueue.broker.models import process_name
from ktqueue.broker.scripts import ScriptRefused
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import KtqueueError

# Signals that the machine causes, not a job: a mapped file was truncated, or memory is broken or used up.
MACHINE_FAULTS = frozenset({signal.SIGBUS})

log = logging.getLogger(__name__)


async def release_leases_of(config: BrokerConfig, pid: int, code: int) -> None:
    """Release the leases of a process of this machine that has exited, so that its jobs restart now.

    `code`: return code of the process, negative for a signal. A fault of the machine is not counted as an attempt of
    its jobs. Best effort: a lease that is missed here expires by itself. If the lease belongs to a live worker after
    all, that worker registers again.
    """
    try:
        async with await Broker.open(config, patience=config.lease_seconds) as broker:
            for worker in await broker.models.workers():
                if worker.process == process_name(pid):
                    await broker.reaper().release_lease(worker.worker_id, blameless=-code in MACHINE_FAULTS)
    except (KtqueueError, ScriptRefused) as error:
        log.warning("the lease of process %d could not be released and will expire: %s", pid, error)
