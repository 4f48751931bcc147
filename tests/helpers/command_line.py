"""Processes of `ktqueue` for tests: commands with pipes, a running `ktqueue up`, and a pseudo-terminal."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "ktqueue"]
CONTROL = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[=>78])")  # ECMA-48 and the keypad's

Run = Callable[..., subprocess.CompletedProcess[str]]
"""Runs one command to its end. Takes its words, then stdin, env and timeout by name."""


class Process(subprocess.Popen[str]):
    """A process with pipes for output and errors."""

    stdout: IO[str]
    stderr: IO[str]


Start = Callable[..., Process]
"""Starts one command with pipes. Takes its words, then cwd and env by name."""


def environment(more: dict[str, str] | None = None) -> dict[str, str]:
    """Return the variables of this process without KTQUEUE_*, and `more`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("KTQUEUE_")}
    paths = [str(ROOT), *([kept["PYTHONPATH"]] if "PYTHONPATH" in kept else [])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **(more or {})}


@dataclass(frozen=True)
class Stack:
    """A running `ktqueue up` with the demo model."""

    url: str
    state_dir: Path
    flags: tuple[str, ...]


@contextmanager
def serving(start: Start, folder: Path, *words: str, env: dict[str, str] | None = None) -> Iterator[Stack]:
    """Run `ktqueue up` on a free port, with more flags. Ctrl-C must end it with 0."""
    state_dir = folder / "state"
    process = start("up", "--state-dir", state_dir, "--port", 0, *words, cwd=folder, env=env)
    head = ""
    while "ready" not in head or "\n" not in head:
        line = process.stdout.readline()
        assert line, f"up ended: {process.communicate()}"
        head += line
    url = re.search(r"http://[\d.]+:\d+", head)
    assert url is not None
    yield Stack(url.group(), state_dir, ("--state-dir", str(state_dir)))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert "draining" in err


class Terminal:
    """A process on a pseudo-terminal of 80 columns."""

    def __init__(self, words: list[str], cwd: Path) -> None:
        self.pid, self._handle = pty.fork()
        if self.pid == 0:
            os.chdir(cwd)
            os.execvpe(COMMAND[0], [*COMMAND, *words], environment({"TERM": "xterm", "COLUMNS": "80", "LINES": "30"}))
        self.screen = ""  # all output without control sequences
        self.raw = ""  # all output
        self._cut = ""  # an incomplete control sequence at the end
        self._waited_for = 0  # `wait_for` searches from here

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._handle, text.encode())

    def wait_for(self, text: str, timeout: float = 60) -> str:
        """Read until the text appears, after the last text that was waited for. Returns the output up to its end."""
        deadline = time.monotonic() + timeout
        begin = self._waited_for
        while (found := self.screen.find(text, begin)) < 0:
            assert time.monotonic() < deadline, f"waited for {text!r}, saw {self.screen[begin:]!r}"
            self._read(0.2)
        self._waited_for = found + len(text)
        return self.screen[begin : self._waited_for]

    def interrupt(self, text: str) -> None:
        """Press Ctrl-C at the prompt and wait for `text`; press again after 10 s, as a person would.

        CPython's readline notices an interrupt between its last check of signals and its wait for a key only with the
        next key. This happens on a busy machine.
        """
        self.type("\x03")
        deadline = time.monotonic() + 10
        while text not in self.screen[self._waited_for :] and time.monotonic() < deadline:
            self._read(0.2)
        if text not in self.screen[self._waited_for :]:
            self.type("\x03")
        self.wait_for(text)

    def end(self, timeout: float = 30) -> int:
        """Wait for the process and return its exit code."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self._read(0.05):
            pass
        _, status = os.waitpid(self.pid, 0)
        os.close(self._handle)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def _read(self, timeout: float) -> bool:
        """Read available output. Returns False once the other end is closed."""
        ready, _, _ = select.select([self._handle], [], [], timeout)
        if ready:
            try:
                read = os.read(self._handle, 4096).decode(errors="replace")
                self.raw += read
                output = CONTROL.sub("", self._cut + read)
                text, escape, rest = output.rpartition("\x1b")
                self.screen, self._cut = self.screen + (text if escape else output), escape + rest if escape else ""
            except OSError:
                return False
        return True

    def kill(self) -> None:
        """Kill the process if it is still running."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self._handle)


OpenTerminal = Callable[..., Terminal]
UpWith = Callable[..., AbstractContextManager[Stack]]
