"""Measures one gateway process with many SSE readers: `python -m benchmarks.queue.streams`.

The events come through real leases and Redis. delivery: from the beginning of a worker's commit, which encodes its
events, to the moment the client's socket is read, by the clock of one machine. A point is `streams` readers of as many
jobs, each with `rate` events a second. In a heavy point the events of one job have HEAVY_BYTES, so that the kernel's
buffers cannot hide a reader that stalls. Its client reads like the others, or not at all until the run is over.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import redis

from benchmarks import machine
from benchmarks.peer import Peer
from benchmarks.queue.system import percentile
from benchmarks.results import RESULTS, write
from ktqueue.broker.redis.private_server import PrivateServer
from ktqueue.core.config import BrokerConfig, Config, GatewayConfig, config_environment
from ktqueue.workers.supervision.supervisor import GATEWAY_COMMAND

CLIENT_PROCESSES = 2
HEAVY_BYTES = 16_384
START_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Point:
    """What is measured. `heavy`: "none", "read" or "stalled"."""

    streams: int
    rate: float
    seconds: float
    heavy: str = "none"


def points(seconds: float, stall_seconds: float) -> list[Point]:
    """Those of a round."""
    plain = [Point(64, 50.0, seconds), Point(256, 50.0, seconds), Point(1000, 20.0, seconds)]
    return [*plain, *(Point(1000, 20.0, stall_seconds, heavy) for heavy in ("read", "stalled") if stall_seconds)]


def measure(point: Point, url: str, server: int, folder: Path) -> dict[str, Any]:
    """One point, with a gateway, workers and clients of its own. `server`: the process id of Redis."""
    with redis.Redis.from_url(url) as client:
        client.flushall()
    with ExitStack() as stack:
        port, gateway = stack.enter_context(_gateway(url, folder))
        workers = stack.enter_context(Peer([sys.executable, "-m", "benchmarks.queue.stream_workers", "--url", url]))
        command = [sys.executable, "-m", "benchmarks.queue.stream_clients", "--port", str(port)]
        clients = [stack.enter_context(Peer(command)) for _ in range(CLIENT_PROCESSES)]
        heavy_bytes = 0 if point.heavy == "none" else HEAVY_BYTES
        job_ids = workers.ask({"submit": {"streams": point.streams, "heavy_bytes": heavy_bytes}})["job_ids"]
        stalled = job_ids.pop() if point.heavy == "stalled" else None
        empty = _resident_bytes(gateway)
        for place, one in enumerate(clients):
            question = {"job_ids": job_ids[place::CLIENT_PROCESSES], "stalled": None if place else stalled}
            one.ask({"follow": question})
        full = _resident_bytes(gateway)
        processes = {"gateway": [gateway], "redis": [server], "workers": [workers.process_id],
                     "clients": [one.process_id for one in clients]}  # fmt: skip
        began, before = time.monotonic(), _cpu_seconds(processes)
        committed = workers.ask({"run": {"rate": point.rate, "seconds": point.seconds}})
        cpu = {name: seconds - before[name] for name, seconds in _cpu_seconds(processes).items()}
        wall = time.monotonic() - began
        after = _resident_bytes(gateway)
        reports = [one.ask({"report": {}}) for one in clients]
    delays = [delay / 1e3 for report in reports for delay in report["delays_us"]]
    events = point.streams * committed["steps"]
    return {
        **asdict(point),
        "events": events,
        "received": sum(report["events"] for report in reports),
        "complete_streams": sum(report["complete"] for report in reports),
        "p50_ms": percentile(delays, 0.5),
        "p99_ms": percentile(delays, 0.99),
        "max_ms": max(delays),
        "latest_step_ms": committed["latest_step_ms"],
        "gateway_us_per_event": 1e6 * cpu["gateway"] / events,
        "cpus": {name: seconds / wall for name, seconds in cpu.items()},
        "mb_per_1000_clients": (max(full, after) - empty) / 1e6 / point.streams * 1000,
        "gateway_mb": after / 1e6,
        "stalled": reports[0].get("stalled"),
    }


@contextmanager
def _gateway(url: str, folder: Path) -> Iterator[tuple[int, int]]:
    """A gateway process: its port and its id."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = Config(broker=BrokerConfig(url=url), gateway=GatewayConfig(port=port))
    with (folder / "gateway.log").open("ab") as log:
        process = subprocess.Popen(GATEWAY_COMMAND, env={**os.environ, **config_environment(config)}, stderr=log)
    try:
        end = time.monotonic() + START_SECONDS
        while not _answers(port):
            if time.monotonic() > end or process.poll() is not None:
                raise RuntimeError(f"the gateway does not answer: {(folder / 'gateway.log').read_text()}")
            time.sleep(0.05)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(30)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=2.0) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _cpu_seconds(processes: dict[str, list[int]]) -> dict[str, float]:
    return {name: sum(map(machine.cpu_seconds, ids)) for name, ids in processes.items()}


def _resident_bytes(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(*, rounds: int, seconds: float, stall_seconds: float) -> dict[str, Any]:
    """All points, taken in turns, `rounds` times."""
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = PrivateServer()
        url = server.start(folder / "redis")
        try:
            assert server.pid is not None
            watch = machine.Bystanders([server.pid]).watch
            for turn in range(rounds):
                for point in points(seconds, stall_seconds):
                    figure = {"round": turn, **watch(partial(measure, point, url, server.pid, folder))}
                    sys.stderr.write(json.dumps(figure) + "\n")
                    figures.append(figure)
        finally:
            server.stop()
    return {"what": "one gateway process, SSE readers, jobs of nobody's model", "heavy_bytes": HEAVY_BYTES,
            "figures": figures}  # fmt: skip


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each point is taken")
    parser.add_argument("--seconds", type=float, default=20.0, help="of streaming in a point")
    parser.add_argument("--stall-seconds", type=float, default=60.0, help="of those with a heavy stream; 0: none")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    result = run(rounds=arguments.rounds, seconds=arguments.seconds, stall_seconds=arguments.stall_seconds)
    write(arguments.results / "streams.json", result)


if __name__ == "__main__":
    main()
