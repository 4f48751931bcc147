"""Where the command line writes: results to standard output, progress and errors to standard error.

Colour and animation appear only on a terminal. Piped output is plain text without control codes, and its tables are as
wide as necessary.
"""

import json
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPED_WIDTH = 1000  # columns: so wide that nothing wraps
LONGEST_LINE = 88  # columns of streamed text: longer lines are hard to read


def _console(stream: IO[str]) -> "Console":
    from rich.console import Console

    if stream.isatty():
        return Console(file=stream, highlight=False, soft_wrap=False)
    # With FORCE_COLOR, which many CI systems set, each frame of a spinner would be a line.
    return Console(file=stream, width=PIPED_WIDTH, highlight=False, soft_wrap=False, force_terminal=False)


def results() -> "Console":
    """The console of standard output."""
    return _console(sys.stdout)


def notes() -> "Console":
    """The console of standard error: progress, hints, errors."""
    return _console(sys.stderr)


def write(text: str) -> None:
    """Write text to standard output unchanged, and flush."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(value: Any, *, indent: int | None = 2) -> None:
    """Write a JSON value for programs; `indent` None writes it in one line."""
    write(json.dumps(value, indent=indent, ensure_ascii=False) + "\n")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]] = (), *, right: Sequence[str] = ()) -> "Table":
    """Make a table with these column heads. Columns in `right` are aligned to the right."""
    from rich import box
    from rich.table import Table

    listing = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for column in columns:
        listing.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        listing.add_row(*row)
    return listing


def escaped(text: str) -> str:
    """Return text that looks the same where markup is read."""
    from rich.markup import escape

    return escape(text)


def plain_text(text: str) -> str:
    """Make text of a model or client safe for a terminal: remove control characters other than newline and tab."""
    if not sys.stdout.isatty():
        return text
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def span(seconds: float, *, digits: int = 0) -> str:
    """Write a time span in a short form: 12 s, 3 min, 5 h. Below ten seconds it has `digits` after the point."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.{digits if seconds < 10 else 0}f} s"


class Wrapped:
    """Writes streamed text to standard output and breaks lines between words. `width` is the terminal's, in columns.

    A word is written as soon as it is complete.
    """

    def __init__(self, width: int) -> None:
        self._width = min(width - 1, LONGEST_LINE)
        self._column = 0
        self._spaces = 0  # not written yet, because none are written at the end of a line
        self._word = ""
        self._paused = False  # if so, the next line does not begin with a space

    def add(self, text: str) -> None:
        """Add text, and write the words that are complete."""
        out: list[str] = []
        for character in plain_text(text):
            if character == "\n":
                out.append(self._take() + "\n")
                self._column = self._spaces = 0
            elif character == " ":
                out.append(self._take())
                self._spaces += not self._paused
            else:
                self._paused = False
                self._word += character
        write("".join(out))

    def pause(self) -> None:
        """End the paragraph in the middle of a sentence, so that something else can be written."""
        write(self._take() + "\n\n")
        self._column = self._spaces = 0
        self._paused = True

    def end(self) -> None:
        """Write the last word and end the line."""
        write(self._take() + "\n")
        self._column = self._spaces = 0

    def _take(self) -> str:
        """Return the current word, with the spaces or line break before it."""
        if not self._word:
            return ""
        if self._column and self._column + self._spaces + len(self._word) > self._width:
            before, self._column = "\n", 0
        else:
            before, self._column = " " * self._spaces, self._column + self._spaces
        word, self._word, self._spaces = self._word, "", 0
        self._column += len(word)
        return before + word
