"""Ctrl-C at any moment of a command: it ends, and there is no traceback."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import ROOT, Process, Stack, Start


def _wait_for_the_first_line(process: Process) -> None:
    """Wait until the process has begun with our code, which gives up Python's own handler of SIGINT."""
    status = Path(f"/proc/{process.pid}/status")
    handled = False
    while process.poll() is None:
        before = handled
        caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt:"))
        handled = bool(int(caught.split()[1], 16) >> (signal.SIGINT - 1) & 1)
        if before and not handled:
            return
        time.sleep(0.0005)
    raise AssertionError(process.communicate())


@pytest.mark.parametrize("words", [("jobs", "list"), ("submit", "hello", "--max-tokens", 20)], ids=["jobs", "submit"])
def test_ctrl_c_at_any_moment_leaves_no_traceback(
    start: Start, stack: Stack, tmp_path: Path, words: tuple[object, ...]
) -> None:
    codes = set()
    for moment in range(8):
        process = start(*words, *stack.flags, cwd=tmp_path)
        _wait_for_the_first_line(process)
        time.sleep(0.06 * moment)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        codes.add(process.returncode)
        # The command, or the job, may have been faster than the signal.
        assert re.fullmatch(r"(no jobs|cancelled job-\w+|job-\w+ is done already|)\n?", err), f"moment {moment}: {err}"
    assert codes <= {-signal.SIGINT, 130, 0}


def test_a_ctrl_c_that_python_ignores_is_sent_again(tmp_path: Path) -> None:
    program = """
import signal, time, weakref
import ktqueue.__main__, ktqueue.cli.main

class Thing: pass

def run(words):
    thing = Thing()
    note = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
    del thing
    time.sleep(60)
    return 0

ktqueue.cli.main.run = run
ktqueue.__main__.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
