"""The state folder is private and belongs to one process at a time, whatever a crash left behind."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ktqueue.broker.redis.state_folder import LOCK_NAME, StateFolder, holder
from ktqueue.core.errors import ConfigError

HOLD = """
import sys
from ktqueue.broker.redis.state_folder import StateFolder
folder = StateFolder.open(sys.argv[1])
folder.hold()
print("held", flush=True)
input()
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def other(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that holds `tmp_path/state`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "state")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_new_folder_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        StateFolder.open(tmp_path / "a" / "state").hold()
    finally:
        os.umask(before)
    assert mode(tmp_path / "a" / "state") == 0o700
    assert mode(tmp_path / "a" / "state" / LOCK_NAME) == 0o600


def test_files_that_an_older_version_left_open_become_private(tmp_path: Path) -> None:
    state = tmp_path / "state"
    (state / "appendonlydir").mkdir(parents=True)
    state.chmod(0o755)
    files = [state / "gateway.log", state / "redis.log", state / "worker-1.log.1", state / "lock"]
    files.append(state / "appendonlydir" / "appendonly.aof.1.incr.aof")
    for path in files:
        path.write_text("Once upon a time")
        path.chmod(0o644)
    StateFolder.open(state)
    assert [mode(path) for path in (state, state / "appendonlydir")] == [0o700, 0o700]
    assert {mode(path) for path in files if path.name != "lock"} == {0o600}


def test_a_folder_with_other_files_stays_as_it_is(tmp_path: Path) -> None:
    notes = tmp_path / "notes.log"
    notes.write_text("mine")
    notes.chmod(0o644)
    tmp_path.chmod(0o755)
    StateFolder.open(tmp_path)
    assert (mode(tmp_path), mode(notes)) == (0o755, 0o644)


def test_a_folder_that_cannot_be_used_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"broker\.state_dir .*file/state.*--state-dir DIR or KTQUEUE_BROKER_STATE_DIR"
    ):
        StateFolder.open(tmp_path / "file" / "state")


def test_two_processes_do_not_share_a_folder(tmp_path: Path, other: "subprocess.Popen[str]") -> None:
    assert holder(tmp_path / "state") == other.pid
    with pytest.raises(ConfigError, match=rf"already runs on .*state \(process {other.pid}\).*ktqueue down"):
        StateFolder.open(tmp_path / "state").hold()


def test_a_killed_process_holds_no_folder_whoever_has_its_id_now(
    tmp_path: Path, other: "subprocess.Popen[str]"
) -> None:
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert (tmp_path / "state" / LOCK_NAME).exists()
    assert holder(tmp_path / "state") is None
    folder = StateFolder.open(tmp_path / "state")
    folder.hold()
    folder.release()
