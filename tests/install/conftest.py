"""Fixtures for tests of installed wheels: environments, a folder with modules that fail, and `ktqueue up` in it."""

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from installed import client_bin as install_client

Run = Callable[..., subprocess.CompletedProcess[str]]
TRAPS = ("workers.py", "workers/__init__.py", "rules/__init__.py", "random.py", "queue.py", "ktqueue.py", "engine.py")
"""Names that a user's project may well have: top folders of this tree, the standard library's, our own."""


def _environment(bin_folder: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("KTQUEUE_", "PYTHON"))}
    return {**kept, "PATH": f"{bin_folder}:/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture(scope="session")
def run() -> Run:
    """`run(program, *words, cwd=)` runs a program of an environment in a folder, as a shell would, to its end."""

    def runner(program: Path, *words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
        command = [str(program), *map(str, words)]
        environment = _environment(program.parent)
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)

    return runner


@pytest.fixture(scope="session")
def client_bin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with `ktqueue` and `python` where ktqueue was installed without extras."""
    return install_client(tmp_path_factory.mktemp("client"))


@pytest.fixture(scope="session")
def trapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with modules that fail when they are imported."""
    folder = tmp_path_factory.mktemp("trapped")
    for name in TRAPS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("raise ImportError(f'{__file__} was imported from the current folder')\n")
    return folder


@pytest.fixture(scope="session")
def state_dir(trapped: Path, installed_bin: Path) -> Iterator[Path]:
    """The state folder of a `ktqueue up --bridge` in the trapped folder. Ctrl-C must end it with code 0."""
    command = [str(installed_bin / "ktqueue"), "up", "--bridge", "--port", "0", "--state-dir", "state"]
    process = subprocess.Popen(
        command, cwd=trapped, env=_environment(installed_bin), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    head = ""
    while "ready" not in head or not re.search(r"http://[\d.]+:\d+", head):
        line = process.stdout.readline()
        assert line, f"up ended: {process.communicate()}"
        head += line
    yield trapped / "state"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert "was imported from the current folder" not in err
