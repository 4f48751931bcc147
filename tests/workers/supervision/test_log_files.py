"""Logs of supervised processes are bounded and private. Nothing is lost while a process continues to write."""

import stat
import subprocess
import sys
import time
from pathlib import Path

from ktqueue.workers.supervision.log_files import begin_log, rotate, rotate_all
from ktqueue.workers.supervision.process import open_log

WRITER = "import sys\nfor line in sys.stdin: print(line.strip() * 100, flush=True)"


def test_a_log_stays_below_its_size_while_a_process_writes(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    begin_log(path)
    with open_log(path) as sink:
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=sink, text=True, bufsize=1
        )
    assert process.stdin is not None
    for number in range(1000, 1020):  # each line has 400 characters
        before = path.stat().st_size
        process.stdin.write(f"{number}\n")
        while path.stat().st_size < before + 401:
            time.sleep(0.001)
        rotate(path, 4096)
    process.stdin.close()
    process.wait()
    old, new = (tmp_path / "worker.log.1"), path
    lines = (old.read_text() + new.read_text()).splitlines()
    assert [line[:4] for line in lines] == [str(number) for number in range(1000, 1020)]
    assert old.stat().st_size <= 4096 + 401
    assert new.stat().st_size <= 4096 + 401
    assert {stat.S_IMODE(log.stat().st_mode) for log in (old, new)} == {0o600}


def test_a_log_that_is_much_too_long_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "redis.log"
    path.write_bytes((b"x" * 99 + b"\n") * 1000 + b"the end\n")
    rotate(path, 4096)
    assert path.stat().st_size == 0
    kept = (tmp_path / "redis.log.1").read_bytes()
    assert len(kept) in range(8000, 8193)
    assert kept.endswith(b"the end\n")


def test_all_logs_of_a_folder_are_limited(tmp_path: Path) -> None:
    for name in ("redis.log", "gateway.log"):
        (tmp_path / name).write_bytes(b"x" * 5000)
    rotate_all(tmp_path, 4096)
    assert [path.name for path in sorted(tmp_path.iterdir()) if path.stat().st_size == 0] == [
        "gateway.log",
        "redis.log",
    ]
