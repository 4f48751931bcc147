"""The trace, the flame graph and the page of a profile with known numbers."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from ktqueue.core.codec import loads
from ktqueue.profiling.flame import flame_graph
from ktqueue.profiling.folder import ProcessProfile
from ktqueue.profiling.page import page
from ktqueue.profiling.plots import ticks
from ktqueue.profiling.records import STEP_PARTS
from ktqueue.profiling.request_times import request_times
from ktqueue.profiling.token_log import FIRST_PARTS
from ktqueue.profiling.trace import trace

DAY = 1_800_000_000.0
VOID = {"meta", "br"}


def parts(launch: float, wait: float = 0.0) -> dict[str, float]:
    """Parts of a step: 1 ms each, except the launch, and the wait if there is a device."""
    return dict.fromkeys(STEP_PARTS, 0.001) | {"launch": launch, "wait": wait}


def step(number: int, at: float, launch: float = 0.002, **more: Any) -> dict[str, Any]:
    times = parts(launch, more.pop("wait", 0.0))
    counts = {"rows": 2, "sampled": 2, "tokens": 2, "prompt_tokens": 0, "pages_used": 3, "pages_free": 5}
    work = {"cpu_runs": 2, "cpu_experts": 8, "cpu_bytes": 4_000_000, "cpu_seconds": 0.002, "cpu_gb_per_second": 2.0}
    return {"step": number, "at": DAY + at, "seconds": sum(times.values()), **times, **counts, **work, **more}


def token(request: str, position: int, at: float, **more: Any) -> dict[str, Any]:
    """A token whose step, of 8 ms, ended `at`; it was published 3 ms later."""
    line = {"at": DAY + at, "request": request, "choice": 0, "position": position, "step": 1, "between": 0.002}
    return {**line, "hand_over": 0.001, "publish": 0.002, **parts(0.002), **more}


@pytest.fixture
def processes() -> list[ProcessProfile]:
    """A gateway and a worker with two requests: the first arrives 10 ms after its HTTP request, and waits 5 x 2 ms."""
    first = {"arrived": DAY + 1.01, **dict.fromkeys(FIRST_PARTS, 0.002), "between": 0.0}
    worker = ProcessProfile(
        "b",
        {"role": "worker", "pid": 7, "model": "<m>", "memory_bandwidth": 8e9, "threads": 4, "started": DAY},
        steps=[step(1, 1.02, prompt_tokens=9), step(2, 1.03), step(3, 2.0, wait=0.004)],
        tokens=[
            token("job-a", 0, 1.028, **first),
            token("job-a", 1, 1.038),
            token("job-b", 0, 1.038, **{**first, "arrived": DAY + 1.02}),
        ],
        routing=[
            {"at": DAY + 1.5, "steps": 2, "uses": [[1, 0, 3], [2, 2, 0]]},
            {"at": DAY + 2, "steps": 1, "uses": [[0, 4, 0]] * 2},
        ],
    )
    line = {"at": DAY + 1.0, "seconds": 0.05, "first": 0.04, "path": "/v1/x", "status": 200, "request_id": "r"}
    gateway = ProcessProfile("a", {"role": "gateway", "pid": 6}, requests=[{**line, "requests": ["job-a"]}])
    return [gateway, worker]


def test_parts_of_requests_follow_one_another(processes: list[ProcessProfile]) -> None:
    one, two = request_times(processes)
    assert (one.id, one.tokens, two.id, two.tokens) == ("job-a", 2, "job-b", 1)
    assert (one.began, one.ended) == pytest.approx((DAY + 1.0, DAY + 1.05), abs=1e-6)
    assert one.seconds == pytest.approx(one.ended - one.began, abs=1e-6)
    assert one.parts["inbound"] == pytest.approx(0.01, abs=1e-6)
    assert one.parts["launch"] == pytest.approx(0.004)
    assert one.parts["publish"] == pytest.approx(0.002)  # that of the last token
    assert one.parts["outbound"] == pytest.approx(0.05 - 0.041, abs=1e-6)
    assert (two.parts["inbound"], two.parts["outbound"]) == (0.0, 0.0)  # nobody's profile has them


def test_a_takeover_is_the_time_between_two_workers(processes: list[ProcessProfile]) -> None:
    later = {"arrived": DAY + 3.0, **dict.fromkeys(FIRST_PARTS, 0.0), "between": 0.0}
    second = ProcessProfile("c", {"role": "worker"}, tokens=[token("job-a", 2, 3.008, **later)])
    one = request_times([*processes[1:], second])[0]
    assert one.tokens == 3
    assert one.parts["takeover"] == pytest.approx(3.0 - 1.038, abs=1e-6)
    assert one.seconds == pytest.approx(one.ended - one.began, abs=1e-6)


def test_missing_tokens_are_not_hidden_by_the_gateways_times(processes: list[ProcessProfile]) -> None:
    tokens, first = processes[1].tokens, dict(processes[1].tokens[0])
    assert request_times(processes)[0].parts["inbound"] > 0
    for missing in (slice(0, 1), slice(1, 2)):
        kept = [token("job-a", position, 1.028 + position / 100) for position in range(4)]
        kept[0] |= {key: first[key] for key in ("arrived", *FIRST_PARTS)}
        del kept[missing]
        tokens[:] = kept
        (one,) = request_times(processes)
        assert (one.parts["inbound"], one.parts["outbound"]) == (0.0, 0.0)
    tokens[:] = [{"at": DAY, "request": "job-a", "choice": 0, "position": 1, "same_step": True}]
    assert request_times(processes) == []


def test_a_trace_has_tracks_with_names_and_balanced_requests(processes: list[ProcessProfile]) -> None:
    document = loads(b"".join(trace(processes)))
    assert document["displayTimeUnit"] == "ms"
    events = document["traceEvents"]
    names = {
        (event["name"], event["args"]["name"]) for event in events if event["ph"] == "M" and "name" in event["args"]
    }
    assert names == {
        ("process_name", "gateway 6"),
        ("process_name", "worker 7"),
        *(("thread_name", name) for name in ("engine", "device", "publisher")),
    }
    open_events: dict[tuple[Any, ...], list[Any]] = {}
    for event in events:
        key = (event["pid"], event.get("cat"), event.get("id"))
        if event["ph"] == "b":
            open_events.setdefault(key, []).append(event)
        elif event["ph"] == "e":
            began = open_events[key].pop()
            assert began["name"] == event["name"]
            assert began["ts"] <= event["ts"]
    assert not any(open_events.values())
    spans = [event for event in events if event["ph"] == "X"]
    assert [event["ts"] for event in spans if event["name"] == "decode 2 rows"] == pytest.approx([30_000, 1_000_000])
    forwards = [event["dur"] for event in spans if event["name"] == "forward"]
    assert forwards == pytest.approx([2000, 2000, 2000 + 1000 + 1000 + 4000])  # with a device until the wait ends
    for track in (1, 2, 3):  # spans of a track nest
        ends: list[float] = []
        for event in sorted((e for e in spans if e["tid"] == track), key=lambda e: (e["ts"], -e["dur"])):
            while ends and ends[-1] <= event["ts"] + 0.2:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1] + 0.2
            ends.append(event["ts"] + event["dur"])


def test_a_flame_graph_has_balanced_events_in_order(processes: list[ProcessProfile]) -> None:
    document = loads(b"".join(flame_graph(processes)))
    frames = [frame["name"] for frame in document["shared"]["frames"]]
    (profile,) = document["profiles"]
    assert profile["name"] == "worker 7: engine"
    at, stack = 0.0, []
    for event in profile["events"]:
        assert event["at"] >= at
        at = event["at"]
        if event["type"] == "O":
            stack.append(event["frame"])
        else:
            assert stack.pop() == event["frame"]
    assert not stack
    assert at == profile["endValue"] == pytest.approx(2.0 + 0.012 - 1.02, abs=1e-6)
    assert {"between steps", "step of prompts", "step of 2 rows", "launch", "wait"} <= set(frames)


class Balance(HTMLParser):
    """Checks that tags are closed in order, and collects what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.loads += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "xlink:href", "srcset")]
        self.loads += [tag] * (tag in ("script", "link", "iframe", "object"))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_step_is_drawn_while_it_runs(processes: list[ProcessProfile]) -> None:
    long = [step(number, 0.01 * number) for number in range(15)] + [step(15, 0.2, launch=9.0), step(16, 9.3)]
    processes[1].steps[:] = long
    (rows,) = re.findall(r"aria-label=\"Rows\">.*?</svg>", page(processes, []))
    (path,) = re.findall(r'class="line"[^>]* d="([^"]*)"', rows)
    assert {words.split()[1] for words in re.findall(r"[\d.]+ [\d.]+", path)} == {"10.0"}  # 2 rows, the axis' end


def test_a_page_of_a_gateway_says_that_there_are_no_steps(processes: list[ProcessProfile]) -> None:
    assert "no steps and no tokens" in page(processes[:1], [])


def test_routing_of_another_shape_is_left_out(processes: list[ProcessProfile]) -> None:
    processes[1].routing.insert(0, {"at": DAY + 1, "steps": 1, "uses": [[9, 9]]})
    assert page(processes, []).count('class="cell"') == 6


def test_a_page_is_complete_in_itself(processes: list[ProcessProfile]) -> None:
    text = page(processes, request_times(processes))
    checked = Balance()
    checked.feed(text)
    assert checked.open == []
    assert checked.loads == []
    assert not re.search(r"url\(|@import|https?:", text)
    assert "&lt;m&gt;" in text
    assert "nan" not in re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL)
    for title in ("Time of steps", "Parts of steps", "Rows", "Weights of experts", "each expert was chosen"):
        assert title in text
    assert text.count('class="cell"') == 6
    assert "layer 0, expert 1: 4" in text  # summed over both records


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (0, 30, [0, 10, 20, 30]), (3, 3, [3])]
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)
