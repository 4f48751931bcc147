"""How `ktqueue chat` reads a turn: with an editor on a terminal, line by line elsewhere."""

import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

QUOTES = '"""'
PROMPT, CONTINUATION = "> ", ". "


class Turns:
    """Reads turns. Pasted lines are one turn, and so are lines between triple quotes."""

    def __init__(self, *, terminal: bool) -> None:
        self._session = _editor() if terminal else None

    def read(self) -> str:
        """Read the next turn. Raises EOFError at the end of the input, KeyboardInterrupt."""
        return join_quoted(lambda is_first: self._line(PROMPT if is_first else CONTINUATION))

    def _line(self, prompt: str) -> str:
        if self._session is not None:
            return self._session.prompt([("class:prompt", prompt)])
        text = sys.stdin.readline()
        if not text:
            raise EOFError
        return text.rstrip("\n")


def join_quoted(line: Callable[[bool], str]) -> str:
    """Read one turn: a single line, or, if it begins with triple quotes, all lines until one ends with them.

    `line(is_first)` returns the next line. Raises what `line` raises. If the input ends before the closing quotes, the
    turn ends there.
    """
    first = line(True)
    if not first.lstrip().startswith(QUOTES):
        return first
    parts = [first.lstrip().removeprefix(QUOTES)]
    try:
        while not parts[-1].rstrip().endswith(QUOTES):
            parts.append(line(False))
    except EOFError:
        pass
    else:
        parts[-1] = parts[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(parts).strip("\n")


@contextmanager
def no_echo() -> Iterator[None]:
    """Do not show keys that are pressed during an answer. They stay in the terminal's buffer for the next prompt."""
    if not sys.stdin.isatty():
        yield
        return
    handle = sys.stdin.fileno()
    before = termios.tcgetattr(handle)
    quiet = termios.tcgetattr(handle)
    quiet[0] &= ~(termios.ICRNL | termios.INLCR)
    quiet[3] &= ~(termios.ECHO | termios.ECHONL | termios.ICANON)  # ISIG stays on, so that Ctrl-C stops the answer
    termios.tcsetattr(handle, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(handle, termios.TCSADRAIN, before)


def _editor() -> "PromptSession[str]":
    """Make an editor: Enter sends, Alt-Enter begins a new line, arrow keys show earlier turns."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output.vt100 import Vt100_Output
    from prompt_toolkit.styles import Style

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    output = Vt100_Output.from_pty(sys.stdout)
    output.enable_cpr = False  # not every terminal reports its cursor position, and it is not needed here
    return PromptSession(
        history=InMemoryHistory(),
        multiline=True,  # a paste may have several lines
        key_bindings=keys,
        prompt_continuation=lambda width, number, wraps: CONTINUATION,
        style=Style.from_dict({"prompt": "ansicyan bold"}),
        output=output,
    )
