"""Fixtures of the command line's tests: real processes of `ktqueue`, one real stack, a real terminal."""

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
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "ktqueue.cli.main"]
CONTROL = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[=>78])")  # ECMA-48 and the keypad's
Run = Callable[..., subprocess.CompletedProcess[str]]


def _environment(more: dict[str, str] | None = None) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("KTQUEUE_")}
    paths = [str(ROOT), *([kept["PYTHONPATH"]] if "PYTHONPATH" in kept else [])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **(more or {})}


@pytest.fixture(scope="session")
def start() -> Callable[..., "subprocess.Popen[str]"]:
    """Start one `ktqueue` process with pipes."""

    def starter(*words: object, cwd: Path, env: dict[str, str] | None = None) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*COMMAND, *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=_environment(env),
        )

    return starter


@pytest.fixture
def ktqueue(tmp_path: Path) -> Run:
    """Run one `ktqueue` command to its end, in an empty folder."""

    def runner(
        *words: object, stdin: str = "", env: dict[str, str] | None = None, timeout: float = 100
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *map(str, words)],
            input=stdin,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=_environment(env),
            timeout=timeout,
            check=False,
        )

    return runner


@dataclass(frozen=True)
class Stack:
    """A running `ktqueue up` over the demo model."""

    url: str
    state_dir: Path
    flags: tuple[str, ...]


@contextmanager
def serving(
    start: Callable[..., "subprocess.Popen[str]"], folder: Path, *words: str, env: dict[str, str] | None = None
) -> Iterator[Stack]:
    """`ktqueue up` on a free port, with more flags. Ctrl-C must end it with 0."""
    state_dir = folder / "state"
    process = start("up", "--state-dir", state_dir, "--port", 0, *words, cwd=folder, env=env)
    assert process.stdout is not None
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


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, start: Callable[..., "subprocess.Popen[str]"]) -> Iterator[Stack]:
    """`ktqueue up` with the demo model."""
    with serving(start, tmp_path_factory.mktemp("up")) as running:
        yield running


@pytest.fixture
def up_with(
    tmp_path: Path, start: Callable[..., "subprocess.Popen[str]"]
) -> Callable[..., AbstractContextManager[Stack]]:
    """A context: `ktqueue up` with these flags and variables."""
    return partial(serving, start, tmp_path)


class Terminal:
    """A process on a pseudo-terminal of 80 columns."""

    def __init__(self, words: list[str], cwd: Path) -> None:
        self.pid, self._handle = pty.fork()
        if self.pid == 0:
            os.chdir(cwd)
            os.execvpe(COMMAND[0], [*COMMAND, *words], _environment({"TERM": "xterm", "COLUMNS": "80", "LINES": "30"}))
        self.screen = ""  # what came, without control sequences
        self.raw = ""  # all that came
        self._cut = ""  # the beginning of such a sequence
        self._waited_for = 0  # what was found goes up to here

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._handle, text.encode())

    def wait_for(self, text: str, timeout: float = 60) -> str:
        """Read until the text has come after what was waited for before; returns what came up to its end."""
        deadline = time.monotonic() + timeout
        begin = self._waited_for
        while (found := self.screen.find(text, begin)) < 0:
            assert time.monotonic() < deadline, f"waited for {text!r}, saw {self.screen[begin:]!r}"
            self._read(0.2)
        self._waited_for = found + len(text)
        return self.screen[begin : self._waited_for]

    def interrupt(self, text: str) -> None:
        """Press Ctrl-C at the prompt and wait for `text`; press again after 10 s, as a person would.

        An interrupt that comes between readline's last look at its signals and its wait for a key is seen only with
        the next key: CPython's, not ours, and it takes a busy machine.
        """
        self.type("\x03")
        deadline = time.monotonic() + 10
        while text not in self.screen[self._waited_for :] and time.monotonic() < deadline:
            self._read(0.2)
        if text not in self.screen[self._waited_for :]:
            self.type("\x03")
        self.wait_for(text)

    def end(self, timeout: float = 30) -> int:
        """Wait for the process; its exit code."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self._read(0.05):
            pass
        _, status = os.waitpid(self.pid, 0)
        os.close(self._handle)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def _read(self, timeout: float) -> bool:
        """Take what has come; False once the other end is closed."""
        ready, _, _ = select.select([self._handle], [], [], timeout)
        if ready:
            try:
                read = os.read(self._handle, 4096).decode(errors="replace")
                self.raw += read
                came = CONTROL.sub("", self._cut + read)
                text, escape, rest = came.rpartition("\x1b")
                self.screen, self._cut = self.screen + (text if escape else came), escape + rest if escape else ""
            except OSError:
                return False
        return True

    def kill(self) -> None:
        """End it, if it still runs."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self._handle)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Start `ktqueue` on a terminal."""
    opened: list[Terminal] = []

    def opener(*words: object) -> Terminal:
        opened.append(Terminal([str(word) for word in words], tmp_path))
        return opened[-1]

    yield opener
    for one in opened:
        one.kill()
