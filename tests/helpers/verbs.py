"""The command line as a tree: which verbs there are, and which flags each takes."""

from collections.abc import Iterator
from typing import Any

import typer

from ktqueue.cli.main import application


def tree() -> dict[tuple[str, ...], Any]:
    """Every verb that does something, by its words: ("jobs", "list")."""
    return dict(_leaves(typer.main.get_command(application())))


def _leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if hasattr(command, "commands"):
        for name, child in command.commands.items():
            yield from _leaves(child, (*path, name))
    else:
        yield path, command
