"""StreamingSteps: which steps stream, which share, and which of them teach."""

from typing import Any

import pytest

from ktqueue.operators.gpu.streaming_costs import StreamingCosts
from ktqueue.operators.gpu.streaming_steps import StreamingSteps

RESIDENT: Any = object()


class Step:
    """A step that streamed 4 layers."""

    layers = 4

    def __init__(self, seconds: tuple[float, float] | None) -> None:
        self.seconds = lambda: seconds


class Streamer:
    """Notes what is asked of it."""

    bytes_streamed = 0

    def __init__(self) -> None:
        self.asked: list[tuple[float, bool]] = []
        self.seconds: tuple[float, float] | None = (0.01, 0.002)

    def begin(self, resident: Any, share: float, *, last_too: bool) -> Step:
        assert resident is RESIDENT
        self.asked.append((share, last_too))
        return Step(self.seconds)


class Handoff:
    """`statistics.busy_seconds`, to be set."""

    busy_seconds = 0.0

    @property
    def statistics(self) -> "Handoff":
        return self


@pytest.fixture
def parts() -> tuple[Streamer, StreamingCosts, Handoff]:
    return Streamer(), StreamingCosts(cpu_fixed=0.0, cpu_token=1e-5, copy=0.01), Handoff()


def make(parts: Any, *, always: bool = False) -> StreamingSteps:
    return StreamingSteps(*parts, always=always, least_tokens=64)


def test_long_steps_stream_if_it_pays(parts):
    steps = make(parts)
    assert steps.begin(RESIDENT, 63, 63) is RESIDENT
    assert steps.begin(RESIDENT, 64, 1) is RESIDENT  # too little for the CPU to do
    assert isinstance(steps.begin(RESIDENT, 1000, 1), Step)
    assert isinstance(steps.begin(RESIDENT, 1000, 64), Step)
    assert parts[0].asked == [(0.5, False), (0.5, True)]
    assert steps.steps == 2


def test_always_means_all_long_ones(parts):
    steps = make(parts, always=True)
    assert steps.begin(RESIDENT, 63, 63) is RESIDENT
    assert isinstance(steps.begin(RESIDENT, 64, 1), Step)
    assert parts[0].asked == [(2 / 32, False)]


def test_nothing_to_stream_is_no_streaming(parts):
    parts[1].copy = 10.0
    assert make(parts, always=True).begin(RESIDENT, 64, 1) is RESIDENT


def test_learns_from_all_but_the_first(parts):
    streamer, costs, handoff = parts
    steps = make(parts)
    for learned in (False, True, False):
        if not learned and steps.steps:
            streamer.seconds = None  # not done yet
        before = costs.copy, costs.cpu_token, costs.gpu_token
        steps.begin(RESIDENT, 1000, 1)
        handoff.busy_seconds += 0.03
        steps.after_step()
        assert ((costs.copy, costs.cpu_token, costs.gpu_token) != before) == learned
    after = costs.copy
    steps.after_step()  # of a step that did not stream
    assert costs.copy == after
