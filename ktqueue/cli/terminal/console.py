"""Where the command line writes: results to standard output, progress and errors to standard error.

Colour and moving parts appear only on a terminal; piped output is plain text without control codes,
and its tables are as wide as they need to be.
"""

import json
import sys
import unicodedata
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPED_WIDTH = 1000  # columns: wide enough that nothing wraps


def _console(stream: IO[str]) -> "Console":
    from rich.console import Console

    if stream.isatty():
        return Console(file=stream, highlight=False, soft_wrap=False)
    # FORCE_COLOR, as many CI systems set it, would make a line of each frame of a spinner.
    return Console(file=stream, width=PIPED_WIDTH, highlight=False, soft_wrap=False, force_terminal=False)


def results() -> "Console":
    """The console of standard output."""
    return _console(sys.stdout)


def notes() -> "Console":
    """The console of standard error: progress, hints, errors."""
    return _console(sys.stderr)


def write(text: str) -> None:
    """Write text to standard output as it is, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(value: Any, *, indent: int | None = 2) -> None:
    """Write one JSON value for a machine; `indent` None gives one line."""
    write(json.dumps(value, indent=indent, ensure_ascii=False) + "\n")


def table(columns: Sequence[str], *, right: Sequence[str] = ()) -> "Table":
    """An empty table with these column heads; those named in `right` hold numbers."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def plain_text(text: str) -> str:
    """Text of a model or a client made safe for a terminal: without control characters but newline and tab."""
    if not sys.stdout.isatty():
        return text
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def span(seconds: float, *, digits: int = 0) -> str:
    """A time span in two digits or so: 12 s, 3 min, 5 h. `digits` after the point, below ten seconds."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.{digits if seconds < 10 else 0}f} s"
