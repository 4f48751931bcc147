"""What a command shows on standard error while it works: a progress bar, or what it waits for.

Without a terminal both are plain lines; the bar writes one every ten seconds.
"""

import sys
import time
from typing import TYPE_CHECKING, Self

from ktqueue.cli.terminal.console import notes
from ktqueue.core.units import format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_SECONDS = 10.0  # between plain lines


class Bar:
    """A progress bar, used as a context manager. `update` is also the `progress` callback of loading and converting."""

    def __init__(self, title: str, total: int | None = None, *, in_bytes: bool = False, quiet: bool = False) -> None:
        self._title = title
        self._total = total
        self._done = 0
        self._note = ""
        self._quiet = quiet
        self._in_bytes = in_bytes
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._last_line = time.monotonic()
        self._shown = ""
        self._moved = False

    def __enter__(self) -> Self:
        if sys.stderr.isatty() and not self._quiet:
            self._progress = _progress(in_bytes=self._in_bytes)
            self._task = self._progress.add_task(self._title, total=self._total, note="")
            self._progress.start()
        return self

    def update(self, done: int, total: int | None = None, note: str = "") -> None:
        """Show that `done` of `total` are done, with a note after the bar."""
        self._done, self._note, self._moved = done, note, True
        self._total = total if total is not None else self._total
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=self._total, note=note)
        elif time.monotonic() - self._last_line > LINE_SECONDS:
            self._write_line()

    def say(self, text: str) -> None:
        """Write a line above the bar."""
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False)
        elif not self._quiet:
            sys.stderr.write(f"{text}\n")

    def finish(self) -> None:
        """Stop the bar and leave it on the screen."""
        if self._progress is not None:
            self._progress.stop()
        elif self._moved:
            self._write_line()

    def __exit__(self, *_: object) -> None:
        self.finish()

    def _write_line(self) -> None:
        self._last_line = time.monotonic()
        shown = format_bytes if self._in_bytes else str
        total = f"/{shown(self._total)}" if self._total is not None else ""
        line = f"{self._title}: {shown(self._done)}{total}" + (f", {self._note}" if self._note else "")
        if line != self._shown and not self._quiet:
            self._shown = line
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()


def _progress(*, in_bytes: bool) -> "Progress":
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        DownloadColumn(binary_units=True) if in_bytes else MofNCompleteColumn(),
        TextColumn("[dim]{task.fields[note]}[/]"),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        console=notes(),
    )


class Waiting:
    """Shows what the command waits for: beside a spinner on a terminal, as plain lines elsewhere."""

    def __init__(self) -> None:
        self._console = notes()
        self._status = self._console.status("starting") if self._console.is_terminal else None

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def say(self, text: str) -> None:
        """Show what the command waits for now."""
        if self._status is not None:
            self._status.update(text)
        else:
            sys.stderr.write(f"{text}\n")

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
