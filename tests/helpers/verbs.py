"""The command line as a tree: which verbs there are, and which flags each takes.

This module is also a program: it writes the table of flags into docs/reference/cli.md.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from ktqueue.cli.main import application
from ktqueue.core.config import all_settings

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
HEAD = "| flag | commands | meaning |\n| --- | --- | --- |\n"
MOST_NAMED = 6  # commands in a row of the table


def tree() -> dict[tuple[str, ...], Any]:
    """Every verb that does something, by its words: ("jobs", "list")."""
    return dict(_leaves(typer.main.get_command(application())))


def _leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if hasattr(command, "commands"):
        for name, child in command.commands.items():
            yield from _leaves(child, (*path, name))
    else:
        yield path, command


def flag_table() -> str:
    """The flags that set no setting, as Markdown: the last part of docs/reference/cli.md."""
    settings = {flag.partition("/")[0] for described in all_settings() for flag in described.about.flags}
    verbs_of: dict[tuple[str, str], list[str]] = {}
    for path, command in tree().items():
        for param in command.params:
            if param.param_type_name != "option" or param.opts[0] in settings or param.name == "help":
                continue
            names = [f"`{name}`" for name in (*param.opts, *param.secondary_opts)]
            verbs_of.setdefault((", ".join(names), param.help.replace("|", "&#124;")), []).append(" ".join(path))
    rows = sorted(verbs_of.items(), key=lambda row: (row[0][0].lstrip("`-"), row[1]))
    return HEAD + "".join(
        f"| {flags} | {', '.join(verbs) if len(verbs) <= MOST_NAMED else 'many'} | {meaning} |\n"
        for (flags, meaning), verbs in rows
    )


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(HEAD)[0] + flag_table())
