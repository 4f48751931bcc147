"""The two processes of each queue: a client that submits, and a worker. Peers' Pythons import it: nothing of ours.

Both talk JSON lines with the harness: a worker says that it is ready and lives until its standard input ends; a client
answers questions (`Client`).
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import uvloop

from benchmarks.queue.adapters.starts import Start, StartReader, StartWriter

PAUSE_SECONDS = (0.005, 0.03)  # before a job for an idle worker
START_SECONDS = 30.0  # no job waits longer for an idle worker
AT_ONCE = 16  # submits under way while a queue is filled
HELD = -1  # the number of the job that never ends
TRICKLE_SECONDS = 0.2


class Submit(Protocol):
    """Puts job `number` into the queue; returns once it was acknowledged. `hold`: the job never ends."""

    def __call__(self, number: int, *, hold: bool) -> Awaitable[object]: ...


OpenClient = Callable[["Settings"], AbstractAsyncContextManager[Submit]]
Work = Callable[["Settings", StartWriter, Callable[[], None]], Awaitable[object]]


class Settings(argparse.Namespace):
    """The command line of both roles. `lease`: seconds that a silent worker keeps its jobs; None: the default."""

    role: str
    url: str
    pipe: str
    slots: int
    lease: float | None


class Client:
    """Answers questions: {"latency": JOBS}, {"fill": JOBS}, {"drain": JOBS}, {"hold": SECONDS},
    {"again": SECONDS}."""

    def __init__(self, submit: Submit, starts: StartReader) -> None:
        self._submit = submit
        self._starts = starts

    async def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """One point."""
        [(what, value)] = question.items()
        answer: dict[str, Any] = await getattr(self, what)(value)
        return answer

    async def latency(self, jobs: int) -> dict[str, Any]:
        """Milliseconds from before the submit to the job's start, one job at a time, the worker idle."""
        taken = []
        for number in range(jobs):
            await asyncio.sleep(random.uniform(*PAUSE_SECONDS))
            self._starts.forget()
            began = time.monotonic_ns()
            await self._submit(number, hold=False)
            starts = await self._starts.wait(1, START_SECONDS)
            if not starts:
                raise SystemExit(f"no job began within {START_SECONDS:g} s")
            taken.append((starts[0].at - began) / 1e6)
        return {"latency_ms": taken}

    async def fill(self, jobs: int) -> dict[str, Any]:
        """Queue jobs that nobody takes yet."""
        self._starts.forget()
        numbers = iter(range(jobs))

        async def some() -> None:
            for number in numbers:
                await self._submit(number, hold=False)

        began = time.monotonic()
        await asyncio.gather(*(some() for _ in range(AT_ONCE)))
        return {"submitted_per_second": jobs / (time.monotonic() - began)}

    async def drain(self, jobs: int) -> dict[str, Any]:
        """Jobs a second from the first start to the last, each job once."""
        starts = await self._starts.wait(jobs, 120.0)
        if len({start.number for start in starts}) < jobs:
            raise SystemExit(f"{len(starts)} of {jobs} jobs began")
        return {"jobs_per_second": (jobs - 1) / (starts[-1].at - starts[0].at) * 1e9}

    async def hold(self, seconds: float) -> dict[str, Any]:
        """Start the job that never ends; which process has it, and how often it began within `seconds` of that."""
        self._starts.forget()
        await self._submit(HELD, hold=True)
        starts = await self._starts.wait(1, START_SECONDS)
        if not starts:
            raise SystemExit(f"no job began within {START_SECONDS:g} s")
        await self._trickle(seconds, until=2)
        return {"process": starts[0].process, "starts": len(self._held())}

    async def again(self, seconds: float) -> dict[str, Any]:
        """When that job began for the second time, in nanoseconds of the monotonic clock; None: not in `seconds`."""
        await self._trickle(seconds, until=2)
        held = self._held()
        return {"at": held[1].at if len(held) > 1 else None}

    def _held(self) -> list[Start]:
        return [start for start in self._starts.starts if start.number == HELD]

    async def _trickle(self, seconds: float, *, until: int) -> None:
        """Other jobs pass meanwhile, one each TRICKLE_SECONDS: some queues look for dead workers' jobs only then."""
        end = time.monotonic() + seconds
        number = 0
        while time.monotonic() < end and len(self._held()) < until:
            await self._submit(number, hold=False)
            number += 1
            await asyncio.sleep(TRICKLE_SECONDS)


def main(open_client: OpenClient, work: Work, *, fast_worker: bool = False) -> None:
    """Serve the role of the command line. Clients run under uvloop, and `fast_worker` too."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("client", "worker"))
    parser.add_argument("--url", required=True)
    parser.add_argument("--pipe", required=True)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--lease", type=float)
    settings = parser.parse_args(namespace=Settings())
    role = _client(open_client, settings) if settings.role == "client" else _worker(work, settings)
    factory = uvloop.new_event_loop if fast_worker or settings.role == "client" else None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(role)


async def _client(open_client: OpenClient, settings: Settings) -> None:
    starts = StartReader(settings.pipe)
    async with open_client(settings) as submit:
        client = Client(submit, starts)
        _say({"ready": os.getpid()})
        async for question in _questions():
            _say(await client.answer(question))


async def _worker(work: Work, settings: Settings) -> None:
    starts = StartWriter(settings.pipe)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    await work(settings, starts, lambda: _say({"ready": os.getpid(), "cpu_seconds": time.process_time()}))


async def _questions() -> AsyncIterator[dict[str, Any]]:
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        yield json.loads(line)


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _leave_with_parent() -> None:
    with contextlib.suppress(OSError):
        sys.stdin.read()
    os._exit(0)
