"""Shows what a command waits for."""

import sys

from ktqueue.cli.terminal.console import notes


class Waiting:
    """Shows what the command waits for: beside a spinner on a terminal, as plain lines elsewhere."""

    def __init__(self) -> None:
        self._console = notes()
        self._status = self._console.status("starting") if self._console.is_terminal else None

    def __enter__(self) -> "Waiting":
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
