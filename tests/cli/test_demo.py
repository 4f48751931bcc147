"""`ktqueue demo`, and starts of `ktqueue up` that fail. No process and no file is left behind."""

import os
import re
import signal
from pathlib import Path

import pytest
from command_line import Run, Stack, Start

from ktqueue.cli.demo.demo import STORY_TOKENS


def _processes_of(folder: Path) -> list[str]:
    """Command lines of other processes that name the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                environment = (entry / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if str(folder) in command + environment:
                found.append(command)
    return found


@pytest.mark.long
def test_the_story_survives_its_worker_and_nothing_is_left_behind(ktqueue: Run, tmp_path: Path) -> None:
    done = ktqueue("demo", env={"DEMO_MARK": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    for word in ("A story over HTTP", "A batch of 32", "Summary", "34 done, 0 failed", "(p50)", "(p95)", "tok/s"):
        assert word in done.stdout
    line = re.search(
        r"\n\n  kill -9 (\d+), the only worker \.\.\. (\d+) continues at token (\d+), (\d+) ms later\n\n", done.stdout
    )
    assert line is not None, done.stdout
    killed, successor, token, milliseconds = (int(number) for number in line.groups())
    assert killed != successor
    assert 1 < token < STORY_TOKENS  # there is text before and after the kill
    assert milliseconds > 0
    assert f"all {STORY_TOKENS} tokens equal those of an undisturbed run" in done.stdout
    assert "ktqueue up" in done.stdout
    assert "\033" not in done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [".state"]
    assert _processes_of(tmp_path) == []


@pytest.mark.long
def test_ctrl_c_stops_the_demo_and_all_that_it_started(start: Start, tmp_path: Path) -> None:
    process = start("demo", cwd=tmp_path, env={"DEMO_MARK": str(tmp_path)})
    assert process.stdout is not None
    while "A story over HTTP" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert _processes_of(tmp_path) == []


def test_a_second_up_on_one_folder_is_refused(ktqueue: Run, stack: Stack) -> None:
    done = ktqueue("up", "--state-dir", stack.state_dir, "--port", 0)
    assert done.returncode == 2
    assert str(stack.state_dir) in done.stderr


def test_up_with_a_missing_model_names_it(ktqueue: Run, tmp_path: Path) -> None:
    """The exit code is that of wrong input, and nothing is started."""
    done = ktqueue("up", "--model", "nowhere.gguf", "--port", 0)
    assert done.returncode == 2
    assert "nowhere.gguf" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
