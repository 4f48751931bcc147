"""Measures the queue alone, beside other queues: no-op jobs through each in turn, over one private Redis.

latency: from before the submit of a job to its start in an idle worker process. throughput: jobs that were queued
before, from the first start to the last, in one worker process. recovery: from the kill -9 of the worker that runs a
job to the job's second start, in an idle worker. All queues use a lease (idle timeout, heartbeat) of one length, and
then their defaults. Ours is also measured with a supervisor, which sees the death, as under `ktqueue up`.
`python -m benchmarks.queue.peers`.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import redis

from benchmarks import machine
from benchmarks.command import command_line
from benchmarks.peer import Peer
from benchmarks.percentiles import percentiles
from benchmarks.queue.servers import private_redis
from benchmarks.results import write
from ktqueue.core.config import BrokerConfig
from ktqueue.workers.supervision.lease_release import release_leases_of

OURS = "ktqueue"
DISTRIBUTIONS = {"streaq": ["streaq"], "saq": ["saq"], "taskiq": ["taskiq", "taskiq-redis"]}  # of each peer's Python
SUPERVISED = "ktqueue up"  # takes part in the recovery alone
MODULES = {OURS: "ours", SUPERVISED: "ours", "streaq": "streaq", "saq": "saq", "taskiq": "taskiq"}
SLOTS = 64
JOBS = {OURS: 40_000}  # of a throughput point; of the others:
FEWER_JOBS = 6_000
LATENCY_JOBS = 300
WARM_UP_JOBS = 20
LEASE_SECONDS = 2.0  # of a tuned worker: our default
HOLD_SECONDS = (2.5 * LEASE_SECONDS, 3.5 * LEASE_SECONDS)  # how long a job runs before its worker is killed
LONGEST_WAIT = {True: 30.0, False: 75.0}  # for a second start; tuned or not


class Contest:
    """One server, and a Python for each queue. `process_id`: of the server."""

    def __init__(self, url: str, process_id: int, folder: Path, pythons: dict[str, str]) -> None:
        self.pythons = pythons
        self.process_id = process_id
        self._url = url
        self._pipe = folder / "starts"
        os.mkfifo(self._pipe)

    @contextmanager
    def queue(self, name: str, *, workers: int, lease: float | None = None) -> Iterator[tuple[Peer, list[Peer]]]:
        """A client and workers that are ready, over an empty server."""
        with redis.Redis.from_url(self._url) as client:
            client.flushall()
        with self.process(name, "client", lease) as client:
            running = [self.process(name, "worker", lease) for _ in range(workers)]
            try:
                for worker in running:
                    worker.hear()
                yield client, running
            finally:
                for worker in running:
                    worker.kill()

    def process(self, name: str, role: str, lease: float | None = None) -> Peer:
        """A client, which has said that it is ready, or a worker, which will."""
        command = [self.pythons[name], "-m", f"benchmarks.queue.adapters.{MODULES[name]}", role, "--url", self._url,
                   "--pipe", str(self._pipe), "--slots", str(SLOTS)]  # fmt: skip
        peer = Peer([*command, *([] if lease is None else ["--lease", str(lease)])])
        if role == "client":
            peer.hear()
        return peer

    # Points

    def latency(self, name: str) -> dict[str, Any]:
        """Milliseconds from submit to start."""
        with self.queue(name, workers=1) as (client, _):
            client.ask("latency", jobs=WARM_UP_JOBS)
            latencies = client.ask("latency", jobs=LATENCY_JOBS)
        return {**percentiles(latencies, 50, 99), "max_ms": max(latencies)}

    def throughput(self, name: str) -> dict[str, Any]:
        """Jobs a second, and what a job costs worker and server in CPU time."""
        jobs = JOBS.get(name, FEWER_JOBS)
        with self.queue(name, workers=0) as (client, _):
            filled = client.ask("fill", jobs=jobs)
            worker = self.process(name, "worker")
            try:
                ready = worker.hear()
                server = machine.cpu_seconds(self.process_id)
                drained = client.ask("drain", jobs=jobs)
                time.sleep(0.2)  # what is left is saved
                worker_cpu = machine.cpu_seconds(worker.process_id) - ready["cpu_seconds"]
                server_cpu = machine.cpu_seconds(self.process_id) - server
            finally:
                worker.kill()
        return {**filled, **drained, "jobs": jobs, "worker_us": 1e6 * worker_cpu / jobs,
                "redis_us": 1e6 * server_cpu / jobs}  # fmt: skip

    def recovery(self, name: str, *, tuned: bool) -> dict[str, Any]:
        """Seconds from the kill to the second start; None if it did not come; `twice` if it came before the kill."""
        with self.queue(name, workers=2, lease=LEASE_SECONDS if tuned else None) as (client, workers):
            client.ask("latency", jobs=WARM_UP_JOBS)
            held = client.ask("hold", seconds=random.uniform(*HOLD_SECONDS))
            if held["starts"] > 1:
                return {"seconds": None, "twice": True}
            [victim] = [worker for worker in workers if worker.process_id == held["process"]]
            killed = time.monotonic_ns()
            victim.kill()
            if name == SUPERVISED:
                asyncio.run(release_leases_of(BrokerConfig(url=self._url), victim.process_id, -signal.SIGKILL))
            restarted = client.ask("again", seconds=LONGEST_WAIT[tuned])
        return {"seconds": None if restarted is None else (restarted - killed) / 1e9, "twice": False}


def find_pythons(candidates: Sequence[str]) -> dict[str, str]:
    """The first Python that has each peer; ours for ktqueue. Peers that none has are left out."""
    found = {OURS: sys.executable, SUPERVISED: sys.executable}
    for name, distributions in DISTRIBUTIONS.items():
        for python in candidates:
            if versions(python, distributions):
                found[name] = python
                break
    return found


def versions(python: str, distributions: Sequence[str]) -> dict[str, str]:
    """Installed versions under a Python; nothing if one is missing."""
    code = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    run = subprocess.run([python, "-c", code, *distributions], capture_output=True, text=True, check=False)
    return json.loads(run.stdout) if run.returncode == 0 else {}


def measure(pythons: dict[str, str], *, rounds: int, kills: int, defaults: bool) -> dict[str, Any]:
    """All points of all queues, taken in turns, `rounds` times, `kills` in each; at the defaults one kill in all."""
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, private_redis(port=0) as (url, process_id):
        contest = Contest(url, process_id, Path(folder), pythons)
        for number in range(rounds):
            for point, name, take in _points(contest, kills, defaults and not number):
                figure = {"round": number, "point": point, "queue": name, **machine.watch(take, [process_id])}
                sys.stderr.write(json.dumps(figure) + "\n")
                figures.append(figure)
        with redis.Redis.from_url(url) as client:
            server = client.info("server")  # Valkey also names the version of Redis that it is compatible with
    installed: dict[str, str] = {}
    for name, distributions in DISTRIBUTIONS.items():
        if name in pythons:
            installed |= versions(pythons[name], distributions)
    installed |= {name: server[f"{name}_version"] for name in ("valkey", "redis") if f"{name}_version" in server}
    return {"what": "no-op jobs through one worker process", "slots": SLOTS, "lease_seconds": LEASE_SECONDS,
            "waited_seconds": LONGEST_WAIT[False], "versions": installed,
            "figures": figures}  # fmt: skip


def _points(contest: Contest, kills: int, defaults: bool) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    everybody = list(contest.pythons)
    peers = [name for name in everybody if name in DISTRIBUTIONS]
    queues = [name for name in everybody if name != SUPERVISED]
    order: list[tuple[str, Callable[[str], dict[str, Any]], list[str]]] = [
        ("latency", contest.latency, queues),
        ("throughput", contest.throughput, queues),
        *[("recovery", partial(contest.recovery, tuned=True), everybody)] * kills,
        *[("recovery at defaults", partial(contest.recovery, tuned=False), peers)] * defaults,
    ]
    for point, measure_queue, names in order:
        for name in names:
            yield point, name, partial(measure_queue, name)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often each point is taken")
    parser.add_argument("--kills", type=int, default=3, help="kills of each queue's worker in a round")
    parser.add_argument("--queues", default=",".join(MODULES), help="which take part")
    parser.add_argument("--without-defaults", action="store_true", help="no recovery at the defaults: minutes less")
    parser.add_argument(
        "--peers-python", default=os.environ.get("PEERS_PYTHON", ""), help="Pythons that have the peers, with : between"
    )
    arguments = parser.parse_args()
    pythons = find_pythons([path for path in arguments.peers_python.split(":") if path])
    chosen = {name: python for name, python in pythons.items() if name in arguments.queues.split(",")}
    sys.stderr.write(f"measuring: {', '.join(chosen)}\n")
    result = measure(chosen, rounds=arguments.rounds, kills=arguments.kills, defaults=not arguments.without_defaults)
    write(arguments.results / "queue.json", result)


if __name__ == "__main__":
    main()
