"""The kill loop: a whole installation whose processes are killed, stopped and drained while clients read from it.

    python -m tests.chaos.loop --minutes 10 --workers 3 --seed 1

It runs what `ktqueue up` runs: Redis with its append-only file, gateway, fork server, and workers on the built-in
model. Clients use it over HTTP while a nemesis attacks it. The seed decides what they do. First every request runs
undisturbed. Afterwards each job's journal, and what its readers saw, is compared with that run. For each stream that
was silent for too long, it prints what happened meanwhile. Exits with 1 if a promise was broken.
"""

import argparse
import asyncio
import contextlib
import logging
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import redis.asyncio

from benchmarks import machine
from benchmarks.results import RESULTS, write
from ktqueue.broker.broker import Broker
from ktqueue.core.config import BrokerConfig, Config, EngineConfig, GatewayConfig, WorkerConfig
from ktqueue.core.request import JobClass
from tests.chaos import gaps, timeline
from tests.chaos.clients import Clients
from tests.chaos.nemesis import PACE, UNSEEN_KILL, WORKER_KILL, Nemesis, PartlyBlindSupervisor
from tests.chaos.reader import requests

REST_SECONDS = 60.0  # until every worker runs again and is idle after the last job
LONGEST = 4  # times the planned time: the most that a run waits for an attack of each kind
SPARE = 5  # times `model_ttl`, as in `prelude.lua`
BEYOND_LEASE_SECONDS = 1.0  # how much longer than the lease a silence over a kill may last
FAULTS = (
    "lost jobs", "unexpected jobs", "jobs without exactly one end", "duplicated tokens", "skipped tokens",
    "forked generations", "lost cancels", "late cancels", "keys left", "pages not given back",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run. `pace`: mean seconds between attacks, by kind. `shortest`, `longest`: tokens of a job."""

    seconds: float
    seed: int
    workers: int = 3
    clients: int = 24
    rows: int = 12
    requests: int = 48
    shortest: int = 20
    longest: int = 160
    lease_seconds: float = 2.0
    keep_seconds: float = 120.0  # for records and journals of ended jobs; longer than a gateway is away
    until_empty: bool = True  # wait until all keys have expired; otherwise only check that each has an expiry
    pace: tuple[tuple[str, float], ...] = tuple(PACE.items())

    def config(self, state_dir: str) -> Config:
        """The settings. No job causes these deaths, so any number of attempts is allowed."""
        keep = self.keep_seconds
        return Config(
            broker=BrokerConfig(
                state_dir=state_dir, lease_seconds=self.lease_seconds, max_attempts=1_000_000, job_ttl=keep,
                journal_ttl=keep, idempotency_ttl=keep, model_ttl=keep,
            ),
            engine=EngineConfig(num_pages=1024, threads=1, max_num_seqs=self.rows),
            worker=WorkerConfig(drain_seconds=0.5),
            gateway=GatewayConfig(port=0, drain_seconds=1.0),
        )  # fmt: skip


async def chaos(plan: Plan) -> dict[str, Any]:
    """Run the loop. Returns what happened and which promises were broken."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        async with (
            PartlyBlindSupervisor(plan.config(folder), workers=plan.workers) as up,
            await Broker.open(up.config.broker) as broker,
        ):
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=plan.clients)
            async with httpx.AsyncClient(base_url=up.url, timeout=60.0, limits=limits, trust_env=False) as http:
                return await _run(plan, up, broker, http)


async def _run(plan: Plan, up: PartlyBlindSupervisor, broker: Broker, http: httpx.AsyncClient) -> dict[str, Any]:
    log_collector = timeline.LogCollector()
    for name in timeline.LOGGERS:
        logging.getLogger(name).addHandler(log_collector)
        logging.getLogger(name).setLevel(logging.INFO)
    clients = Clients(http, broker, plan.seed, plan.shortest, plan.longest)
    await clients.undisturbed(requests(plan.requests))
    began = time.monotonic()
    nemesis = Nemesis(up, broker, plan.seed, dict(plan.pace))
    census = _Census(up.broker_url, broker.keys.tag)
    kinds = dict(plan.pace).keys()
    working = asyncio.create_task(clients.run(plan.clients))
    trouble = [asyncio.create_task(part) for part in (nemesis.run(), census.watch(), up.wait())]
    over: set[asyncio.Task[None]] = set()
    # On a busy machine an attack may have found no process to hit.
    while not over and time.monotonic() < began + plan.seconds * (1 if nemesis.counts.keys() == kinds else LONGEST):
        over, _ = await asyncio.wait([working, *trouble], timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
    clients.stop()
    for task in trouble:
        if task.done():
            task.result()  # only an error ends one of these tasks
        task.cancel()
    await asyncio.gather(*trouble, return_exceptions=True)
    await working
    seconds = time.monotonic() - began
    faults = Counter(clients.faults)
    faults["unexpected jobs"] += len(census.jobs - clients.jobs.keys() - census.before)
    faults["pages not given back"] += 0 if await _until_idle(http, plan.workers) else 1
    longest_life = SPARE * plan.keep_seconds  # that of turns and accounts
    faults["keys left"] += await census.left(longest_life + REST_SECONDS, all_of_them=plan.until_empty)
    outcomes = list(clients.jobs.values())
    found = gaps.find(outcomes, nemesis.attacks)
    allowed = plan.lease_seconds + BEYOND_LEASE_SECONDS
    lines = timeline.timeline(Path(up.config.broker.state_dir), log_collector.lines, nemesis.attacks)
    too_long = [gap for gap in found if gap.attack.kind in (WORKER_KILL, UNSEEN_KILL) and gap.seconds > allowed]
    return {
        "what": "kill loop on the built-in model",
        "plan": {name: getattr(plan, name) for name in ("seed", "workers", "clients", "rows", "lease_seconds")},
        "seconds": seconds,
        "jobs": len(clients.jobs),
        "tokens": clients.tokens,
        "habits": dict(clients.habits),
        "ends": dict(Counter(outcome.state for outcome in clients.jobs.values())),
        "connections": clients.connections,
        "attacks": dict(nemesis.counts),
        "worker_deaths": sum(worker.deaths for worker in up.workers),
        "jobs_hit": len({job for attack in nemesis.attacks for job in attack.jobs}),
        "gaps": {**gaps.spreads(found), "longest of all": gaps.longest(outcomes)},
        "gap_margin_s": BEYOND_LEASE_SECONDS,
        "gaps_too_long": [gaps.explain(gap, lines) for gap in too_long],
        "faults": {name: faults[name] for name in (*FAULTS, *sorted(faults.keys() - set(FAULTS)))},
        "load_average": {"mean": statistics.fmean(census.loads), "max": max(census.loads)},
    }


class _Census:
    """The contents of Redis: ids of all jobs over time, and at the end the keys that remain."""

    def __init__(self, url: str, tag: str) -> None:
        self._url = url
        self._tag = tag
        self.before: set[str] = set()  # jobs of the undisturbed run
        self.jobs: set[str] = set()
        self.loads: list[float] = []  # of the machine

    async def watch(self) -> None:
        """Record jobs and load until cancelled."""
        while True:
            self.loads.append(machine.load_average())
            with contextlib.suppress(redis.RedisError, OSError):
                async with redis.asyncio.from_url(self._url) as client:  # type: ignore[no-untyped-call]
                    found = {key.decode().rpartition(":")[2] async for key in client.scan_iter(f"{self._tag}:job:*")}
                    self.before = self.before or found
                    self.jobs |= found
            await asyncio.sleep(5.0)

    async def left(self, within: float, *, all_of_them: bool) -> int:
        """Wait until no key is left but those of live workers, at most `within` seconds. Returns how many are left.

        Without `all_of_them` only keys without an expiry count.
        """
        ours = ("tick", "leases", "models", "worker:", "parked:", "memory", "scrub", "ktqueue:control:")
        end = time.monotonic() + within
        async with redis.asyncio.from_url(self._url) as client:  # type: ignore[no-untyped-call]
            while True:
                keys = [key async for key in client.scan_iter()]
                lives = dict(zip(keys, [await client.pttl(key) for key in keys], strict=True))
                left = [
                    key
                    for key, life in lives.items()
                    if not key.decode().removeprefix(f"{self._tag}:").startswith(ours) and (all_of_them or life == -1)
                ]
                if not left or time.monotonic() > end:
                    return len(left)
                await asyncio.sleep(1.0)


async def _until_idle(http: httpx.AsyncClient, workers: int) -> bool:
    """Wait at most REST_SECONDS until all pages of every worker are free. Returns whether they are."""
    end = time.monotonic() + REST_SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(httpx.TransportError):
            lines = [line.rpartition(" ") for line in (await http.get("/metrics")).text.splitlines()]
            free, total = (
                [float(value) for name, _, value in lines if name.startswith(f"ktqueue:kv_cache_{what}_pages")]
                for what in ("free", "total")
            )
            if len(free) == workers and free == total and min(free) > 0:
                return True
        await asyncio.sleep(0.5)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--results",
        type=Path,
        help="a folder to write chaos.json to; the tables are written again if it is the default one",
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    plan = Plan(
        seconds=60 * arguments.minutes, seed=arguments.seed, workers=arguments.workers, clients=arguments.clients
    )
    result = asyncio.run(chaos(plan))
    for name, value in result.items():
        if name != "gaps_too_long":
            sys.stdout.write(f"{name}: {value}\n")
    for gap in result["gaps_too_long"]:
        what = f"{gap['class']} {gap['job']} was silent for {gap['seconds']:.2f} s over a {gap['over']}"
        sys.stdout.write("\n  ".join((f"{what} at {gap['at']:+.3f}", *gap["meanwhile"])) + "\n")
    write((arguments.results or RESULTS) / "chaos.json", result)
    late = any(gap["class"] == JobClass.INTERACTIVE for gap in result["gaps_too_long"])
    sys.exit(late or any(result["faults"].values()))


if __name__ == "__main__":
    main()
