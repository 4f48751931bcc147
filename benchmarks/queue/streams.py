"""Measures one gateway process with many SSE readers: `python -m benchmarks.queue.streams`.

The events come through real leases and Redis. delivery: from the beginning of a worker's commit, which encodes its
events, to the moment the client's socket is read, by the clock of one machine. A point is `streams` readers of as many
jobs, each with `rate` events a second. In a heavy point the events of one job have HEAVY_BYTES, so that the kernel's
buffers cannot hide a reader that stalls. Its client reads like the others, or not at all until the run is over.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import httpx
import redis

from benchmarks import machine
from benchmarks.command import command_line
from benchmarks.peer import Peer
from benchmarks.percentiles import percentiles
from benchmarks.queue.servers import private_redis
from benchmarks.results import write
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
    """The points of a round."""
    plain = [Point(64, 50.0, seconds), Point(256, 50.0, seconds), Point(1000, 20.0, seconds)]
    return [*plain, *(Point(1000, 20.0, stall_seconds, heavy) for heavy in ("read", "stalled") if stall_seconds)]


def measure_point(point: Point, url: str, server: int) -> dict[str, Any]:
    """Measure a point with its own gateway, workers and clients. `server`: the process id of Redis."""
    with redis.Redis.from_url(url) as client:
        client.flushall()
    with ExitStack() as stack:
        port, gateway = stack.enter_context(_gateway(url))
        workers = stack.enter_context(Peer([sys.executable, "-m", "benchmarks.queue.stream_workers", "--url", url]))
        command = [sys.executable, "-m", "benchmarks.queue.stream_clients", "--port", str(port)]
        clients = [stack.enter_context(Peer(command)) for _ in range(CLIENT_PROCESSES)]
        heavy_bytes = 0 if point.heavy == "none" else HEAVY_BYTES
        job_ids = workers.ask("submit", streams=point.streams, heavy_bytes=heavy_bytes)["job_ids"]
        stalled = job_ids.pop() if point.heavy == "stalled" else None
        empty = machine.resident_bytes(gateway)
        for i, client in enumerate(clients):
            client.ask("follow", job_ids=job_ids[i::CLIENT_PROCESSES], stalled=None if i else stalled)
        full = machine.resident_bytes(gateway)
        processes = {"gateway": [gateway], "redis": [server], "workers": [workers.process_id],
                     "clients": [client.process_id for client in clients]}  # fmt: skip
        began, before = time.monotonic(), _cpu_seconds(processes)
        committed = workers.ask("run", rate=point.rate, seconds=point.seconds)
        cpu = {name: seconds - before[name] for name, seconds in _cpu_seconds(processes).items()}
        wall = time.monotonic() - began
        after = machine.resident_bytes(gateway)
        reports = [client.ask("report") for client in clients]
    delays = [delay / 1e3 for report in reports for delay in report["delays_us"]]
    events = point.streams * committed["steps"]
    return {
        **asdict(point),
        "events": events,
        "received": sum(report["events"] for report in reports),
        "complete_streams": sum(report["complete"] for report in reports),
        **percentiles(delays, 50, 99),
        "max_ms": max(delays),
        "latest_step_ms": committed["latest_step_ms"],
        "gateway_us_per_event": 1e6 * cpu["gateway"] / events,
        "cpus": {name: seconds / wall for name, seconds in cpu.items()},
        "mb_per_1000_clients": (max(full, after) - empty) / 1e6 / point.streams * 1000,
        "gateway_mb": after / 1e6,
        "stalled": reports[0].get("stalled"),
    }


@contextmanager
def _gateway(url: str) -> Iterator[tuple[int, int]]:
    """A gateway process that answers: its port and its id."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = Config(broker=BrokerConfig(url=url), gateway=GatewayConfig(port=port))
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(GATEWAY_COMMAND, env={**os.environ, **config_environment(config)}, stderr=log)
        try:
            end = time.monotonic() + START_SECONDS
            while not _answers(port):
                if time.monotonic() > end or process.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(f"the gateway does not answer: {log.read()}")
                time.sleep(0.05)
            yield port, process.pid
        finally:
            process.terminate()
            process.wait(30)


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/healthz", trust_env=False).is_success
    except httpx.TransportError:
        return False


def _cpu_seconds(processes: dict[str, list[int]]) -> dict[str, float]:
    return {name: sum(map(machine.cpu_seconds, ids)) for name, ids in processes.items()}


def measure(*, rounds: int, seconds: float, stall_seconds: float) -> dict[str, Any]:
    """All points, taken in turns, `rounds` times."""
    figures: list[dict[str, Any]] = []
    with private_redis() as (url, process_id):
        for number in range(rounds):
            for point in points(seconds, stall_seconds):
                figure = machine.watch(partial(measure_point, point, url, process_id), [process_id])
                figures.append({"round": number, **figure})
                sys.stderr.write(json.dumps(figures[-1]) + "\n")
    return {"what": "one gateway process, SSE readers, jobs of nobody's model", "heavy_bytes": HEAVY_BYTES,
            "figures": figures}  # fmt: skip


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often each point is taken")
    parser.add_argument("--seconds", type=float, default=20.0, help="of streaming in a point")
    parser.add_argument("--stall-seconds", type=float, default=60.0, help="of those with a heavy stream; 0: none")
    arguments = parser.parse_args()
    result = measure(rounds=arguments.rounds, seconds=arguments.seconds, stall_seconds=arguments.stall_seconds)
    write(arguments.results / "streams.json", result)


if __name__ == "__main__":
    main()
