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
            if self._timer is None or self._timer.when() > self._deadline:
                self.close()
                self._timer = loop.call_at(self._deadline, self._look)
            waiter = self._waiter = loop.create_future()
            try:
                await waiter
            finally:
                if self._waiter is waiter:
                    self._waiter = None
        return self.rung

    def close(self) -> None:
        """No timer is left. It may be used again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._waiter is None:
            return
        loop = self._waiter.get_loop()
        if loop.time() >= self._deadline:
            self._wake()
        else:
            self._timer = loop.call_at(self._deadline, self._look)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
