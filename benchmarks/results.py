"""Keeps results: a JSON file each, with the machine and the command, and the pages of figures made anew."""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from benchmarks import machine, tables

RESULTS = tables.FOLDER / "results"


def write(path: Path, result: dict[str, Any], module: str, digits: int = 4) -> None:
    """Keep a result of `python -m benchmarks.MODULE`, its figures with so many digits."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]  # of other places, names
    command = shlex.join([*_before_others(), "python", "-m", f"benchmarks.{module}", *words])
    path.parent.mkdir(exist_ok=True)
    whole = _short({**result, "machine": machine.facts(), "command": command}, digits)
    path.write_text(json.dumps(whole, indent=1) + "\n")
    if path.parent == RESULTS:
        tables.write()


def _before_others() -> list[str]:
    """How the run was put before other processes, if it was."""
    if os.sched_getscheduler(0) == os.SCHED_RR:
        return ["chrt", "-r", str(os.sched_getparam(0).sched_priority)]
    nice = os.nice(0)
    return ["nice", "-n", str(nice)] if nice else []


def _short(value: Any, digits: int) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: _short(one, digits) for key, one in value.items()}
    return [_short(one, digits) for one in value] if isinstance(value, list) else value
