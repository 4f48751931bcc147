"""`ktqueue up -d`: a Supervisor in its own process, which survives the terminal; and `ktqueue down`, which stops it.

The module can be executed: `python -m ktqueue.workers.supervision.detached N` starts N workers with settings from the
environment. Until everything serves, it writes JSON lines to its standard output for the process that started it:
{"waiting": what}, then {"port", "models"} or {"fault", "code"}. Its log is `up.log` in the state folder.
"""

from ktqueue.core import garbage

if __name__ == "__main__":
    garbage.collect_seldom()

import asyncio
import json
import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ktqueue.broker.redis.private_server import running_url
from ktqueue.broker.redis.state_folder import PRIVATE_UMASK, StateFolder, holder
from ktqueue.core.config import Config
from ktqueue.core.errors import ConfigError, KtqueueError, Unavailable
from ktqueue.core.logs import configure_process
from ktqueue.workers.supervision.child import ProcessFailed
from ktqueue.workers.supervision.log_files import begin_log
from ktqueue.workers.supervision.process import open_log
from ktqueue.workers.supervision.supervisor import Supervisor, child_environment, served_models

LOG_NAME = "up.log"

log = logging.getLogger("ktqueue.workers.supervision.detached")  # __name__ is __main__ here


@dataclass(frozen=True, slots=True)
class Detached:
    """An installation that runs in the background. `config` has the port and the Redis URL that were chosen."""

    config: Config
    models: list[str]


def start_detached(config: Config, workers: int, report: Callable[[str], None]) -> Detached:
    """Start everything in another process and wait until it serves. `report` receives what is waited for.

    Raises ConfigError, Unavailable or ProcessFailed. A KeyboardInterrupt stops what was started.
    """
    folder = StateFolder.open(config.broker.state_dir)
    folder.hold()  # fail early if it is in use; the other process then takes it
    folder.release()
    log_path = folder.path / LOG_NAME
    begin_log(log_path)
    with open_log(log_path) as sink:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ktqueue.workers.supervision.detached", str(workers)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=sink,
            env=child_environment(config),
            umask=PRIVATE_UMASK,
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            message = json.loads(line)
            if "waiting" in message:
                report(message["waiting"])
            elif "fault" in message:
                raise _fault(message)
            else:
                broker = replace(config.broker, url=config.broker.url or running_url(folder.path))
                gateway = replace(config.gateway, port=message["port"])
                return Detached(replace(config, broker=broker, gateway=gateway), message["models"])
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    finally:
        process.stdout.close()
    raise ProcessFailed(f"the supervisor ended with code {process.wait()} before it served; see {log_path}")


def _fault(message: dict[str, Any]) -> KtqueueError:
    kinds = {kind.code: kind for kind in (ConfigError, Unavailable)}
    return kinds.get(message["code"], ProcessFailed)(message["fault"])


def stop_detached(config: Config) -> bool:
    """Stop what `ktqueue up` runs on the state folder, and wait for its end. Returns False if nothing runs.

    A second call before it has stopped kills its processes. Raises ConfigError for a process of another container.
    """
    while (pid := holder(config.broker.state_dir)) is not None:
        if pid == 0:
            raise ConfigError(
                f"{config.broker.state_dir} is in use by a process of another container; stop it there",
                param="broker.state_dir",
            )
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:  # it has just ended
            continue
        try:
            if holder(config.broker.state_dir) == pid:  # else another process may have the id by now
                signal.pidfd_send_signal(process, signal.SIGTERM)
                select.select([process], [], [])
                return True
        finally:
            os.close(process)
    return False


async def _run(config: Config, workers: int) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # replaced once everything has started

    def report(text: str) -> None:
        log.info("%s", text)
        _send({"waiting": text})

    async with Supervisor(config, workers=workers, report=report) as up:
        models = await served_models(up.config)
        log.info("serving %s at %s", ", ".join(models), up.url)
        _send({"port": up.config.gateway.port, "models": models})
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        await up.run_until_signal()
        log.info("draining")
    log.info("stopped")


def _send(message: dict[str, Any]) -> None:
    try:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the process that started this one is gone; continue without it
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def main() -> int:
    """Run until a signal. Returns the exit code."""
    try:
        asyncio.run(_run(configure_process(os.environ), int(sys.argv[1])))
    except asyncio.CancelledError:
        log.info("stopped before everything served")
    except KtqueueError as error:
        log.error("%s", error.message)
        _send({"fault": error.message, "code": error.code})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
