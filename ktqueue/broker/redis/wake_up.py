"""An event with a time limit: like asyncio.Event under asyncio.timeout, at a fraction of the cost.

Every reader waits here for each token, and hardly ever reaches its time limit. So one timer serves many waits, and is
set again only if it fires too early.
"""

import asyncio


class WakeUp:
    """Stays set until `clear`. Only one task may wait at a time."""

    def __init__(self) -> None:
        self.is_set = False
        self._waiter: asyncio.Future[None] | None = None
        self._deadline = 0.0  # of the current wait, by the event loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def set(self) -> None:
        """Set the event and wake the waiting task."""
        self.is_set = True
        self._wake()

    def clear(self) -> None:
        """Reset the event, so that the next `wait` waits."""
        self.is_set = False

    async def wait(self, seconds: float) -> bool:
        """Wait until the event is set. Returns False if it is not set within `seconds`."""
        if not self.is_set:
            loop = asyncio.get_running_loop()
            self._deadline = loop.time() + seconds
            if self._timer is None or self._timer_at > self._deadline:
                self._set_timer(loop)
            waiter = self._waiter = loop.create_future()
            try:
                await waiter
            finally:
                if self._waiter is waiter:
                    self._waiter = None
        return self.is_set

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = loop.call_at(self._deadline, self._look), self._deadline

    def _look(self) -> None:
        self._timer = None
        if self._waiter is None:
            return
        loop = self._waiter.get_loop()
        if loop.time() >= self._deadline:
            self._wake()
        else:
            self._set_timer(loop)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
