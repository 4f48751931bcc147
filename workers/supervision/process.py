"""A supervised process, however it came to be, and the plain way: a command. It dies with its parent.

Knows nothing of what the process does, nor of what happens when it ends.
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
    """What a supervisor sees of a process."""

    @property
    def pid(self) -> int:
        """Its id."""

    @property
    def returncode(self) -> int | None:
        """None while it runs; the exit code, or minus the number of the signal that ended it."""

    async def wait(self) -> int:
        """The return code, once it has ended."""

    def send_signal(self, signal: int, /) -> None:
        """Send a signal; harmless when it has ended."""


def open_log(path: Path) -> BinaryIO:
    """The log file of a process, to append to; nobody else may read it."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE), "ab")


Launch = Callable[[Path], Awaitable[Process]]  # start a process whose output goes to that file


class Command:
    """Starts a command, again with each call. `stdin`: a file descriptor for the process, by default /dev/null.

    `umask` is the process's own; -1: that of this process.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, umask: int = PRIVATE_UMASK) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._umask = umask

    async def __call__(self, log_path: Path, stdin: int = asyncio.subprocess.DEVNULL) -> Process:
        """Start it."""
        parent = os.getpid()
        with open_log(log_path) as sink:
            return await asyncio.create_subprocess_exec(
                *self._command,
                stdin=stdin,
                stdout=sink,
                stderr=sink,
                env=self._environment,
                umask=self._umask,
                start_new_session=True,  # Ctrl-C reaches the supervisor alone, which stops things in order
                preexec_fn=lambda: die_with(parent),
            )


_prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None


def die_with(parent: int) -> None:
    """Run in a new process: have the kernel kill it when its parent dies."""
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)
