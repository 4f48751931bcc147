"""PrivateRedis: keeps the Redis server of `ktqueue up` running. Knows nothing of the data in it."""

import asyncio
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from ktqueue.broker.redis.private_server import PrivateServer
from ktqueue.core.errors import Unavailable
from ktqueue.workers.supervision.child import MAX_QUICK_DEATHS, QUICK_DEATH_SECONDS, ProcessFailed

POLL_SECONDS = 0.1  # between two looks at the process, where the kernel does not say that it has ended

log = logging.getLogger(__name__)


class PrivateRedis:
    """A Redis server with its data in the state folder. It is restarted with its data when it dies."""

    def __init__(self, state_dir: Path, durability: str, server: PrivateServer | None = None) -> None:
        """`durability`: the setting `broker.durability`. `server`: the server to run, by default a new one."""
        self._state_dir = state_dir
        self._durability = durability
        self._server = server or PrivateServer()
        # The kernel kills the server when the thread that started it ends, so this thread lives as long as we do.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="redis")

    @property
    def pid(self) -> int | None:
        """The server's process id, or None while it does not run."""
        return self._server.pid

    async def start(self) -> str:
        """Start the server. Returns its URL. Raises Unavailable."""
        return await self._start(None)

    async def run(self) -> None:
        """Restart the server whenever it dies, until cancelled. Raises ProcessFailed if it keeps dying at once."""
        quick_deaths, began = 0, time.monotonic()
        assert self._server.url is not None
        port = urlsplit(self._server.url).port
        while True:
            if (pid := self._server.pid) is not None:
                await _may_have_ended(pid)
                continue
            quick_deaths = quick_deaths + 1 if time.monotonic() - began < QUICK_DEATH_SECONDS else 0
            if quick_deaths >= MAX_QUICK_DEATHS and not self._server.killed:
                raise ProcessFailed(f"Redis died {quick_deaths} times in a row; see {self._state_dir / 'redis.log'}")
            log.warning("redis died; starting it again")
            began = time.monotonic()
            try:
                await self._start(port)
            except Unavailable as error:  # it died while it read its data file
                log.warning("%s", error)

    async def stop(self) -> None:
        """Stop the server. A second call does nothing."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._server.stop)
        self._thread.shutdown(wait=False)

    async def _start(self, port: int | None) -> str:
        def start() -> str:
            return self._server.start(self._state_dir, port=port, durability=self._durability)

        return await asyncio.get_running_loop().run_in_executor(self._thread, start)


async def _may_have_ended(pid: int) -> None:
    """Wait until a child of this process has ended, or for a short time."""
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, or an old one
        await asyncio.sleep(POLL_SECONDS)
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
