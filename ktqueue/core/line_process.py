"""LineProcess: a Python process of ours that answers lines of bytes, with limits of time and memory.

Work that may take hours or terabytes is done there: a chat template, or a grammar. It then costs one request, which is
refused, and at most the process.
"""

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

START_SECONDS = 60.0
MEMORY_BYTES = 1 << 30  # of address space
MAX_REPLY_BYTES = 64 << 20


class NoAnswer(Exception):
    """The process ended, or did not answer in time."""


class TooLate(NoAnswer):
    """It did not answer in time."""


class NotStarted(NoAnswer):
    """The process could not be started."""


class LineProcess:
    """Runs `module`, which reads lines from standard input and answers each with one line on standard output.

    `first_line` is sent at the start, and answered as well. `module` should call `limit_process`.
    """

    def __init__(self, module: str, first_line: bytes) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C must reach only the process that started it
        )
        self.alive = True
        self._first_line = first_line

    def start(self) -> None:
        """Wait until the process has answered its first line. Raises NotStarted."""
        if self._first_line:
            line, self._first_line = self._first_line, b""
            try:
                self.ask(line, START_SECONDS)
            except NoAnswer as error:
                raise NotStarted(str(error)) from error

    def ask(self, line: bytes, seconds: float) -> bytes:
        """Send a line and return the answer. After NoAnswer the process is of no use."""
        try:
            return self._ask(line, seconds)
        except NoAnswer:
            self.alive = False
            raise

    def end(self) -> None:
        """Kill the process."""
        self.alive = False
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process.wait()

    def _ask(self, line: bytes, seconds: float) -> bytes:
        sink, source = self._process.stdin, self._process.stdout
        assert sink is not None
        assert source is not None
        deadline = time.monotonic() + seconds
        unsent, pieces, size = memoryview(line), [], 0
        poll = select.poll()
        poll.register(source, select.POLLIN)
        poll.register(sink, select.POLLOUT)
        while True:
            wait = deadline - time.monotonic()
            if wait <= 0:
                raise TooLate(f"it took more than {seconds:g} seconds")
            ready = dict(poll.poll(wait * 1_000))
            if unsent and sink.fileno() in ready:
                try:
                    unsent = unsent[os.write(sink.fileno(), unsent[: select.PIPE_BUF]) :]
                except BrokenPipeError:
                    raise NoAnswer("its process ended") from None
                if not unsent:
                    poll.unregister(sink)
            if source.fileno() in ready:
                piece = os.read(source.fileno(), 1 << 16)
                size += len(piece)
                if not piece:
                    raise NoAnswer("its process ended")
                if size > MAX_REPLY_BYTES:
                    raise NoAnswer(f"it wrote more than {MAX_REPLY_BYTES >> 20} MiB")
                pieces.append(piece)
                if piece.endswith(b"\n"):
                    return b"".join(pieces)


class LineProcesses:
    """Line processes of one kind, one for each thread that asks at the same time. They are kept until `close`."""

    def __init__(self, start: Callable[[], LineProcess]) -> None:
        self._start = start
        self._idle: list[LineProcess] = []
        self._gate = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Start a process for the first request, without waiting for it."""
        self._idle.append(self._start())

    def ask(self, line: bytes, seconds: float) -> bytes:
        """Send a line to a free process and return its answer. Raises NotStarted or NoAnswer."""
        with self._gate:
            process = self._idle.pop() if self._idle else None
        process = process or self._start()
        try:
            process.start()
            return process.ask(line, seconds)
        finally:
            with self._gate:
                keep = process.alive and not self._closed
                if keep:
                    self._idle.append(process)
            if not keep:
                process.end()

    def close(self) -> None:
        """End all processes. One that is at work ends when it answers or reaches a limit."""
        with self._gate:
            self._closed = True
            processes, self._idle = self._idle, []
        for process in processes:
            process.end()


def limit_process() -> None:
    """Limit the memory of this process, write no core file, and end without a word if nobody reads its answers."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
