"""Reads a folder of profiles: the files of all processes that wrote to it, in the order of time.

Lines that are torn, as after `kill -9`, or that lack a field are left out. So are files of newer versions.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import SEEK_END, BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Final

from ktqueue.core.codec import CodecError, loads
from ktqueue.core.errors import KtqueueError
from ktqueue.profiling.records import VERSION
from ktqueue.profiling.whole_lines import is_whole, is_whole_head

Line = dict[str, Any]
_LONGEST = 1 << 20  # bytes, more than any line
KINDS: Final = ("steps", "tokens", "requests", "routing", "process")


class ProfileError(KtqueueError):
    """The folder has no profile that can be read."""

    code = "cli_profile"


@dataclass(slots=True)
class ProcessProfile:
    """What one process wrote. name: that of its files. head: facts of the process. dropped: lines that it did not
    write. unreadable: lines that are torn or lack a field."""

    name: str
    head: Mapping[str, Any]
    steps: list[Line] = field(default_factory=list)
    tokens: list[Line] = field(default_factory=list)
    requests: list[Line] = field(default_factory=list)
    routing: list[Line] = field(default_factory=list)
    dropped: int = 0
    unreadable: int = 0

    @property
    def title(self) -> str:
        """A short name for people: what the process is, and its id."""
        return f"{self.head.get('role', 'process')} {self.head.get('pid', '')}".strip()

    @property
    def losses(self) -> list[str]:
        """What the profile lacks, in words."""
        lost = ((self.dropped, "dropped"), (self.unreadable, "damaged"))
        return [f"lines that were {how}: {count:,}" for count, how in lost if count]


def read_profile(folder: Path, *, last_seconds: float | None = None) -> list[ProcessProfile]:
    """The profiles of all processes, by the time of their start. `last_seconds`: only lines so long before the end.

    Raises ProfileError if there is none.
    """
    if not folder.is_dir():
        raise ProfileError(
            f"{folder} is not a folder; --profile {folder} makes a worker write to it", value=str(folder)
        )
    found: dict[str, ProcessProfile] = {}
    heads = {path: _head(path) for path in sorted(folder.glob("*.jsonl")) if path.is_file()}
    files = [(path, head) for path, head in heads.items() if head is not None]
    since = 0.0
    if last_seconds is not None:
        since = max([_end(path, head["kind"]) for path, head in files], default=0.0) - last_seconds
    for path, head in files:
        name, kind = path.name.partition(".")[0], head["kind"]
        process = found.setdefault(name, ProcessProfile(name, head))
        lines = [line for line in _lines(path, kind) if line is None or line["at"] >= since]
        whole = [line for line in lines if line is not None]
        process.unreadable += len(lines) - len(whole)
        if kind == "process":
            process.dropped += max([line.get("dropped", 0) for line in whole], default=0)
        else:
            getattr(process, kind).extend(whole)
    if not found:
        raise ProfileError(f"{folder} has no profile; --profile {folder} makes a worker write one", value=str(folder))
    if not any(process.steps or process.requests for process in found.values()):
        raise ProfileError(f"the profile in {folder} has no step yet", value=str(folder))
    return sorted(found.values(), key=lambda process: process.head.get("started", 0.0))


def _head(path: Path) -> Line | None:
    """The first line; None if the file is empty, torn at once, of another version, or another program's."""
    with _opened(path) as file:
        head = _object(file.readline(_LONGEST))
    if head is None or head.get("v") != VERSION or head.get("kind") not in KINDS:
        return None
    return head if is_whole_head(head) else None


def _lines(path: Path, kind: str) -> Iterator[Line | None]:
    """The lines after the head; None instead of one that is not whole."""
    with _opened(path) as file:
        file.readline()
        for text in file:
            line = _object(text)
            yield line if line is not None and is_whole(line, kind) else None


def _end(path: Path, kind: str) -> float:
    """The time of the last whole line of a file, in Unix seconds; 0: none is known."""
    with _opened(path) as file:
        size = file.seek(0, SEEK_END)
        file.seek(max(0, size - _LONGEST))
        tail = file.read().split(b"\n")[1:-1]  # the first may be a part of a line, and what follows the last is torn
    lines = (line for line in map(_object, reversed(tail)) if line is not None and is_whole(line, kind))
    return float(next(lines, {"at": 0.0})["at"])


def _opened(path: Path) -> BinaryIO:
    """The file, or an empty one if its process has deleted it meanwhile."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        return BytesIO()


def _object(text: bytes) -> Line | None:
    """A JSON object, or None."""
    try:
        value = loads(text)
    except CodecError:
        return None
    return value if isinstance(value, dict) else None
