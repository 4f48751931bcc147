"""Signs of life. A heartbeat renews the lease while the engine's steps end; a watchdog ends a process that hangs.

The heartbeat notices a step that hangs. The watchdog is for faults that stop the whole process, such as a library that
hangs while it holds the interpreter's lock: the lease then expires, but the process would stay. Knows no jobs.
"""

import asyncio
import faulthandler
import time
from collections.abc import Callable, Mapping

from ktqueue.broker.lease import Lease
from ktqueue.core.errors import KtqueueError

BEATS_PER_LEASE = 4
WATCHDOG_CHECKS = 8  # signs of life of the event loop in the watchdog's time


class EngineStalled(KtqueueError):
    """A step of the engine takes so long that its device is presumed dead."""

    code = "engine_stalled"


class StepClock:
    """Measures the current step. A device that hangs shows as a step that does not end."""

    def __init__(self) -> None:
        self._began: float | None = None

    def start(self) -> None:
        """A step begins."""
        self._began = time.monotonic()

    def stop(self) -> None:
        """The step has ended."""
        self._began = None

    @property
    def running(self) -> float:
        """Seconds since the current step began; 0 between steps."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began


class Heartbeat:
    """Renews the lease four times in its duration, sends the worker's statistics, and checks the engine's clock."""

    def __init__(
        self,
        lease: Lease,
        clock: StepClock,
        stats: Callable[[], Mapping[str, float]],
        *,
        lease_seconds: float,
        stall_seconds: float,
    ) -> None:
        self._lease = lease
        self._clock = clock
        self._stats = stats
        self._interval_seconds = lease_seconds / BEATS_PER_LEASE
        self._stall_seconds = stall_seconds

    async def run(self) -> None:
        """Beat until cancelled. Raises LeaseLost, or EngineStalled so that the process ends and the lease expires."""
        while True:
            if self._clock.running > self._stall_seconds:
                raise EngineStalled(
                    f"a step has been running for more than {self._stall_seconds:g} s (worker.stall_seconds)",
                    param="worker.stall_seconds",
                    limit=self._stall_seconds,
                    value=self._clock.running,
                )
            await self._lease.beat(self._stats())
            await asyncio.sleep(self._interval_seconds)


async def watch_event_loop(seconds: float) -> None:
    """Until cancelled, end the process with code 1 if this event loop does not run for `seconds`.

    The stacks of all threads go to standard error first. A process can have one such watchdog, because Python has one
    thread for it, which needs no interpreter lock.
    """
    try:
        while True:
            faulthandler.dump_traceback_later(seconds, exit=True)
            await asyncio.sleep(seconds / WATCHDOG_CHECKS)
    finally:
        faulthandler.cancel_dump_traceback_later()
