"""What the commands of `ktqueue bench` share: lists of numbers, sizes, and where the report is written."""

import json
from pathlib import Path
from typing import Any

from ktqueue.cli.terminal.console import write_json
from ktqueue.cli.terminal.failures import UsageFault
from ktqueue.core.units import parse_bytes

STANDARD_OUTPUT = Path("-")


def numbers(flag: str, text: str, *, least: int = 1, most: int, may_be_empty: bool = True) -> tuple[int, ...]:
    """The numbers of a comma-separated list, each once. Raises UsageFault naming the flag."""
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for word in words or (() if may_be_empty else ("",)):
        if not word.isdecimal() or not least <= int(word) <= most:
            raise UsageFault(f"{flag}: must be numbers from {least} to {most} with commas, got {word!r}")
    return tuple(map(int, words))


def size(flag: str, text: str) -> int:
    """The bytes of a size such as 256MiB. Raises UsageFault naming the flag."""
    try:
        found = parse_bytes(text)
    except ValueError:
        found = 0
    if found < 1:
        raise UsageFault(f"{flag}: must be a size such as 256MiB, got {text!r}")
    return found


def write_report(target: Path, value: dict[str, Any]) -> None:
    """Write a report as JSON, to a file or to standard output (`-`)."""
    if target == STANDARD_OUTPUT:
        write_json(value)
    else:
        target.write_text(json.dumps(value, indent=2) + "\n")
