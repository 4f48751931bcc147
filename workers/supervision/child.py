"""Child: one supervised process. It is started, watched, restarted with growing pauses, and stopped.

Knows neither what the process does nor how it is started.
"""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path

from ktqueue.core.errors import ConfigError, KtqueueError
from ktqueue.workers.supervision.process import Launch, Process

FIRST_PAUSE_SECONDS = 0.25  # before the restart after a second quick death; after the first there is no pause
LONGEST_PAUSE_SECONDS = 10.0  # each further quick death doubles the pause, up to this
QUICK_DEATH_SECONDS = 10.0  # a process that dies sooner after its start died quickly
MAX_QUICK_DEATHS = 5  # in a row; after so many the process is given up if it exited with an error
SHOWN_LOG_LINES = 8

log = logging.getLogger(__name__)


class ProcessFailed(KtqueueError):
    """A supervised process cannot be kept running. The message ends with the last lines of its log."""

    code = "process_failed"


class ProcessUnusable(ProcessFailed, ConfigError):
    """A supervised process ended with one of its final codes: its settings, model or rules are wrong."""

    code = ConfigError.code


class Child:
    """A process that is kept running.

    `final_codes`: exit codes after which a restart would not help. `quick_death_seconds` and `longest_pause_seconds`:
    see the constants; a process that starts fast needs shorter ones. `on_death` receives process id and return code.

    A process that a signal ended is always restarted: a job may have killed it, and a job's attempts are limited. So is
    one that exited with code 0, because somebody asked it to end.
    """

    def __init__(
        self,
        name: str,
        launch: Launch,
        *,
        log_path: Path,
        final_codes: frozenset[int] = frozenset(),
        quick_death_seconds: float = QUICK_DEATH_SECONDS,
        longest_pause_seconds: float = LONGEST_PAUSE_SECONDS,
        on_death: Callable[[int, int], None] | None = None,
    ) -> None:
        self.name = name
        self.log_path = log_path
        self.deaths = 0
        self._launch = launch
        self._final_codes = final_codes
        self._quick_death_seconds = quick_death_seconds
        self._longest_pause_seconds = longest_pause_seconds
        self._on_death = on_death
        self._process: Process | None = None
        self._stop = asyncio.Event()
        self._over = asyncio.Event()  # no process runs, and none will be started
        self._over.set()

    @property
    def pid(self) -> int | None:
        """The process id, or None while there is no process."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def run(self) -> None:
        """Keep the process running until `stop`. Raises ProcessFailed if a restart would not help."""
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
            if self._stop.is_set():  # `stop` was called while the process started
                self.signal(signal.SIGTERM)
            code = await process.wait()
            if self._stop.is_set():
                return
            self.deaths += 1
            if self._on_death is not None:
                self._on_death(process.pid, code)
            if code in self._final_codes:
                raise ProcessUnusable(f"{self.name} ended with code {code}{self._log_tail()}")
            quick_deaths = quick_deaths + 1 if time.monotonic() - began < self._quick_death_seconds else 0
            if quick_deaths >= MAX_QUICK_DEATHS and code > 0:
                raise ProcessFailed(
                    f"{self.name} died {quick_deaths} times within {self._quick_death_seconds:g} s of its start, "
                    f"last with {_cause(code)}{self._log_tail()}"
                )
            pause = self._pause_after(quick_deaths)
            log.warning("%s died (%s); starting it again%s", self.name, _cause(code), f" in {pause:g} s" * bool(pause))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stop.wait()

    def _pause_after(self, quick_deaths: int) -> float:
        """Seconds to wait before the next start."""
        if quick_deaths < 2:
            return 0.0
        return min(self._longest_pause_seconds, FIRST_PAUSE_SECONDS * 2.0 ** (quick_deaths - 2))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if there is a process."""
        if self.pid is not None and self._process is not None:
            self._process.send_signal(number)

    def stop(self) -> None:
        """Ask the process to end (SIGTERM), and do not start it again."""
        self._stop.set()
        self.signal(signal.SIGTERM)

    async def ended(self, within: float) -> None:
        """Wait for the process to end. Kill it after `within` seconds."""
        self._stop.set()
        try:
            async with asyncio.timeout(within):
                await self._over.wait()
        except TimeoutError:
            log.warning("%s did not end within %g s; killing it", self.name, within)
            self.signal(signal.SIGKILL)
            await self._over.wait()

    async def _start(self) -> Process | None:
        """Start the process. Returns None if `stop` was called before it had started."""
        starting = asyncio.ensure_future(self._launch(self.log_path))
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                return starting.result()
        finally:
            for task in (starting, stopped):
                task.cancel()
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
        return "signal SIGBUS: memory is used up or broken, or a file in use was truncated"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
