"""A wake-up whose wait has a time limit: what asyncio.Event under asyncio.timeout does, at a fraction of the cost.

Every reader waits here for each token, and hardly ever as long as its limit. So there is one timer for many waits: it
is set anew only when it goes off too early.
"""

import asyncio


class Bell:
    """Stays rung until `clear`. One task may wait at a time."""

    def __init__(self) -> None:
        self.rung = False
        self._waiter: asyncio.Future[None] | None = None
        self._deadline = 0.0  # of the wait under way, by the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def ring(self) -> None:
        """Wake who waits."""
        self.rung = True
        self._wake()

    def clear(self) -> None:
        """Let the next one wait."""
        self.rung = False

    async def wait(self, seconds: float) -> bool:
        """Until it rings; False if it did not within `seconds`."""
        if not self.rung:
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
        return self.rung

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
