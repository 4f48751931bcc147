"""The nemesis of the kill loop: it kills, stops and drains processes at times drawn from a seed."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import httpx
import redis
import redis.asyncio

from ktqueue.broker.broker import Broker
from ktqueue.broker.models import WorkerInfo
from ktqueue.core.errors import Unavailable
from ktqueue.workers.supervision.child import Child
from ktqueue.workers.supervision.supervisor import Supervisor

WORKER_KILL, UNSEEN_KILL = "worker kill -9", "worker kill -9 that its supervisor does not see"
WORKER_STOP, WORKER_DRAIN = "worker SIGSTOP past its lease", "worker drain"
REDIS_KILL, GATEWAY_KILL, FORK_SERVER_KILL = "Redis kill -9", "gateway kill -9", "fork server kill -9"
# Mean seconds between two attacks of a kind. A supervisor stops restarting a Redis that keeps dying within 10 s.
PACE = {
    WORKER_KILL: 3.2, UNSEEN_KILL: 3.2, WORKER_STOP: 15.0, WORKER_DRAIN: 12.0, REDIS_KILL: 11.5, GATEWAY_KILL: 20.0,
    FORK_SERVER_KILL: 150.0,
}  # fmt: skip


@dataclass(frozen=True)
class Attack:
    """What was done, when (seconds of the monotonic clock), and which jobs were running."""

    kind: str
    at: float
    jobs: frozenset[str] = field(default=frozenset())
    pid: int | None = None


class PartlyBlindSupervisor(Supervisor):
    """A supervisor that does not notice the deaths in `unseen`, as if it ran on another machine."""

    unseen: set[int]

    def release_leases_of(self, pid: int, code: int) -> None:
        if pid not in self.unseen:
            super().release_leases_of(pid, code)


class Nemesis:
    """Attacks the processes of an installation while `run` runs. `attacks` lists what it did."""

    def __init__(self, up: PartlyBlindSupervisor, broker: Broker, seed: int, pace: Mapping[str, float]) -> None:
        self._up = up
        up.unseen = set()
        self._broker = broker
        self._seed = seed
        self._pace = pace
        self._stopped: set[int] = set()
        self._dead: set[int] = set()  # killed, but the supervisor may not know it yet
        self.attacks: list[Attack] = []

    @property
    def counts(self) -> Counter[str]:
        """The number of attacks of each kind."""
        return Counter(attack.kind for attack in self.attacks)

    async def run(self) -> None:
        """Attack until cancelled. Then every stopped process is resumed."""
        deeds: dict[str, Callable[[random.Random], Awaitable[None]]] = {
            WORKER_KILL: lambda draw: self._signal_worker(draw, WORKER_KILL, signal.SIGKILL),
            UNSEEN_KILL: lambda draw: self._signal_worker(draw, UNSEEN_KILL, signal.SIGKILL),
            WORKER_DRAIN: lambda draw: self._signal_worker(draw, WORKER_DRAIN, signal.SIGTERM),
            WORKER_STOP: self._stop_worker,
            REDIS_KILL: lambda draw: self._kill(REDIS_KILL, self._up.redis_pid),
            GATEWAY_KILL: self._kill_gateway,
            FORK_SERVER_KILL: lambda draw: self._kill(FORK_SERVER_KILL, _pid(self._up.fork_server)),
        }
        try:
            async with asyncio.TaskGroup() as group:
                for kind, seconds in self._pace.items():
                    group.create_task(self._repeat(kind, seconds, deeds[kind]))
        finally:
            for pid in self._stopped:
                _send(pid, signal.SIGCONT)

    async def _repeat(self, kind: str, seconds: float, deed: Callable[[random.Random], Awaitable[None]]) -> None:
        draw = random.Random(f"{self._seed} {kind}")
        spread = 0.1 if kind == REDIS_KILL else 0.8
        while True:
            await asyncio.sleep(draw.uniform(1 - spread, 1 + spread) * seconds)
            await deed(draw)

    async def _kill(self, kind: str, pid: int | None) -> None:
        if pid is not None:
            self.attacks.append(Attack(kind, time.monotonic(), pid=pid))
            _send(pid, signal.SIGKILL)

    async def _kill_gateway(self, draw: random.Random) -> None:
        """Kill the gateway if it answers. On a busy machine it might otherwise never finish starting."""
        async with httpx.AsyncClient(base_url=self._up.url, trust_env=False) as http:
            with contextlib.suppress(httpx.TransportError):
                if (await http.get("/healthz")).is_success:
                    await self._kill(GATEWAY_KILL, self._up.gateway.pid)

    async def _signal_worker(self, draw: random.Random, kind: str, number: signal.Signals) -> None:
        worker = await self._at_work(draw)
        if worker is None:
            return
        if kind == UNSEEN_KILL:
            self._up.unseen.add(worker.pid)
        await self._hit(kind, worker, number)

    async def _stop_worker(self, draw: random.Random) -> None:
        worker = await self._at_work(draw)
        if worker is None:
            return
        self._stopped.add(worker.pid)
        await self._hit(WORKER_STOP, worker, signal.SIGSTOP)
        await asyncio.sleep(self._up.config.broker.lease_seconds + draw.uniform(0.5, 1.5))
        _send(worker.pid, signal.SIGCONT)
        self._stopped.discard(worker.pid)

    async def _hit(self, kind: str, worker: WorkerInfo, number: signal.Signals) -> None:
        """Signal a worker and record its jobs. They are read afterwards, because they may change until the signal."""
        signalled_at = time.monotonic()
        _send(worker.pid, number)
        if number == signal.SIGKILL:
            self._dead.add(worker.pid)
        running = f"{self._broker.keys.tag}:running:{worker.worker_id}"
        jobs: frozenset[str] = frozenset()
        with contextlib.suppress(redis.RedisError, OSError):
            async with redis.asyncio.from_url(self._up.broker_url) as client:  # type: ignore[no-untyped-call]
                jobs = frozenset(job.decode() for job in await client.hkeys(running))
        self.attacks.append(Attack(kind, signalled_at, jobs, worker.pid))

    async def _at_work(self, draw: random.Random) -> WorkerInfo | None:
        """Return a worker with a live lease and a live process; None if there is none or Redis does not answer."""
        try:
            workers = await self._broker.models.workers()
        except Unavailable:
            return None
        ours = {worker.pid for worker in self._up.workers} - self._dead
        living = [worker for worker in workers if worker.pid in ours]
        return draw.choice(living) if living else None


def _pid(child: Child | None) -> int | None:
    return None if child is None else child.pid


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
