"""Shortens values for error messages, in bounded time however large the value is."""

import reprlib
from typing import Any

MAX_CHARACTERS = 80
MAX_TEXT = 400


class _ShortRepr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxdict = self.maxtuple = 40
        self.maxstring = self.maxother = MAX_CHARACTERS + 2  # with the quotes

    def repr_int(self, x: int, level: int) -> str:
        """Describe large integers by their size, because Python refuses to write thousands of digits."""
        return repr(x) if x.bit_length() <= 256 else f"an integer of {x.bit_length()} bits"


_SHORT_REPR = _ShortRepr()


def short_repr(value: Any) -> str:
    """Return the repr of a value, shortened to 80 characters."""
    text = _SHORT_REPR.repr(value[:MAX_CHARACTERS] if isinstance(value, str) else value)
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 3] + "..."


def short_text(error: object) -> str:
    """Return the beginning of another library's message, which may repeat a value of any size, without control
    characters."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in str(error)[:MAX_TEXT])
