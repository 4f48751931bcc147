"""`ktqueue up -d` and `ktqueue down` as a user types them, and the state folder that they share."""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from command_line import Run, Start

from ktqueue.broker.redis.state_folder import holder

ELSEWHERE = """
from ktqueue import SyncClient
with SyncClient() as client:
    print(client.generate(model="demo", prompt="A", max_tokens=2).usage)
"""


def wait_until(predicate: Callable[[], bool]) -> None:
    """Wait at most a minute until the condition holds."""
    deadline = time.monotonic() + 60
    while not predicate():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def processes_of(group: int) -> list[Path]:
    """/proc folders of a process and its descendants."""
    found, folders = {group}, [path for path in Path("/proc").iterdir() if path.name.isdecimal()]
    for _ in range(3):  # workers are grandchildren
        for path in folders:
            try:
                status = (path / "status").read_text()
            except OSError:
                continue
            parent = re.search(r"^PPid:\s(\d+)", status, re.M)
            found |= {int(path.name)} if parent and int(parent[1]) in found else set()
    return [Path(f"/proc/{pid}") for pid in found]


@pytest.mark.long
def test_a_detached_installation_works_from_start_to_end(ktqueue: Run, tmp_path: Path) -> None:
    environment = {"KTQUEUE_LOG_FORMAT": "json", "KTQUEUE_LOG_MAX_BYTES": "16KiB"}
    state = tmp_path / ".ktqueue"
    up = ktqueue("up", "-d", "--bridge", "--port", 0, env=environment)
    assert up.returncode == 0, up.stderr
    try:
        (url,) = re.findall(r"at  (http://127\.0\.0\.1:\d+)/v1", up.stdout)
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "demo"
        supervisor = holder(state)
        assert supervisor is not None

        # arq's client, as printed
        program = textwrap.dedent(
            up.stdout[up.stdout.index("  import asyncio") : up.stdout.index("from other folders")]
        )
        pasted = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
        )
        assert pasted.returncode == 0, pasted.stderr
        assert len(pasted.stdout) > 20

        # from another folder
        (tmp_path / "sub").mkdir()
        lost = ktqueue("--debug", "top", "--once", "--state-dir", "sub/.ktqueue")
        assert lost.returncode == 3
        assert re.search(rf"{tmp_path}/sub/\.ktqueue;.*KTQUEUE_BROKER_STATE_DIR.*KTQUEUE_BROKER_URL", lost.stderr)
        (export,) = re.findall(r"from other folders: export (\w+)=(\S+)", up.stdout)
        assert export == ("KTQUEUE_BROKER_STATE_DIR", str(state))
        done = subprocess.run(
            [sys.executable, "-c", ELSEWHERE],
            env={**os.environ, export[0]: export[1]},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert "completion_tokens=2" in done.stdout, done.stderr

        # a second `up` is refused and changes nothing
        second = ktqueue("up", "-d", "--port", 0)
        assert second.returncode == 2
        assert f"process {supervisor}" in second.stderr
        assert holder(state) == supervisor

        # no other user may read it, and ps shows no password
        open_to_others = [path for path in [state, *state.rglob("*")] if stat.S_IMODE(path.stat().st_mode) & 0o077]
        assert open_to_others == []
        password = (state / "password").read_text().strip()
        commands = [(path / "cmdline").read_bytes() for path in processes_of(supervisor)]
        assert len(commands) >= 5
        assert not any(password.encode() in command for command in commands)

        # logs are kept short
        (state / "old.log").write_bytes(b"x" * 20_000)
        wait_until(lambda: (state / "old.log").stat().st_size == 0)

        # logs are JSON lines, and no line appears twice
        for name in ("gateway", "bridge", "worker-1", "up"):
            lines = [json.loads(line) for line in (state / f"{name}.log").read_text().splitlines()]
            assert {"time", "level", "logger", "message"} <= lines[0].keys()
            assert len({line["message"] for line in lines}) == len(lines)
    finally:
        down = ktqueue("down")
    assert down.returncode == 0, down.stderr
    assert "stopped" in down.stdout
    assert holder(state) is None
    assert "drained" in (state / "worker-1.log").read_text()
    again = ktqueue("down")
    assert (again.returncode, again.stdout.split(" (")[0]) == (0, f"nothing runs on {state}")


def test_a_start_that_fails_says_why_and_leaves_nothing(ktqueue: Run, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        failed = ktqueue("up", "-d", "--port", taken.getsockname()[1])
    assert failed.returncode == 2
    assert re.search(r"cannot listen on .*gateway\.port \d+", failed.stderr)
    assert holder(tmp_path / ".ktqueue") is None


def test_down_does_not_signal_another_process_after_a_killed_supervisor(
    start: Start, ktqueue: Run, tmp_path: Path
) -> None:
    up = start("up", "--port", 0, "--state-dir", "state", cwd=tmp_path)
    wait_until(lambda: holder(tmp_path / "state") is not None)
    up.send_signal(signal.SIGKILL)
    up.communicate()
    down = ktqueue("down", "--state-dir", "state")
    assert (down.returncode, down.stdout.startswith("nothing runs")) == (0, True)
