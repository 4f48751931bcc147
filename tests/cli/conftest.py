"""Fixtures for tests of the command line: real processes of `ktqueue`, one running installation, a real terminal."""

import contextlib
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from command_line import COMMAND, OpenTerminal, Process, Run, Stack, Start, Terminal, UpWith, environment, serving


@pytest.fixture(autouse=True)
def _quick_starts(quick_starts: None) -> None:
    """Of all but what `ktqueue up` starts, and what runs on a terminal."""


@pytest.fixture(scope="session")
def start() -> Start:
    """Start one `ktqueue` process with pipes."""

    def starter(*words: object, cwd: Path, env: dict[str, str] | None = None) -> Process:
        return Process(
            [*COMMAND, *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=environment(env),
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
            env=environment(env),
            timeout=timeout,
            check=False,
        )

    return runner


running: list[Stack] = []


@pytest.fixture
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start: Start) -> Stack:
    """`ktqueue up` with the demo model: one for all tests of this folder, which ends behind the last of them."""
    if not running:
        stops = contextlib.ExitStack()
        running.append(stops.enter_context(serving(start, tmp_path_factory.mktemp("up"))))
        folder = request.node.getparent(pytest.Directory)
        folder.addfinalizer(stops.close)
        folder.addfinalizer(running.clear)
    return running[0]


@pytest.fixture
def up_with(tmp_path: Path, start: Start) -> UpWith:
    """A context manager that runs `ktqueue up` with these flags and variables."""
    return partial(serving, start, tmp_path)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[OpenTerminal]:
    """Start `ktqueue` on a terminal."""
    opened: list[Terminal] = []

    def opener(*words: object) -> Terminal:
        opened.append(Terminal([str(word) for word in words], tmp_path))
        return opened[-1]

    yield opener
    for process in opened:
        process.kill()
