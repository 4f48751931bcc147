"""A SteadyWorker as a process: its broker, signals and exit code. Does not know what the worker does."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Protocol

from ktqueue.broker.broker import Broker
from ktqueue.broker.redis.private_server import running_url
from ktqueue.core.config import Config
from ktqueue.core.errors import ConfigError, Unavailable
from ktqueue.core.logs import configure_process
from ktqueue.workers.exit_codes import DRAINED, UNUSABLE

RETRY_SECONDS = 0.5  # between attempts to reach Redis

log = logging.getLogger(__name__)


class Service(Protocol):
    """What `serve` runs: a SteadyWorker, or what stands in for one."""

    queue_name: str

    async def async_run(self) -> None:
        """Run until cancelled."""

    async def leave(self) -> None:
        """Return what is not finished. Called after `async_run`."""


async def serve(config: Config, make: Callable[[Broker, str], Service]) -> None:
    """Run a worker until SIGTERM or SIGINT, then return its jobs to the queue.

    `make` creates the worker from a broker and the URL of its Redis. Waits while Redis does not answer. Raises
    ConfigError.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        async with await _open(config) as broker:
            url = config.broker.url or running_url(config.broker.state_dir)
            assert url is not None  # else Broker.open would have raised
            worker = make(broker, url)
            log.info("serving the queue %s", worker.queue_name)
            try:
                await worker.async_run()
            finally:
                await worker.leave()


def execute(run: Callable[[Config], Awaitable[None]]) -> int:
    """Run with the settings of the environment. Logs a ConfigError. Returns the exit code."""
    try:
        asyncio.run(_await(run(configure_process(os.environ))))
    except ConfigError as error:
        log.error("%s", error.message)
        return UNUSABLE
    return DRAINED


async def _await(work: Awaitable[None]) -> None:
    await work


async def _open(config: Config) -> Broker:
    last_message = ""
    while True:
        try:
            return await Broker.open(config.broker)
        except Unavailable as error:
            if error.message != last_message:  # log it once
                log.warning("%s", error.message)
            last_message = error.message
        await asyncio.sleep(RETRY_SECONDS)
