"""The two processes of each queue: a client that submits, and a worker. Peers' Pythons import it: nothing of ours.

A worker says that it is ready, and lives until its standard input ends. A client answers questions (`QueueClient`).
"""

import argparse
import asyncio
import contextlib
import os
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import uvloop

from benchmarks.json_lines import answer_questions_async, say
from benchmarks.queue.adapters.starts import Start, StartReader, StartWriter

PAUSE_SECONDS = (0.005, 0.03)  # before a job for an idle worker
START_SECONDS = 30.0  # no job waits longer for an idle worker
AT_ONCE = 16  # submits under way while a queue is filled
HELD = -1  # the number of the job that never ends
HELD_SECONDS = 3_600
TRICKLE_SECONDS = 0.2


class Submit(Protocol):
    """Puts job `number` into the queue; returns once it was acknowledged. `hold`: the job never ends."""

    def __call__(self, number: int, *, hold: bool) -> Awaitable[object]: ...


OpenClient = Callable[["Settings"], AbstractAsyncContextManager[Submit]]
Job = Callable[[int], Awaitable[None]]
Work = Callable[["Settings", StartWriter, Callable[[], None]], Awaitable[object]]


class Settings(argparse.Namespace):
    """The command line of both roles. `lease`: seconds that a silent worker keeps its jobs; None: the default."""

    role: str
    url: str
    pipe: str
    slots: int
    lease: float | None


def make_jobs(starts: StartWriter | None) -> dict[str, Job]:
    """The functions of both kinds of jobs, by name. A client registers them too, but has no `starts`."""

    async def go(number: int) -> None:
        assert starts is not None
        starts.record(number)

    async def held(number: int) -> None:
        await go(number)
        await asyncio.sleep(HELD_SECONDS)

    return {"go": go, "held": held}


class QueueClient:
    """Submits jobs and observes when they start. Each public method answers one question."""

    def __init__(self, submit: Submit, starts: StartReader) -> None:
        self._submit = submit
        self._starts = starts

    async def latency(self, jobs: int) -> list[float]:
        """Milliseconds from before the submit to the job's start, one job at a time, the worker idle."""
        milliseconds = []
        for number in range(jobs):
            await asyncio.sleep(random.uniform(*PAUSE_SECONDS))
            self._starts.forget()
            began = time.monotonic_ns()
            await self._submit(number, hold=False)
            milliseconds.append(((await self._first_start()).nanoseconds - began) / 1e6)
        return milliseconds

    async def fill(self, jobs: int) -> dict[str, Any]:
        """Queue jobs that nobody takes yet."""
        self._starts.forget()
        numbers = iter(range(jobs))

        async def submit() -> None:
            for number in numbers:
                await self._submit(number, hold=False)

        began = time.monotonic()
        await asyncio.gather(*(submit() for _ in range(AT_ONCE)))
        return {"submitted_per_second": jobs / (time.monotonic() - began)}

    async def drain(self, jobs: int) -> dict[str, Any]:
        """Jobs a second from the first start to the last, each job once."""
        starts = await self._starts.wait(jobs, 120.0)
        if len({start.number for start in starts}) < jobs:
            raise SystemExit(f"{len(starts)} of {jobs} jobs began")
        return {"jobs_per_second": (jobs - 1) / (starts[-1].nanoseconds - starts[0].nanoseconds) * 1e9}

    async def hold(self, seconds: float) -> dict[str, Any]:
        """Start the job that never ends; which process has it, and how often it began within `seconds` of that."""
        self._starts.forget()
        await self._submit(HELD, hold=True)
        start = await self._first_start()
        await self._trickle(seconds)
        return {"process": start.process, "starts": len(self._held())}

    async def again(self, seconds: float) -> int | None:
        """When that job began for the second time, in nanoseconds of the monotonic clock; None: not in `seconds`."""
        await self._trickle(seconds)
        held = self._held()
        return held[1].nanoseconds if len(held) > 1 else None

    async def _first_start(self) -> Start:
        starts = await self._starts.wait(1, START_SECONDS)
        if not starts:
            raise SystemExit(f"no job began within {START_SECONDS:g} s")
        return starts[0]

    def _held(self) -> list[Start]:
        return [start for start in self._starts.starts if start.number == HELD]

    async def _trickle(self, seconds: float) -> None:
        """Submit other jobs until the held one has begun twice: some queues look for dead workers' jobs only then."""
        end = time.monotonic() + seconds
        number = 0
        while time.monotonic() < end and len(self._held()) < 2:
            await self._submit(number, hold=False)
            number += 1
            await asyncio.sleep(TRICKLE_SECONDS)


def main(open_client: OpenClient, work: Work) -> None:
    """Serve the role of the command line. All clients and workers run under uvloop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("client", "worker"))
    parser.add_argument("--url", required=True)
    parser.add_argument("--pipe", required=True)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--lease", type=float)
    settings = parser.parse_args(namespace=Settings())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_client(open_client, settings) if settings.role == "client" else _worker(work, settings))


async def _client(open_client: OpenClient, settings: Settings) -> None:
    starts = StartReader(settings.pipe)
    async with open_client(settings) as submit:
        say({"ready": os.getpid()})
        await answer_questions_async(QueueClient(submit, starts))


async def _worker(work: Work, settings: Settings) -> None:
    starts = StartWriter(settings.pipe)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    await work(settings, starts, lambda: say({"ready": os.getpid(), "cpu_seconds": time.process_time()}))


def _leave_with_parent() -> None:
    with contextlib.suppress(OSError):
        sys.stdin.read()
    os._exit(0)
