"""A profile as trace events, for Perfetto (ui.perfetto.dev) and Chrome's tracing page.

Each process has tracks for its engine, its device and its writer to Redis, and counters. Each request is a track of its
own. The format: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from ktqueue.core.codec import dumps
from ktqueue.profiling.folder import Line, ProcessProfile
from ktqueue.profiling.records import STEP_PARTS
from ktqueue.profiling.token_log import FIRST_PARTS

ENGINE, DEVICE, PUBLISHER, HTTP = 1, 2, 3, 4
TRACKS: Final = {ENGINE: "engine", DEVICE: "device", PUBLISHER: "publisher"}
Event = dict[str, Any]


def trace(processes: Sequence[ProcessProfile]) -> Iterator[bytes]:
    """The document of a trace, piece by piece, since it is larger than the profile."""
    comma = b""
    yield b'{"displayTimeUnit":"ms","traceEvents":['
    for event in trace_events(processes):
        yield comma + dumps(event)
        comma = b",\n"
    yield b"]}\n"


def trace_events(processes: Sequence[ProcessProfile]) -> Iterator[Event]:
    """The events of a trace. Times in microseconds since the first record."""
    begin = min((line["at"] for process in processes for line in _lines(process)), default=0.0)
    for number, process in enumerate(processes, 1):
        yield from _names(number, process)
        yield from _steps(number, process, begin)
        yield from _tokens(number, process, begin)
        yield from _answers(number, process, begin)


def _lines(process: ProcessProfile) -> Iterator[Line]:
    yield from process.steps[:1]
    yield from process.requests[:1]
    for token in process.tokens[:1]:
        yield {"at": token.get("arrived", token["at"])}


def _names(pid: int, process: ProcessProfile) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process.title}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for thread, name in TRACKS.items() if process.steps else ():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": thread, "args": {"name": name}}


def _steps(pid: int, process: ProcessProfile, begin: float) -> Iterator[Event]:
    for step in process.steps:
        start = step["at"] - begin
        facts = {name: value for name, value in step.items() if name not in (*STEP_PARTS, "at", "seconds")}
        title = "prompts" if step["prompt_tokens"] else "decode"
        yield _span(pid, ENGINE, f"{title} {step['rows']} rows", start, step["seconds"], facts)
        for name, at, seconds in step_order(step):
            yield _span(pid, ENGINE, name, start + at, seconds)
        for name, at, seconds in _device(step):
            yield _span(pid, DEVICE, name, start + at, seconds)
        micro = round(start * 1e6, 1)
        counts = {"rows": step["rows"], "pages": step["pages_used"]}
        yield from ({"ph": "C", "name": n, "pid": pid, "ts": micro, "args": {n: v}} for n, v in counts.items())


def step_order(step: Line) -> Iterator[tuple[str, float, float]]:
    """The parts of a step that took time: name, seconds since its beginning, seconds."""
    at = 0.0
    for name in STEP_PARTS:
        if step[name] > 0:
            yield name, at, step[name]
            at += step[name]


def _device(step: Line) -> Iterator[tuple[str, float, float]]:
    """What ran while the host launched, sampled or waited: the model, and inside it the CPU's experts."""
    before = step["schedule"] + step["build"]
    model = step["launch"] + (step["pages"] + step["sample"] + step["wait"] if step["wait"] else 0.0)
    yield "forward", before, model
    if seconds := min(step.get("cpu_seconds", 0.0), model):
        yield f"experts on the CPU, {step['cpu_gb_per_second']:.1f} GB/s", before, seconds


def _tokens(pid: int, process: ProcessProfile, begin: float) -> Iterator[Event]:
    choices: dict[tuple[str, int], list[Line]] = {}
    published = 0.0
    for token in process.tokens:
        if "same_step" not in token:
            choices.setdefault((token["request"], token["choice"]), []).append(token)
            start = max(published, token["at"] - begin + token["hand_over"])
            end = token["at"] - begin + token["hand_over"] + token["publish"]
            if end > start:  # tokens of a step are published together
                yield _span(pid, PUBLISHER, "publish", start, end - start)
                published = end
    for (request, choice), tokens in choices.items():
        yield from _request(pid, f"{request} choice {choice}" if choice else request, tokens, begin)


def _request(pid: int, name: str, tokens: Sequence[Line], begin: float) -> Iterator[Event]:
    """A choice of a request: its first parts and its tokens, inside one event."""
    key = {"cat": "request", "id": name, "pid": pid, "tid": 0}
    first = tokens[0]
    at: float = first["arrived" if "arrived" in first else "at"] - begin
    yield {**key, "ph": "b", "name": name, "ts": _micro(at), "args": {"first position": first["position"]}}
    for part in FIRST_PARTS:
        yield from _async(key, part, at, first.get(part, 0.0))
        at += first.get(part, 0.0)
    for token in tokens:
        seconds = sum(token[part] for part in STEP_PARTS)
        yield from _async(key, f"token {token['position']}", token["at"] - begin - seconds, seconds)
    yield {**key, "ph": "e", "name": name, "ts": _micro(tokens[-1]["at"] - begin)}


def _answers(pid: int, process: ProcessProfile, begin: float) -> Iterator[Event]:
    for line in process.requests:
        at, name = line["at"] - begin, f"{line['path']} {line['status']}"
        key = {"cat": "http", "id": line["request_id"], "pid": pid, "tid": HTTP}
        facts = {"requests": line["requests"]}
        yield from _async(key, name, at, line["seconds"], facts)
        yield from _async(key, "until the answer begins", at, line["first"])


def _span(pid: int, tid: int, name: str, start: float, seconds: float, facts: Any = None) -> Event:
    event = {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": _micro(start), "dur": _micro(seconds)}
    return event | {"args": facts} if facts else event


def _async(key: Event, name: str, start: float, seconds: float, facts: Any = None) -> Iterable[Event]:
    event = {**key, "name": name}
    end = {**event, "ph": "e", "ts": _micro(start + seconds)}
    return {**event, "ph": "b", "ts": _micro(start), **({"args": facts} if facts else {})}, end


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 1)
