"""The kill loop: a whole installation whose processes are killed, stopped and drained while clients read from it.

    python -m benchmarks.chaos --minutes 10 --workers 3 --seed 1

What `ktqueue up` runs (private Redis with its append-only file, gateway, fork server, workers on the built-in model),
clients over HTTP and a nemesis, all drawn from the seed. First every tale is told undisturbed; afterwards each job's
journal, and what its readers saw over all their connections, is held against that. Exits with 1 where a promise broke.
"""

import argparse
import asyncio
import contextlib
import logging
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import redis.asyncio

from benchmarks import machine
from benchmarks.chaos_crowd import Crowd
from benchmarks.chaos_nemesis import PACE, UNSEEN_KILL, WORKER_DRAIN, WORKER_KILL, WORKER_STOP, Blow, HalfBlind, Nemesis
from benchmarks.chaos_view import Told, View, tales
from benchmarks.results import RESULTS, write
from ktqueue.broker.broker import Broker
from ktqueue.core.config import BrokerConfig, Config, EngineConfig, GatewayConfig, WorkerConfig

REST_SECONDS = 60.0  # until every worker is back and idle after the last job
LONGEST = 4  # times as long as planned, until there was a blow of each kind
ON_THEIR_WAY_SECONDS = 0.3
FAULTS = (
    "lost jobs", "unexpected jobs", "jobs without exactly one end", "duplicated tokens", "skipped tokens",
    "forked generations", "lost cancels", "late cancels", "keys left", "pages not given back",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run. `pace`: mean seconds between blows, by kind; times in seconds; tokens of the jobs asked for."""

    seconds: float
    seed: int
    workers: int = 3
    clients: int = 24
    rows: int = 12
    tales: int = 48
    shortest: int = 20
    longest: int = 160
    lease_seconds: float = 2.0
    keep_seconds: float = 120.0  # records and journals of ended jobs; a gateway may be away for a while of it
    until_empty: bool = True  # wait in the end until all of them are gone; else only look that they all will be
    pace: tuple[tuple[str, float], ...] = tuple(PACE.items())

    def config(self, state_dir: str) -> Config:
        """No job is to blame for these deaths, so no number of tries is too many."""
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
    """Run it; what happened and what broke."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        async with (
            HalfBlind(plan.config(folder), workers=plan.workers) as up,
            await Broker.open(up.config.broker) as broker,
        ):
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=plan.clients)
            async with httpx.AsyncClient(base_url=up.url, timeout=60.0, limits=limits, trust_env=False) as http:
                return await _run(plan, up, broker, http)


async def _run(plan: Plan, up: HalfBlind, broker: Broker, http: httpx.AsyncClient) -> dict[str, Any]:
    crowd = Crowd(http, broker, plan.seed, plan.shortest, plan.longest)
    await crowd.undisturbed(tales(plan.tales))
    began = time.monotonic()
    nemesis = Nemesis(up, broker, plan.seed, dict(plan.pace))
    census = _Census(up.broker_url, broker.keys.tag)
    kinds = dict(plan.pace).keys()
    working = asyncio.create_task(crowd.run(plan.clients))
    trouble = [asyncio.create_task(one) for one in (nemesis.run(), census.watch(), up.wait())]
    over: set[asyncio.Task[None]] = set()
    # On a machine that is busy with other things a blow may have found nobody to hit.
    while not over and time.monotonic() < began + plan.seconds * (1 if nemesis.counts.keys() == kinds else LONGEST):
        over, _ = await asyncio.wait([working, *trouble], timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
    crowd.stop()
    for task in trouble:
        if task.done():
            task.result()  # nothing of it ends by itself
        task.cancel()
    await asyncio.gather(*trouble, return_exceptions=True)
    await working
    seconds = time.monotonic() - began
    faults = Counter(crowd.faults)
    faults["unexpected jobs"] += len(census.jobs - crowd.jobs.keys() - census.before)
    faults["pages not given back"] += 0 if await _until_idle(http, plan.workers) else 1
    faults["keys left"] += await census.left(plan.keep_seconds + REST_SECONDS, all_of_them=plan.until_empty)
    return {
        "what": "kill loop on the built-in model",
        "plan": {name: getattr(plan, name) for name in ("seed", "workers", "clients", "rows", "lease_seconds")},
        "seconds": seconds,
        "jobs": len(crowd.jobs),
        "tokens": crowd.tokens,
        "habits": dict(crowd.habits),
        "ends": dict(Counter(told.state for told in crowd.jobs.values())),
        "connections": crowd.connections,
        "blows": dict(nemesis.counts),
        "worker_deaths": sum(worker.deaths for worker in up.workers),
        "jobs_hit": len({job for blow in nemesis.blows for job in blow.jobs}),
        "gaps": gaps(list(crowd.jobs.values()), nemesis.blows),
        "faults": {name: faults[name] for name in (*FAULTS, *sorted(faults.keys() - set(FAULTS)))},
        "load_average": machine.load_average(),
    }


class _Census:
    """What there is in Redis: the ids of all jobs over time, and in the end the keys that never go."""

    def __init__(self, url: str, tag: str) -> None:
        self._url = url
        self._tag = tag
        self.before: set[str] = set()  # told undisturbed
        self.jobs: set[str] = set()

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            with contextlib.suppress(redis.RedisError, OSError):
                async with redis.asyncio.from_url(self._url) as client:  # type: ignore[no-untyped-call]
                    found = {key.decode().rpartition(":")[2] async for key in client.scan_iter(f"{self._tag}:job:*")}
                    self.before = self.before or found
                    self.jobs |= found
            await asyncio.sleep(5.0)

    async def left(self, within: float, *, all_of_them: bool) -> int:
        """Keys, but the live workers' own, that are still there after so many seconds: any, or those without an end."""
        ours = ("tick", "leases", "models", "models:seen", "worker:")
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
    """Whether every worker comes to have all of its pages free."""
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


def gaps(jobs: Sequence[Told], blows: Sequence[Blow]) -> dict[str, Any]:
    """Seconds without an event around a blow to the job, where the reader was there meanwhile.

    By kind of blow: those in whose time nothing else was done to Redis, the gateway, the fork server or the job; and
    the longest one of all, whatever was done.
    """
    views = {told.job_id: told.view for told in jobs if told.view is not None and told.view.times}
    alone: dict[str, list[float]] = {WORKER_KILL: [], UNSEEN_KILL: [], WORKER_STOP: [], WORKER_DRAIN: []}
    for blow in blows:
        for job in blow.jobs & views.keys():
            gap = _gap(views[job], blow.at)
            if gap is None:
                continue
            first, last = gap
            others = (one for one in blows if one is not blow and first - 1.0 <= one.at <= last)
            if not any(job in one.jobs or one.kind not in alone for one in others):
                alone[blow.kind].append(last - first)
    longest = [
        after - before
        for view in views.values()
        for (before, one), (after, other) in pairwise(zip(view.times, view.connection, strict=True))
        if one == other
    ]
    return {
        **{kind: _spread(values) for kind, values in alone.items()},
        "longest of all": max(longest, default=0.0),
    }


def _gap(view: View, at: float) -> tuple[float, float] | None:
    """When the longest silence about a moment began and ended; events of before it may be on their way for a while."""
    first, last = bisect_right(view.times, at), bisect_right(view.times, at + ON_THEIR_WAY_SECONDS)
    found = None
    for i in range(max(1, first), min(last + 1, len(view.times))):
        before, after = view.times[i - 1], view.times[i]
        if view.connection[i - 1] == view.connection[i] and (found is None or after - before > found[1] - found[0]):
            found = (before, after)
    return found


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {"count": 0}
    return {
        "count": len(ordered),
        "p50_s": ordered[len(ordered) // 2],
        "p99_s": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "max_s": ordered[-1],
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--results", type=Path, help="a folder to write chaos.json to; the README's own has a table made"
    )
    given = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    plan = Plan(seconds=60 * given.minutes, seed=given.seed, workers=given.workers, clients=given.clients)
    told = asyncio.run(chaos(plan))
    for name, value in told.items():
        sys.stdout.write(f"{name}: {value}\n")
    write((given.results or RESULTS) / "chaos.json", told, "chaos")
    sys.exit(any(told["faults"].values()))


if __name__ == "__main__":
    main()
