"""Kills everything while a batch runs: `python -m tests.chaos.batches [--lines 50000] [--kills 20] [--seed 1]`.

An installation with real processes and two control workers runs one batch over HTTP. At drawn moments of its way one
process gets SIGKILL: a control worker, the gateway, a worker or Redis; halfway all of them do. Afterwards every line
must be in one of the two files, once and in order. The memory of each kind of process is sampled; its largest value in
each tenth of the batch is written. Exits with 1 if a line is missing, repeated or out of order.
"""

import argparse
import asyncio
import itertools
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from benchmarks.results import RESULTS, write
from ktqueue.core.config import BrokerConfig, Config, EngineConfig, GatewayConfig, WorkerConfig
from ktqueue.workers.supervision.supervisor import CONTROL_COMMAND, Supervisor, child_environment

ENDED = ("failed", "completed", "expired", "cancelled")
KINDS = ("control", "gateway", "worker", "redis")
FAILS_EVERY = 97  # every so many lines have a parameter that is refused when they run
PAGE = os.sysconf("SC_PAGE_SIZE")


def content(count: int, tokens: int) -> bytes:
    """The input: `count` lines with a few beginnings, each for `tokens` tokens."""
    return b"".join(
        json.dumps({
            "custom_id": f"c{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "model": "demo",
                "prompt": f"The {number % 7}. king had {number} horses and",
                "max_tokens": tokens,
                "temperature": 900 if number % FAILS_EVERY == 3 else 0.5,
            },
        }).encode() + b"\n"
        for number in range(count)
    )  # fmt: skip


class Installation:
    """The processes, and an HTTP client that waits while the gateway is away."""

    def __init__(self, up: Supervisor, http: httpx.AsyncClient) -> None:
        self._up = up
        self._http = http
        self._second: asyncio.subprocess.Process | None = None
        self.samples: list[tuple[float, dict[str, int]]] = []  # part of the batch that is done, bytes of each kind

    async def start_second(self) -> None:
        """Start another control worker, which nobody restarts but this."""
        self._second = await asyncio.create_subprocess_exec(
            *CONTROL_COMMAND, env=child_environment(self._up.config), stderr=asyncio.subprocess.DEVNULL
        )

    async def stop_second(self) -> None:
        """Kill it."""
        if self._second is not None and self._second.returncode is None:
            self._second.kill()
            await self._second.wait()

    def processes(self) -> Iterator[tuple[str, int]]:
        """Kind and process id of everything that runs now."""
        children = [("control", self._up.helpers[0]), ("gateway", self._up.gateway)]
        for kind, child in [*children, *(("worker", worker) for worker in self._up.workers)]:
            if child.pid is not None:
                yield kind, child.pid
        if self._second is not None and self._second.returncode is None:
            yield "control", self._second.pid
        if self._up.redis_pid is not None:
            yield "redis", self._up.redis_pid

    async def kill(self, kinds: set[str]) -> None:
        """SIGKILL every process of these kinds."""
        for kind, pid in list(self.processes()):
            if kind in kinds:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if "control" in kinds:
            await self.stop_second()
            await self.start_second()

    def sample(self, part: float) -> None:
        """Note the resident memory of each kind of process, the largest of its processes."""
        sizes: dict[str, int] = {}
        for kind, pid in list(self.processes()):
            with suppress(OSError):
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                sizes[kind] = max(sizes.get(kind, 0), PAGE * pages)
        self.samples.append((part, sizes))

    async def call(self, method: str, path: str, **options: Any) -> Any:
        """The JSON of an answer, or its text. Repeated while the gateway, Redis or the workers are away."""
        while True:
            with suppress(httpx.TransportError):
                answer = await self._http.request(method, path, **options)
                if answer.status_code < 500:
                    assert answer.is_success, answer.text
                    return answer.json() if path.count("content") == 0 else answer.text
            await asyncio.sleep(0.1)


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one batch while processes are killed."""
    draw = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="batches-") as folder:
        config = Config(
            broker=BrokerConfig(state_dir=folder, lease_seconds=arguments.lease, max_attempts=1_000_000),
            engine=EngineConfig(num_pages=1024, threads=1),
            worker=WorkerConfig(drain_seconds=0.5),
            gateway=GatewayConfig(port=0),
        )
        async with Supervisor(config) as up, httpx.AsyncClient(base_url=up.url, timeout=60.0, trust_env=False) as http:
            system = Installation(up, http)
            await system.start_second()
            try:
                return await _run(system, arguments, draw)
            finally:
                await system.stop_second()


async def _run(system: Installation, arguments: argparse.Namespace, draw: random.Random) -> dict[str, Any]:
    data = content(arguments.lines, arguments.tokens)
    form = {"files": {"file": ("lines.jsonl", data)}, "data": {"purpose": "batch"}}
    file = await system.call("POST", "/v1/files", **form)
    wanted = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = await system.call("POST", "/v1/batches", json=wanted, headers={"Idempotency-Key": "one"})
    began, end = time.monotonic(), time.monotonic() + 60 * arguments.minutes
    moments = sorted([draw.random() for _ in range(arguments.kills - 1)] + [0.5])
    statuses, kills, counts = set(), 0, []
    while batch["status"] not in ENDED and time.monotonic() < end:
        done = batch["request_counts"]["completed"] + batch["request_counts"]["failed"]
        part = done / arguments.lines
        statuses.add(batch["status"])
        counts.append(done)
        system.sample(part)
        while moments and part >= moments[0]:
            await system.kill(set(KINDS) if moments.pop(0) == 0.5 else {draw.choice(KINDS)})
            kills += 1
        await asyncio.sleep(arguments.pause)
        batch = await system.call("GET", f"/v1/batches/{batch['id']}")
    seconds = time.monotonic() - began
    found = [
        [json.loads(line) for line in (await system.call("GET", f"/v1/files/{batch[name]}/content")).splitlines()]
        for name in ("output_file_id", "error_file_id")
        if batch[name]
    ]
    expected = [
        [f"c{number}" for number in range(arguments.lines) if (number % FAILS_EVERY == 3) is failed]
        for failed in (False, True)
    ]
    return {
        "what": "processes killed with SIGKILL while a batch over HTTP runs",
        "lines": arguments.lines,
        "status": batch["status"],
        "statuses_seen": sorted(statuses),
        "seconds": seconds,
        "kills": kills,
        "counts_went_back": sum(later < earlier for earlier, later in itertools.pairwise(counts)),
        "each_line_once_and_in_order": [[line["custom_id"] for line in lines] for lines in found] == expected,
        "resident_mib_by_tenth": {kind: _by_tenth(system.samples, kind) for kind in KINDS},
    }


def _by_tenth(samples: list[tuple[float, dict[str, int]]], kind: str) -> list[int]:
    """The largest resident memory of a kind of process in each tenth of the batch, in MiB. 0: no sample."""
    largest = [0] * 10
    for part, sizes in samples:
        tenth = min(9, int(10 * part))
        largest[tenth] = max(largest[tenth], sizes.get(kind, 0) >> 20)
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--tokens", type=int, default=2, help="of each answer")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=60.0, help="the longest time")
    parser.add_argument("--lease", type=float, default=1.0, help="broker.lease_seconds")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two looks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, help="a folder to write batches.json to")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    result = asyncio.run(measure(arguments))
    for name, value in result.items():
        sys.stdout.write(f"{name}: {value}\n")
    write((arguments.results or RESULTS) / "batches.json", result)
    sys.exit(not (result["each_line_once_and_in_order"] and result["status"] == "completed"))


if __name__ == "__main__":
    main()
