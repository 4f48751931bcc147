"""Heartbeat: renews the lease while the engine is alive, and stops when it hangs. Knows nothing of jobs."""

import asyncio
import time
from collections.abc import Callable, Mapping

from ktqueue.broker.lease import Lease
from ktqueue.core.errors import KtqueueError

BEATS_PER_LEASE = 4


class EngineStalled(KtqueueError):
    """One step of the engine takes so long that its device must be taken for dead."""

    code = "engine_stalled"


class StepClock:
    """When the step now under way began. A hung device shows as a step without an end."""

    def __init__(self) -> None:
        self._began: float | None = None

    def start(self) -> None:
        self._began = time.monotonic()

    def stop(self) -> None:
        self._began = None

    @property
    def running(self) -> float:
        """Seconds since the step under way began; 0 between steps."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began


class Heartbeat:
    """Beats four times a lease, with the worker's figures, and watches the engine's clock."""

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
        self._interval = lease_seconds / BEATS_PER_LEASE
        self._stall_seconds = stall_seconds

    async def run(self) -> None:
        """Beat until cancelled. Raises LeaseLost, or EngineStalled so that the process ends and the lease lapses."""
        while True:
            if self._clock.running > self._stall_seconds:
                raise EngineStalled(
                    f"a step has been running for more than {self._stall_seconds:g} s (worker.stall_seconds)",
                    param="worker.stall_seconds",
                    limit=self._stall_seconds,
                    value=self._clock.running,
                )
            await self._lease.beat(self._stats())
            await asyncio.sleep(self._interval)
