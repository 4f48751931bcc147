"""A measured process. It is started once and measures one point at a time, so peers can take turns within a run."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from benchmarks.machine import ROOT


class Peer:
    """A process that answers each question with one JSON line (see `json_lines`). It idles in between.

    Its methods raise RuntimeError if the process has ended.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @property
    def process_id(self) -> int:
        return self._process.pid

    def ask(self, method: str, **arguments: Any) -> Any:
        """Call a method of the process and return its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({method: arguments}) + "\n")
        self._process.stdin.flush()
        return self.hear()

    def hear(self) -> Any:
        """Return the next line that the process writes."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended with code {self._process.wait()}")
        return json.loads(line)

    def kill(self) -> None:
        """Kill the process and wait for its end. Does nothing if it has ended."""
        self._process.kill()
        self._process.wait(30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def start_ours(model: Path, threads: int) -> Peer:
    """Our engine."""
    return Peer([sys.executable, "-m", "benchmarks.engine.ours", "--model", str(model), "--threads", str(threads)])


def start_llama(python: str, model: Path, threads: int, rows: int, *, repack: bool, exact: bool = False) -> Peer:
    """llama.cpp under the interpreter that has it. The first line that it says is its version.

    exact: its cache is in float32, and its attention is not flash attention.
    """
    command = [python, "-m", "benchmarks.engine.llama", "--model", str(model), "--threads", str(threads)]
    return Peer([*command, "--rows", str(rows), *([] if repack else ["--no-repack"]), *(["--exact"] if exact else [])])
