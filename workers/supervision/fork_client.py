"""ForkClient: the supervisor's side of the fork server. It starts the server and asks for workers. Knows no model."""

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


class ForkedProcess:
    """A process that the fork server made; see Process. If the fork server dies, the process counts as killed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int, /) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def mark_ended(self, code: int) -> None:
        """Record that it has ended with this return code."""
        self.returncode = code
        self._ended.set()


class ForkClient:
    """`launch` starts the fork server and `fork` a worker. A Child takes either to start its process."""

    def __init__(self, environment: Mapping[str, str], command: Sequence[str] = COMMAND) -> None:
        self._command = Command(command, environment)
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()
        self._answers: deque[asyncio.Future[Process | None]] = deque()  # of requests; None: the server died
        self._running: dict[int, ForkedProcess] = {}

    async def launch(self, log_path: Path) -> Process:
        """Start the fork server."""
        if self._reading is not None:  # from an earlier server, which has died
            await self._reading
        ours, theirs = socket.socketpair()
        with theirs:
            process = await self._command(log_path, stdin=theirs.fileno())
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(reader, self._writer), name="fork server")
        self._connected.set()
        return process

    async def fork(self, log_path: Path) -> Process:
        """Fork a worker, as soon as the fork server has loaded its model."""
        while True:
            await self._connected.wait()
            assert self._writer is not None
            answer: asyncio.Future[Process | None] = asyncio.get_running_loop().create_future()
            self._answers.append(answer)
            self._writer.write(json.dumps({"log": str(log_path)}).encode() + b"\n")
            process = await answer
            if process is not None:
                return process

    async def closed(self) -> None:
        """Wait until the connection to a fork server that has ended is closed."""
        if self._reading is not None:
            await self._reading

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError):
                while line := await reader.readline():
                    self._receive(json.loads(line))
        finally:
            self._connected.clear()
            for answer in self._answers:
                if not answer.done():
                    answer.set_result(None)
            self._answers.clear()
            for process in self._running.values():
                process.mark_ended(-signal.SIGKILL)  # the kernel kills it
            self._running.clear()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def _receive(self, message: dict[str, int]) -> None:
        if "ended" in message:
            self._running.pop(message["ended"]).mark_ended(message["code"])
            return
        process = self._running[message["pid"]] = ForkedProcess(message["pid"])
        answer = self._answers.popleft()
        if answer.done():  # the request was cancelled
            process.send_signal(signal.SIGKILL)
        else:
            answer.set_result(process)
