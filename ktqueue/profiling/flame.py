"""A profile as a flame graph for speedscope (www.speedscope.app), which reads files without sending them anywhere.

Each process is a profile of its engine's thread in the order of time: idle time, and steps with their parts. The format
is https://www.speedscope.app/file-format-schema.json.
"""

from collections.abc import Sequence
from typing import Any, Final

from ktqueue.profiling.folder import ProcessProfile
from ktqueue.profiling.summary import bucket_name
from ktqueue.profiling.trace import step_order

SCHEMA: Final = "https://www.speedscope.app/file-format-schema.json"


class _Frames:
    """The frames of a file by name, each with its number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    def listed(self) -> list[dict[str, str]]:
        return [{"name": name} for name in self._numbers]


def flame_graph(processes: Sequence[ProcessProfile]) -> dict[str, Any]:
    """The document of a flame graph, with a profile for each process that has steps."""
    frames = _Frames()
    profiles = [_profile(process, frames) for process in processes if process.steps]
    return {
        "$schema": SCHEMA,
        "name": "ktqueue profile",
        "exporter": "ktqueue",
        "activeProfileIndex": 0,
        "shared": {"frames": frames.listed()},
        "profiles": profiles,
    }


def _profile(process: ProcessProfile, frames: _Frames) -> dict[str, Any]:
    """Open and close events of one engine, in seconds since its first step. Steps never overlap."""
    begin = process.steps[0]["at"]
    events: list[dict[str, Any]] = []
    now = 0.0

    def span(name: str, start: float, end: float, parts: Sequence[tuple[str, float, float]] = ()) -> None:
        events.append({"type": "O", "frame": frames.number(name), "at": start})
        at = start
        for part, _, seconds in parts:
            events.append({"type": "O", "frame": frames.number(part), "at": at})
            at = min(at + seconds, end)
            events.append({"type": "C", "frame": frames.number(part), "at": at})
        events.append({"type": "C", "frame": frames.number(name), "at": end})

    for step in process.steps:
        start = max(now, step["at"] - begin)
        if start > now:
            span("between steps", now, start)
        now = max(start, step["at"] - begin + step["seconds"])
        rows = bucket_name(step)
        span(f"step of {rows}" if rows == "prompts" else f"step of {rows} rows", start, now, list(step_order(step)))
    return {
        "type": "evented",
        "name": f"{process.title}: engine",
        "unit": "seconds",
        "startValue": 0,
        "endValue": now,
        "events": events,
    }
