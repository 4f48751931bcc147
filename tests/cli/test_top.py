"""`ktqueue top` with real workers: frames, JSON, a terminal, and a Redis that restarts."""

import io
import json
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from command_line import OpenTerminal, Process, Run, Stack, Start
from rich.console import Console

from ktqueue.broker.jobs import BoundJobs, QueueDepth
from ktqueue.broker.models import WorkerInfo
from ktqueue.broker.redis.private_server import PrivateServer
from ktqueue.broker.snapshot import Snapshot
from ktqueue.cli.terminal.short_names import short_names
from ktqueue.cli.top import frame

LEAVES_SCREEN, SHOWS_CURSOR = "\x1b[?1049l", "\x1b[?25h"


def test_one_frame_is_plain_text(ktqueue: Run, stack: Stack) -> None:
    done = ktqueue("top", "--once", *stack.flags)
    assert done.returncode == 0, done.stderr
    summary, _, heads, worker, *_ = done.stdout.splitlines()
    assert "1 worker  " in summary
    assert "of 2.0 GiB" in summary
    assert heads.split() == ["worker", "model", "host", "lease", "rows", "pages", "tok/s", "last", "step"]
    assert "demo" in worker
    queues = done.stdout.partition("queue ")[2].splitlines()
    shown = [line.split() for line in queues[1:]]
    assert [row[:2] + row[3:5] for row in shown] == [["demo", "interactive", "0", "0"], ["demo", "batch", "0", "0"]]
    assert all(re.fullmatch("[0-9a-f]{12}", row[2]) for row in shown)
    assert "\033" not in done.stdout


def test_json_has_a_line_for_each_look(ktqueue: Run, start: Start, stack: Stack, tmp_path: Path) -> None:
    process = start("top", "--json", "--interval", 0.2, *stack.flags, cwd=tmp_path)
    assert json.loads(process.stdout.readline())["workers"]
    submitted = ktqueue("submit", "hello", "--max-tokens", 4000, "-n", 32, "-d", "--job-id", "cli-top", *stack.flags)
    assert submitted.returncode == 0, submitted.stderr
    busy = None
    for line in islice(process.stdout, 200):
        look = json.loads(line)
        (worker,) = look["workers"]
        rows, rate = worker["stats"]["running"], look["tokens_per_second"]
        if worker["jobs"] == 1 and rows > 1 and rate > 0 and worker["step_age"] is not None:
            busy = look
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert ktqueue("jobs", "cancel", "cli-top", *stack.flags).returncode == 0
    assert busy is not None
    assert 0 < worker["lease_left"] <= 2
    assert (worker["jobs"], worker["max_num_seqs"]) == (1, 512)
    assert busy["tokens_per_second"] == worker["stats"]["generation_tokens_per_second"]
    assert [(queue["job_class"], queue["waiting"], queue["running"]) for queue in busy["queues"]] == [
        ("interactive", 0, 1),
        ("batch", 0, 0),
    ]
    assert busy["redis"]["memory_used"] > 100_000


def test_top_ends_silently_when_its_pipe_is_closed(start: Start, stack: Stack, tmp_path: Path) -> None:
    process = start("top", "--json", "--interval", 0.1, *stack.flags, cwd=tmp_path)
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=30) == 0
    assert process.stderr.read() == ""
    process.stderr.close()


def test_top_restores_the_terminal(terminal: OpenTerminal, stack: Stack) -> None:
    shown = terminal("top", "--interval", 0.2, *stack.flags)
    shown.wait_for("last step")
    shown.wait_for("interactive")
    shown.wait_for("last step")  # a second frame
    assert LEAVES_SCREEN not in shown.raw
    shown.type("\x03")
    assert shown.end() == 0
    assert LEAVES_SCREEN in shown.raw
    assert shown.raw.rindex(SHOWS_CURSOR) > shown.raw.rindex("\x1b[?25l")
    assert "Traceback" not in shown.screen


def test_a_missing_redis_at_the_start_is_an_error(ktqueue: Run, tmp_path: Path) -> None:
    done = ktqueue("top", "--once", "--state-dir", tmp_path / "none")
    assert done.returncode == 3
    assert done.stdout == ""


@pytest.fixture
def server() -> Iterator[PrivateServer]:
    server = PrivateServer()
    yield server
    server.stop()


@pytest.mark.parametrize("words", [("--json",), ()])
def test_top_continues_when_redis_comes_back(
    start: Start, server: PrivateServer, tmp_path: Path, words: tuple[str, ...]
) -> None:
    server.start(tmp_path / "state")
    process = start("top", "--interval", 0.1, *words, "--state-dir", tmp_path / "state", cwd=tmp_path)
    wait_for_line(process, "memory_used" if words else "0 workers")
    server.stop()
    wait_for_line(process, '"error"' if words else "without an answer")
    server.start(tmp_path / "state")
    wait_for_line(process, "memory_used" if words else "Redis is back after")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")


def wait_for_line(process: Process, text: str) -> None:
    deadline = time.monotonic() + 60
    for line in process.stdout:
        if text in line:
            return
        assert time.monotonic() < deadline
    raise AssertionError(f"the process ended: {process.communicate()}")


def worker(number: int) -> WorkerInfo:
    """A worker whose figures have many digits."""
    return WorkerInfo(
        worker_id=f"long-host-name-{1000000 + number}-ab12cd34", model="Qwen3-Coder-480B-A35B-Instruct-Q4_K_M",
        digest="0123456789abcdef" * 2,
        max_num_seqs=256, running=255, host="long-host-name.rack-7.example", started_at=0.0,
        process=f"boot:1:{1000000 + number}",
        stats={"running": 256, "free_pages": 0, "total_pages": 9, "draining": 1,
               "generation_tokens_per_second": 12345.6, "batch_tokens_per_second": 12000.0, "rows_wanted": 178,
               "rows_held_by_interactive": 1},
        lease_left=119.0, step_age=3.0,
    )  # fmt: skip


@pytest.mark.parametrize("workers", [1, 40])
@pytest.mark.parametrize("models", [1, 30])
def test_a_frame_fits_a_small_terminal(workers: int, models: int) -> None:
    depths = [
        QueueDepth(f"Qwen3-Coder-480B-A35B-Instruct-{n}", 2000, 100000, 9000, 9, 3500.0, 86000.0) for n in range(models)
    ]
    listed = [worker(n) for n in range(workers)]
    snapshot = Snapshot(taken_at=0.0, workers=listed, depths=depths, memory_used=1 << 40, memory_limit=1 << 40)
    written = io.StringIO()
    console = Console(file=written, width=80, height=24, force_terminal=False)
    console.print(frame(snapshot, "x" * 100, lines=24))
    lines = written.getvalue().splitlines()
    assert len(lines) <= 24
    assert max(len(line) for line in lines) <= 80
    text = "\n".join(lines)
    for figure in ("12,346", "256/256", "100%", "draining", "100,000", "119 s", "24 h"):
        assert figure in text
    assert "1000000-a" in text
    assert ("lines do not fit" in text) == (workers + models > 2)


def test_no_two_models_or_workers_look_the_same_in_a_narrow_terminal() -> None:
    names = ("Qwen3-Coder-30B-A3B-Instruct-Q4_K_M", "Qwen3-Coder-480B-A35B-Instruct-Q4_K_M", "Qwen3-30B-Q4_K_M")
    workers = [replace(worker(n), model=name) for n, name in enumerate(names)]
    depths = [QueueDepth(name, 2000, 100000, 9000, 9, 3500.0, 86000.0) for name in names]
    written = io.StringIO()
    snapshot = Snapshot(taken_at=0.0, workers=workers, depths=depths, memory_used=1, memory_limit=0)
    Console(file=written, width=60).print(frame(snapshot, columns=60))
    lines = written.getvalue().splitlines()
    head = next(place for place, line in enumerate(lines) if line.startswith("queue"))
    assert len({line.split()[0] for line in lines[3 : head - 1]}) == len(names), written.getvalue()
    assert len({line.split()[0] for line in lines[head + 1 :]}) == len(names), written.getvalue()


@pytest.mark.parametrize("width", range(2, 40))
def test_short_names_differ(width: int) -> None:
    names = [
        "Qwen3-Coder-30B-A3B-Instruct",
        "Qwen3-Coder-480B-A35B-Instruct",
        "Qwen3-480B-Instruct",
        "demo",
        "a1b",
        "a2b",
    ]
    short = short_names(frozenset(names), width)
    assert len(set(short.values())) == len(names) and max(map(len, short.values())) <= width


def test_classes_have_tokens_a_second_and_the_batch_class_its_rows() -> None:
    workers = [worker(1), worker(2)]
    depths = [QueueDepth(name, 1, 2, 3, 1, None, None) for name in (workers[0].model, "other")]
    written = io.StringIO()
    console = Console(file=written, width=120)
    console.print(frame(Snapshot(taken_at=0.0, workers=workers, depths=depths, memory_used=1, memory_limit=0)))
    shown = [line.split()[3:] for line in written.getvalue().partition("queue ")[2].splitlines()[1:3]]
    assert shown == [["1", "2", "691"], ["2", "1", "356", "(interactive)", "24,000"]]


def test_jobs_that_no_worker_can_take_are_shown() -> None:
    bound = [
        BoundJobs(model="chat", format=1, digest="0123456789abcdef" * 2, interactive=2, batch=1, unserved=60.0),
        BoundJobs(model="chat", format=2, digest=None, interactive=4, batch=0, unserved=1.0),
    ]
    snapshot = Snapshot(taken_at=0.0, workers=[], depths=[], bound=bound, memory_used=1, memory_limit=0)
    written = io.StringIO()
    Console(file=written, width=120).print(frame(snapshot))
    assert "3 jobs of chat wait for a worker with digest 0123456789ab (and 4 more)" in written.getvalue()
    assert [one["unserved"] for one in snapshot.document()["bound"]] == [60.0, 1.0]
