"""The generation worker as a process: signals, logging and exit codes around GenerationWorker.

The module can be executed: `python -m ktqueue.workers.generation.worker_process`. Then the settings come from the
environment alone.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

import uvloop

from ktqueue.broker.broker import Broker
from ktqueue.core.config import Config
from ktqueue.core.errors import CheckpointError, ConfigError, KtqueueError, RuleError
from ktqueue.core.logs import configure_process
from ktqueue.workers.exit_codes import BROKEN, DRAINED, UNUSABLE
from ktqueue.workers.generation.generation import GenerationWorker
from ktqueue.workers.generation.watchdog import watch
from ktqueue.workers.startup.build import Built, Progress, build

SWITCH_SECONDS = 0.001  # how long the engine's thread may keep the event loop from running
WATCH_STALLS = 2  # the heartbeat sees a step that hangs after one

log = logging.getLogger(__name__)


def run(config: Config, progress: Progress | None = None, captured: Progress | None = None) -> int:
    """Load the model, serve it until SIGTERM or SIGINT, drain, and give the exit code. A second signal ends at once.

    Must be called from the main thread. Raises ConfigError, CheckpointError or RuleError if the model cannot be
    served, Unavailable if there is no Redis.
    """
    return serve(config, build(config.engine, progress, captured))


def serve(config: Config, built: Built) -> int:
    """The same with a model that is loaded, perhaps by the process that this one was forked from."""
    sys.setswitchinterval(SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, built))


async def _serve(config: Config, built: Built) -> int:
    broker = await Broker.open(config.broker, patience=config.broker.connect_timeout)
    worker = GenerationWorker(built.engine, built.tokenizer, broker, built.card, config)
    loop = asyncio.get_running_loop()
    watching = asyncio.create_task(watch(WATCH_STALLS * config.worker.stall_seconds), name="watchdog")

    def stop(number: signal.Signals) -> None:
        if worker.draining:
            log.warning("%s again: leaving at once", number.name)
            os._exit(128 + number)
        log.info("%s: draining", number.name)
        worker.drain()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    try:
        await worker.run()
    except Exception:
        log.exception("the engine cannot go on; its jobs will resume on another worker")
        leave(BROKEN)
    watching.cancel()
    await broker.close()
    log.info("drained")
    return DRAINED


def leave(code: int) -> NoReturn:
    """End the process now. Taking an interpreter with torch in it apart takes seconds, and a thread that hangs in a
    device call would keep it from ending at all."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def conclude(work: Callable[[], int]) -> NoReturn:
    """Do the work of the process and leave with its exit code; errors go to the log."""
    try:
        leave(work())
    except (ConfigError, CheckpointError, RuleError) as error:
        log.error("%s", error.message)
        leave(UNUSABLE)
    except Exception as error:
        log.error("%s", error, exc_info=None if isinstance(error, KtqueueError) else error)
        leave(BROKEN)


def main() -> NoReturn:
    """Serve with the settings of the environment. Ends the process."""
    conclude(lambda: run(configure_process(os.environ)))


if __name__ == "__main__":
    main()
