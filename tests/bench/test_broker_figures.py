"""What the benchmarks of the broker count and print, without any timing."""

import json
import os
import sys
import time
from pathlib import Path

from benchmarks.queue import page
from benchmarks.queue.adapters.starts import StartReader, StartWriter
from benchmarks.queue.peers import OURS, SUPERVISED, find_pythons
from benchmarks.queue.stream_clients import Frames, Reader, request
from benchmarks.tables import undisturbed

MACHINE = {
    "cpu": "c", "cores": 2, "isa": "i", "memory_gib": 1, "python": "3", "packages": {"torch": "t"}, "commit": "x",
    "taken": "now",
}  # fmt: skip
AROUND = {"machine": MACHINE, "command": "do it"}
QUIET, LOUD = {"others": 0.0, "load_average": 1.0}, {"others": 0.5, "load_average": 9.0}


async def test_start_records_of_several_workers_do_not_mix(tmp_path: Path) -> None:
    path = str(tmp_path / "starts")
    os.mkfifo(path)
    reader = StartReader(path)
    workers = [StartWriter(path), StartWriter(path)]
    for number in range(500):
        workers[number % 2].record(number)
    starts = await reader.wait(500, 30.0)
    assert sorted(start.number for start in starts) == list(range(500))
    assert {start.process for start in starts} == {os.getpid()}
    reader.forget()
    assert await reader.wait(1, 0.01) == []


def test_frames_are_parsed_wherever_a_body_is_cut() -> None:
    body = b"retry: 1000\n\n" + b"".join(
        b'id: %d\ndata: {"seq":%d,"text":"%d"}\n\n' % (seq, seq, 1_000) for seq in (1, 2, 3)
    )
    for size in (1, 7, len(body)):
        frames = Frames()
        events = [event for start in range(0, len(body), size) for event in frames.feed(body[start : start + size])]
        assert [seq for seq, _ in events] == [1, 2, 3]


def test_a_reader_counts_lost_and_repeated_events() -> None:
    def read(*seqs: int) -> Reader:
        reader = Reader()
        now = time.monotonic_ns()
        reader.take([(seq, {"text": str(now - 5_000_000)}) for seq in seqs], now)
        return reader

    assert read(1, 2, 3).wrong == 0
    assert read(1, 3).wrong == 1
    assert read(1, 2, 2, 3).wrong == 1
    assert read(1, 2).delays == [5_000, 5_000]


def test_a_reconnecting_reader_sends_its_last_event_id() -> None:
    assert b"Last-Event-ID" not in request("/x", 0)
    assert b"\r\nLast-Event-ID: 7\r\n" in request("/x", 7)


def test_queues_without_a_python_are_left_out() -> None:
    assert find_pythons([sys.executable]) == {OURS: sys.executable, SUPERVISED: sys.executable}


def test_disturbed_rounds_do_not_count_while_there_are_others() -> None:
    assert undisturbed([{"p": 1, **QUIET}, {"p": 9, **LOUD}]) == [{"p": 1, **QUIET}]
    assert len(undisturbed([{"p": 1, **LOUD}, {"p": 9, **LOUD}])) == 2


def test_the_table_of_queues_counts_every_kill() -> None:
    def kill(queue: str, seconds: float | None, *, twice: bool = False) -> dict[str, object]:
        return {"point": "recovery", "queue": queue, "seconds": seconds, "twice": twice, **QUIET}

    latency = {"point": "latency", "queue": "ktqueue", "p50_ms": 1.0, "p99_ms": 2.0, **QUIET}
    figures = [latency, kill("ktqueue", 1.5), kill("ktqueue", 2.0), kill("taskiq", None, twice=True), kill("saq", None)]
    result = {**AROUND, "slots": 64, "lease_seconds": 2.0, "waited_seconds": 75.0, "versions": {}, "figures": figures}
    lines = {line.split(" | ")[0].strip("| "): line for line in page.peers(json.loads(json.dumps(result)))}
    assert "1.75 s (1.50 to 2.00)" in lines["ktqueue"]
    assert "ran twice while its worker lived: 1 of 1" in lines["taskiq-redis"]
    assert "not within 30 s: 1 of 1" in lines["SAQ"]


def test_the_readers_table_counts_lost_streams_of_all_rounds() -> None:
    cpus = {"gateway": 0.5, "redis": 0.1, "workers": 0.1, "clients": 0.1}
    point = {"streams": 10, "rate": 20.0, "heavy": "none", "stalled": None, "p50_ms": 1.0, "p99_ms": 2.0, "max_ms": 3.0,
             "gateway_us_per_event": 20.0, "cpus": cpus, "mb_per_1000_clients": 30.0}  # fmt: skip
    figures = [{**point, "complete_streams": 10, **QUIET}, {**point, "complete_streams": 9, **LOUD}]
    [line] = page.streams({**AROUND, "heavy_bytes": 1, "figures": figures})[-1:]
    assert "1 of 20 streams" in line


def test_both_depths_have_a_row() -> None:
    point = {f"{call}_{part}_ms": 0.2 for call in ("submit", "claim") for part in ("p50", "p99")}
    figures = [{"depth": depth, "job_bytes": 1_500.0, **point, **QUIET} for depth in (100_000, 1_000)]
    rows = page.depth({**AROUND, "turns": 10, "prompt_bytes": 400, "figures": figures})[-2:]
    assert [row.split(" | ")[0] for row in rows] == ["| 1,000", "| 100,000"]
