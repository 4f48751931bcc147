"""A profile as a flame graph for speedscope (www.speedscope.app), which reads files without sending them anywhere.

Each process is a profile of its engine's thread in the order of time: idle time, and steps with their parts. The format
is https://www.speedscope.app/file-format-schema.json.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from ktqueue.core.codec import dumps
from ktqueue.profiling.folder import ProcessProfile
from ktqueue.profiling.summary import bucket_name
from ktqueue.profiling.trace import step_order

SCHEMA: Final = "https://www.speedscope.app/file-format-schema.json"


def flame_graph(processes: Sequence[ProcessProfile]) -> Iterator[bytes]:
    """The document of a flame graph, piece by piece, with a profile for each process that has steps."""
    frames: dict[str, int] = {}
    facts = {"$schema": SCHEMA, "name": "ktqueue profile", "exporter": "ktqueue", "activeProfileIndex": 0}
    yield dumps(facts)[:-1] + b',"profiles":['
    comma = b""
    for process in processes:
        if process.steps:
            yield comma
            yield from _profile(process, frames)
            comma = b",\n"
    yield b'],"shared":%s}\n' % dumps({"frames": [{"name": name} for name in frames]})


def _profile(process: ProcessProfile, frames: dict[str, int]) -> Iterator[bytes]:
    """Open and close events of one engine, in seconds since its first step. Steps never overlap.

    `frames`: the number of each frame of the file by its name, to which new names are added.
    """
    begin = process.steps[0]["at"]
    now = 0.0

    def event(kind: str, name: str, at: float) -> bytes:
        return dumps({"type": kind, "frame": frames.setdefault(name, len(frames)), "at": at})

    def span(name: str, start: float, end: float, parts: Iterable[tuple[str, float, float]] = ()) -> Iterator[bytes]:
        yield event("O", name, start)
        at = start
        for part, _, seconds in parts:
            yield event("O", part, at)
            at = min(at + seconds, end)
            yield event("C", part, at)
        yield event("C", name, end)

    yield b'{"events":['
    comma = b""
    for step in process.steps:
        start = max(now, step["at"] - begin)
        events: list[bytes] = []
        if start > now:
            events += span("between steps", now, start)
        now = max(start, step["at"] - begin + step["seconds"])
        rows = bucket_name(step)
        events += span(f"step of {rows}" if rows == "prompts" else f"step of {rows} rows", start, now, step_order(step))
        yield comma + b",".join(events)
        comma = b",\n"
    facts = {"type": "evented", "name": f"{process.title}: engine", "unit": "seconds", "startValue": 0, "endValue": now}
    yield b"]," + dumps(facts)[1:]
