"""Forks: the supervisor's side of the fork server: starts it, and has it make workers. Knows no model."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from ktqueue.workers.supervision.process import Command, Process

COMMAND = [sys.executable, "-P", "-m", "ktqueue.workers.supervision.fork_server"]

log = logging.getLogger(__name__)


class Forked:
    """A forked process; see Process. It counts as killed when the fork server is gone."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._code: int | None = None
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int:
        """See Process."""
        return self._pid

    @property
    def returncode(self) -> int | None:
        """See Process."""
        return self._code

    async def wait(self) -> int:
        """See Process."""
        await self._ended.wait()
        assert self._code is not None
        return self._code

    def send_signal(self, number: int, /) -> None:
        """See Process."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def end(self, code: int) -> None:
        """It has ended."""
        self._code = code
        self._ended.set()


class Forks:
    """`launch` starts the fork server, `fork` a worker, each as a Child starts its process."""

    def __init__(self, environment: Mapping[str, str], command: Sequence[str] = COMMAND) -> None:
        self._command = Command(command, environment)
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()
        self._asked: deque[asyncio.Future[Process | None]] = deque()  # None: the server went away
        self._running: dict[int, Forked] = {}

    async def launch(self, log_path: Path) -> Process:
        """Start the fork server."""
        if self._reading is not None:  # of a server that has died
            await self._reading
        ours, theirs = socket.socketpair()
        with theirs:
            process = await self._command(log_path, stdin=theirs.fileno())
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(reader, self._writer), name="fork server")
        self._connected.set()
        return process

    async def fork(self, log_path: Path) -> Process:
        """A worker, as soon as the fork server has loaded its model."""
        while True:
            await self._connected.wait()
            assert self._writer is not None
            answer: asyncio.Future[Process | None] = asyncio.get_running_loop().create_future()
            self._asked.append(answer)
            self._writer.write(json.dumps({"log": str(log_path)}).encode() + b"\n")
            process = await answer
            if process is not None:
                return process

    async def closed(self) -> None:
        """Wait until the fork server, which must have ended, is forgotten."""
        if self._reading is not None:
            await self._reading

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError):
                while line := await reader.readline():
                    self._heard(json.loads(line))
        finally:
            self._connected.clear()
            for answer in self._asked:
                if not answer.done():
                    answer.set_result(None)
            self._asked.clear()
            for process in self._running.values():
                process.end(-signal.SIGKILL)  # the kernel sees to it
            self._running.clear()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def _heard(self, message: dict[str, int]) -> None:
        if "ended" in message:
            self._running.pop(message["ended"]).end(message["code"])
            return
        process = self._running[message["pid"]] = Forked(message["pid"])
        answer = self._asked.popleft()
        if answer.done():  # whoever asked has left
            process.send_signal(signal.SIGKILL)
        else:
            answer.set_result(process)
