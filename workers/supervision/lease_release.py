"""What a supervisor does for the jobs of a worker whose process it saw end. Knows Redis, and no processes."""

import logging
import signal

from ktqueue.broker.broker import Broker
from ktqueue.broker.process_name import process_name
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import KtqueueError

# What the machine does to a process, and no job: a file that it has mapped was cut, or memory is broken or used up.
MACHINE_FAULTS = frozenset({signal.SIGBUS})

log = logging.getLogger(__name__)


async def bury(config: BrokerConfig, pid: int, code: int) -> None:
    """End the leases of a process of ours that has ended, so that its jobs go on at once.

    `code`: its return code, minus the number of the signal that ended it. What is the machine's fault is no job's try.

    Best effort: what is not ended here lapses by itself, and a lease that lives is missed by nobody but its worker,
    which then registers anew.
    """
    try:
        async with await Broker.open(config, patience=config.lease_seconds) as broker:
            for worker in await broker.models.workers():
                if worker.process == process_name(pid):
                    await broker.reaper().bury(worker.worker_id, blameless=-code in MACHINE_FAULTS)
    except KtqueueError as error:
        log.warning("the lease of process %d is left to lapse: %s", pid, error)
