"""Child: one supervised process: started, watched, restarted with growing pauses, stopped.

Knows neither what the process does nor how it is made.
"""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path

from ktqueue.core.errors import KtqueueError
from ktqueue.workers.supervision.process import Launch, Process

FIRST_PAUSE = 0.25  # seconds before the second quick restart; the first is at once, later pauses double
LONGEST_PAUSE = 10.0  # unless said otherwise
QUICK_DEATH = 10.0  # seconds, unless said otherwise; a process that dies sooner after its start died quickly
MAX_QUICK_DEATHS = 5  # in a row, the last of them by itself
SHOWN_LOG_LINES = 8

log = logging.getLogger(__name__)


class ProcessFailed(KtqueueError):
    """A supervised process cannot be kept running; the message ends with the last lines of its log."""

    code = "process_failed"


class Child:
    """`final_codes` are exit codes that say that starting again would not help. `on_death` gets the process id
    and the return code.

    `quick_death` and `longest_pause`: seconds; the less a start costs, the less it has to be put off. A process that a
    signal ended is always started again: what killed it may be a job, and a job does that only so often.
    """

    def __init__(
        self,
        name: str,
        launch: Launch,
        *,
        log_path: Path,
        final_codes: frozenset[int] = frozenset(),
        quick_death: float = QUICK_DEATH,
        longest_pause: float = LONGEST_PAUSE,
        on_death: Callable[[int, int], None] | None = None,
    ) -> None:
        self.name = name
        self.log_path = log_path
        self.deaths = 0
        self._launch = launch
        self._final_codes = final_codes
        self._quick_death = quick_death
        self._longest_pause = longest_pause
        self._on_death = on_death
        self._process: Process | None = None
        self._stop = asyncio.Event()
        self._over = asyncio.Event()  # nothing runs, and nothing will
        self._over.set()

    @property
    def pid(self) -> int | None:
        """The process id, None while there is no process."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def run(self) -> None:
        """Keep the process running until `stop`. Raises ProcessFailed when it is not worth another start."""
        self._over.clear()
        try:
            await self._run()
        finally:
            self.signal(signal.SIGKILL)
            self._over.set()

    async def _run(self) -> None:
        quick_deaths = 0
        while not self._stop.is_set():
            began = time.monotonic()
            process = self._process = await self._start()
            if process is None:
                return
            if self._stop.is_set():  # told while the process came up
                self.signal(signal.SIGTERM)
            code = await process.wait()
            if self._stop.is_set():
                return
            self.deaths += 1
            if self._on_death is not None:
                self._on_death(process.pid, code)
            if code in self._final_codes:
                raise ProcessFailed(f"{self.name} ended with code {code}{self._log_tail()}")
            quick_deaths = quick_deaths + 1 if time.monotonic() - began < self._quick_death else 0
            if quick_deaths >= MAX_QUICK_DEATHS and code > 0:  # 0: somebody asked it to end
                raise ProcessFailed(
                    f"{self.name} died {quick_deaths} times within {self._quick_death:g} s of its start, "
                    f"last with {_cause(code)}{self._log_tail()}"
                )
            pause = min(self._longest_pause, FIRST_PAUSE * 2 ** (quick_deaths - 2)) if quick_deaths > 1 else 0.0
            log.warning("%s died (%s); starting it again%s", self.name, _cause(code), f" in {pause:g} s" * bool(pause))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stop.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if there is a process."""
        if self.pid is not None and self._process is not None:
            self._process.send_signal(number)

    def stop(self) -> None:
        """Ask the process to end (SIGTERM), and never start it again."""
        self._stop.set()
        self.signal(signal.SIGTERM)

    async def ended(self, within: float) -> None:
        """Wait for the process to end; after `within` seconds it is killed."""
        self._stop.set()
        try:
            async with asyncio.timeout(within):
                await self._over.wait()
        except TimeoutError:
            log.warning("%s did not end within %g s: killed", self.name, within)
            self.signal(signal.SIGKILL)
            await self._over.wait()

    async def _start(self) -> Process | None:
        """The process; None when told to stop before there was one."""
        starting = asyncio.ensure_future(self._launch(self.log_path))
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                return starting.result()
        finally:
            for one in (starting, stopped):
                one.cancel()
            await asyncio.gather(starting, stopped, return_exceptions=True)
        return None

    def _log_tail(self) -> str:
        try:
            lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return "".join(f"\n  {line}" for line in lines[-SHOWN_LOG_LINES:])


def _cause(code: int) -> str:
    if code == -signal.SIGBUS:
        return "signal SIGBUS: memory is used up or broken, or a file in use was cut"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
