"""Processes that the tests start as forks of a preloaded one: tests/helpers/preloaded.py."""

import subprocess
from concurrent.futures import ThreadPoolExecutor

from command_line import COMMAND


def test_threads_start_processes_at_once() -> None:
    def version(_: int) -> str:
        return subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(version, range(8)))) == 1
