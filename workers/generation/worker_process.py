"""The generation worker as a process: signals, logging and exit codes around GenerationWorker.

The module can be executed: `python -m ktqueue.workers.generation.worker_process`. Then the settings come from the
environment alone.
"""

from ktqueue.core import garbage

if __name__ == "__main__":
    garbage.collect_seldom()

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
from ktqueue.profiling.writer import prepare_folder
from ktqueue.workers.exit_codes import BROKEN, DRAINED, UNUSABLE, leave
from ktqueue.workers.generation.generation_worker import GenerationWorker
from ktqueue.workers.generation.heartbeat import watch_event_loop
from ktqueue.workers.startup.build import Built, Progress, build
from ktqueue.workers.startup.expert_history import start_expert_history
from ktqueue.workers.startup.profile import start_profile
from ktqueue.workers.startup.routing_file import start_routing

SWITCH_SECONDS = 0.001  # longest time that the engine's thread keeps the interpreter while the event loop waits
WATCHDOG_STALLS = 2  # times worker.stall_seconds; the heartbeat notices a step that hangs after one

log = logging.getLogger(__name__)


def run(config: Config, progress: Progress | None = None, captured: Progress | None = None) -> int:
    """Load the model, serve it until SIGTERM or SIGINT, drain, and return the exit code.

    A second signal ends the process at once. Call it from the main thread. Raises ConfigError, CheckpointError or
    RuleError if the model cannot be served, and Unavailable if Redis does not answer.
    """
    prepare_folder(config.profile)
    built = build(config.engine, progress, captured, named_ranges=config.profile.folder is not None)
    garbage.settle()
    return serve(config, built)


def serve(config: Config, built: Built) -> int:
    """Like `run`, with a loaded model. The process that this one was forked from may have loaded it."""
    sys.setswitchinterval(SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, built))


async def _serve(config: Config, built: Built) -> int:
    profile = start_profile(config.profile, built, "worker")
    history = start_expert_history(config.engine, built)
    routing = start_routing(config.engine, built.model, built.engine)
    records = [record for record in (profile, history, routing) if record is not None]
    broker = await Broker.open(config.broker, patience=config.broker.connect_timeout)
    worker = GenerationWorker(built.engine, built.tokenizer, broker, built.card, config, profile=profile)
    loop = asyncio.get_running_loop()
    stall_seconds = WATCHDOG_STALLS * config.worker.stall_seconds
    watchdog = asyncio.create_task(watch_event_loop(stall_seconds), name="watchdog")

    def stop(number: signal.Signals) -> None:
        if worker.draining:
            log.warning("%s again: exiting at once", number.name)
            os._exit(128 + number)
        log.info("%s: draining", number.name)
        worker.drain()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    try:
        await worker.run()
    except Exception:
        log.exception("the engine failed; another worker will continue its jobs")
        for record in records:
            record.close()
        leave(BROKEN)
    watchdog.cancel()
    await broker.close()
    for record in records:
        record.close()
    log.info("drained")
    return DRAINED


def conclude(work: Callable[[], int]) -> NoReturn:
    """Run `work` and end the process with the exit code that it returns. Exceptions are logged."""
    try:
        leave(work())
    except (ConfigError, CheckpointError, RuleError) as error:
        log.error("%s", error.message)
        leave(UNUSABLE)
    except Exception as error:
        log.error("%s", error, exc_info=None if isinstance(error, KtqueueError) else error)
        leave(BROKEN)


def main() -> NoReturn:
    """Serve with the settings of the environment. Does not return."""
    conclude(lambda: run(configure_process(os.environ)))


if __name__ == "__main__":
    main()
