"""Writes a result to its JSON file, with the machine and the command, and then the pages of figures."""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from benchmarks import machine, pages

RESULTS = pages.FOLDER / "results"


def write(path: Path, result: dict[str, Any], digits: int = 4) -> None:
    """Write the result of the running command to `path`, its figures rounded to so many significant digits.

    Adds the machine and the command. Writes the pages too if `path` is in the folder of committed results.
    """
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]  # no paths of this machine
    module = sys.modules["__main__"].__spec__
    name = "-" if module is None else module.name.removesuffix(".__main__")
    command = shlex.join([*_priority(), "python", "-m", name, *words])
    path.parent.mkdir(exist_ok=True)
    whole = _short({**result, "machine": machine.facts(), "command": command}, digits)
    path.write_text(json.dumps(whole, indent=1) + "\n")
    if path.parent == RESULTS:
        pages.write()


class GrowingResult:
    """A result whose file is written after each figure, so that an interrupted run leaves what it has."""

    def __init__(self, path: Path, **facts: Any) -> None:
        self.values: dict[str, Any] = {"format": 1, **facts}
        self._path = path

    def add(self, figure: dict[str, Any], part: str = "figures") -> None:
        """Add a figure to a part of the result, and show it on standard error."""
        sys.stderr.write(f"{part}: {figure}\n")
        self.values.setdefault(part, []).append(figure)
        write(self._path, self.values)


def _priority() -> list[str]:
    """The command that gave this process its scheduling priority, if it has another than the default."""
    if os.sched_getscheduler(0) == os.SCHED_RR:
        return ["chrt", "-r", str(os.sched_getparam(0).sched_priority)]
    nice = os.nice(0)
    return ["nice", "-n", str(nice)] if nice else []


def _short(value: Any, digits: int) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: _short(item, digits) for key, item in value.items()}
    return [_short(item, digits) for item in value] if isinstance(value, list) else value
