"""The interface of a supervised process, and the usual way to start one: a command. It dies with its parent.

Knows neither what the process does nor what happens when it ends.
"""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from ktqueue.broker.redis.state_folder import PRIVATE_FILE, PRIVATE_UMASK

PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Process(Protocol):
    """A process, as its supervisor sees it."""

    @property
    def pid(self) -> int:
        """The process id."""

    @property
    def returncode(self) -> int | None:
        """None while it runs; then the exit code, or minus the number of the signal that ended it."""

    async def wait(self) -> int:
        """Wait for its end. Returns the return code."""

    def send_signal(self, signal: int, /) -> None:
        """Send a signal. Does nothing if the process has ended."""


def open_log(path: Path) -> BinaryIO:
    """Open a process's log file for appending. Only its owner may read it."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE), "ab")


Launch = Callable[[Path], Awaitable[Process]]  # starts a process whose output goes to that file


class Command:
    """A command that can be started repeatedly.

    `umask`: that of the process; -1 leaves it as in this process.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, umask: int = PRIVATE_UMASK) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._umask = umask

    async def __call__(self, log_path: Path, stdin: int = asyncio.subprocess.DEVNULL) -> Process:
        """Start it. `stdin`: a file descriptor for its standard input, by default /dev/null."""
        parent = os.getpid()
        with open_log(log_path) as sink:
            return await asyncio.create_subprocess_exec(
                *self._command,
                stdin=stdin,
                stdout=sink,
                stderr=sink,
                env=self._environment,
                umask=self._umask,
                start_new_session=True,  # Ctrl-C reaches only the supervisor, which stops the processes in order
                preexec_fn=lambda: die_with(parent),
            )


_prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies. Call it first in a new process."""
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)
