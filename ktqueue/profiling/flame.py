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


def flame_graph(processes: Sequence[ProcessProfile]) -> dict[str, Any]:
    """The document of a flame graph, with a profile for each process that has steps."""
    frames: dict[str, int] = {}
    profiles = [_profile(process, frames) for process in processes if process.steps]
    return {
        "$schema": SCHEMA,
        "name": "ktqueue profile",
        "exporter": "ktqueue",
        "activeProfileIndex": 0,
        "shared": {"frames": [{"name": name} for name in frames]},
        "profiles": profiles,
    }


def _profile(process: ProcessProfile, frames: dict[str, int]) -> dict[str, Any]:
    """Open and close events of one engine, in seconds since its first step. Steps never overlap.

    `frames`: the number of each frame of the file by its name, to which new names are added.
    """
    begin = process.steps[0]["at"]
    events: list[dict[str, Any]] = []
    now = 0.0

    def event(kind: str, name: str, at: float) -> None:
        events.append({"type": kind, "frame": frames.setdefault(name, len(frames)), "at": at})

    def span(name: str, start: float, end: float, parts: Sequence[tuple[str, float, float]] = ()) -> None:
        event("O", name, start)
        at = start
        for part, _, seconds in parts:
            event("O", part, at)
            at = min(at + seconds, end)
            event("C", part, at)
        event("C", name, end)

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
