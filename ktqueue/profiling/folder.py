"""Reads a folder of profiles: the files of all processes that wrote to it, in the order of time.

The last line of a file is left out if it is torn, as after `kill -9`. So are files of newer versions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ktqueue.core.codec import CodecError, loads
from ktqueue.core.errors import KtqueueError
from ktqueue.profiling.records import VERSION

Line = dict[str, Any]
_TAIL_BYTES = 1 << 20  # more than any line
KINDS: Final = ("steps", "tokens", "requests", "routing")


class ProfileError(KtqueueError):
    """The folder has no profile that can be read."""

    code = "cli_profile"


@dataclass(slots=True)
class ProcessProfile:
    """What one process wrote. name: that of its files. head: facts of the process. dropped: lines that it did not
    write. torn: lines that could not be read."""

    name: str
    head: Mapping[str, Any]
    steps: list[Line] = field(default_factory=list)
    tokens: list[Line] = field(default_factory=list)
    requests: list[Line] = field(default_factory=list)
    routing: list[Line] = field(default_factory=list)
    dropped: int = 0
    torn: int = 0

    @property
    def title(self) -> str:
        """A short name for people: what the process is, and its id."""
        return f"{self.head.get('role', 'process')} {self.head.get('pid', '')}".strip()


def read_profile(folder: Path, *, last_seconds: float | None = None) -> list[ProcessProfile]:
    """The profiles of all processes, by the time of their start. `last_seconds`: only lines so long before the end.

    Raises ProfileError if there is none.
    """
    if not folder.is_dir():
        raise ProfileError(
            f"{folder} is not a folder; --profile {folder} makes a worker write to it", value=str(folder)
        )
    found: dict[str, ProcessProfile] = {}
    paths = sorted(folder.glob("*.jsonl"))
    since = max(map(_end, paths), default=0.0) - last_seconds if last_seconds is not None else 0.0
    for path in paths:
        name, _, rest = path.name.partition(".")
        kind = rest.partition(".")[0]
        (head, *lines), torn = _read(path, since)
        if head.get("v") != VERSION or head.get("kind") != kind:
            continue  # empty, torn at once, of another version, or another program's
        process = found.setdefault(name, ProcessProfile(name, head))
        if kind in KINDS:
            getattr(process, kind).extend(lines)
        else:
            process.dropped += max([int(line.get("dropped", 0)) for line in lines], default=0)
        process.torn += torn
    if not found:
        raise ProfileError(f"{folder} has no profile; --profile {folder} makes a worker write one", value=str(folder))
    if not any(process.steps or process.requests for process in found.values()):
        raise ProfileError(f"the profile in {folder} has no step yet", value=str(folder))
    return sorted(found.values(), key=lambda process: process.head.get("started", 0.0))


def _end(path: Path) -> float:
    """The time of the last whole line of a file, in Unix seconds; 0: none is known."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        tail = file.read().split(b"\n")[1:-1]  # the first may be a part of a line, and what follows the last is torn
    try:
        return float(loads(tail[-1])["at"]) if tail else 0.0
    except (CodecError, KeyError, TypeError, ValueError):
        return 0.0


def _read(path: Path, since: float) -> tuple[list[Line], int]:
    """The JSON objects of a file, at least one, without those from before `since`; and its number of torn lines."""
    lines: list[Line] = []
    torn = 0
    with path.open("rb") as file:
        for text in file:
            try:
                value = loads(text)
            except CodecError:
                value = None
            if not isinstance(value, dict):
                torn += 1
            elif value.get("at", since) >= since:
                lines.append(value)
    return lines or [{}], torn
