"""Child: one supervised process: started, watched, restarted with growing pauses, stopped.

It dies with its parent, whatever kills that. Knows nothing of what the process does.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ktqueue.core.errors import KtqueueError

FIRST_PAUSE = 0.25  # seconds before the second quick restart; the first is at once, later pauses double
LONGEST_PAUSE = 10.0
QUICK_DEATH = 10.0  # a process that dies sooner after its start died quickly
MAX_QUICK_DEATHS = 5  # in a row
SHOWN_LOG_LINES = 8
PR_SET_PDEATHSIG = 1  # linux/prctl.h

log = logging.getLogger(__name__)


class ProcessFailed(KtqueueError):
    """A supervised process cannot be kept running; the message ends with the last lines of its log."""

    code = "process_failed"


class Child:
    """`final_codes` are exit codes that say that starting again would not help."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log_path: Path,
        final_codes: frozenset[int] = frozenset(),
    ) -> None:
        self.name = name
        self.log_path = log_path
        self.deaths = 0
        self._command = list(command)
        self._environment = dict(environment)
        self._final_codes = final_codes
        self._process: asyncio.subprocess.Process | None = None
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
            if self._stop.is_set():  # told while the process came up
                self.signal(signal.SIGTERM)
            code = await process.wait()
            if self._stop.is_set():
                return
            self.deaths += 1
            if code in self._final_codes:
                raise ProcessFailed(f"{self.name} ended with code {code}{self._log_tail()}")
            quick_deaths = quick_deaths + 1 if time.monotonic() - began < QUICK_DEATH else 0
            if quick_deaths >= MAX_QUICK_DEATHS:
                raise ProcessFailed(
                    f"{self.name} died {quick_deaths} times within {QUICK_DEATH:g} s of its start, "
                    f"last with {_cause(code)}{self._log_tail()}"
                )
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (quick_deaths - 2)) if quick_deaths > 1 else 0.0
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

    async def _start(self) -> asyncio.subprocess.Process:
        parent = os.getpid()
        with self.log_path.open("ab") as sink:
            return await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=self._environment,
                start_new_session=True,  # Ctrl-C reaches the supervisor alone, which stops things in order
                preexec_fn=lambda: _die_with(parent),
            )

    def _log_tail(self) -> str:
        try:
            lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return "".join(f"\n  {line}" for line in lines[-SHOWN_LOG_LINES:])


_prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None


def _die_with(parent: int) -> None:
    """Run in the new process: have the kernel kill it when its parent dies."""
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)


def _cause(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
