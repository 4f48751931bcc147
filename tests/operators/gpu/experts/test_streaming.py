"""StreamingSteps: which steps stream, which share, and what is learned from them."""

from types import SimpleNamespace
from typing import Any

import pytest

from ktqueue.operators.gpu.experts.streaming import StreamingSteps
from ktqueue.operators.gpu.experts.streaming_choice import SHARES, StreamingChoice, StreamingCosts

RESIDENT: Any = object()


class Step:
    """A step that streamed 4 layers."""

    layers = 4

    def __init__(self, seconds: tuple[float, float] | None) -> None:
        self.seconds = lambda: seconds


class Parts:
    """A streamer, a hand-off and a clock in one. It records the calls."""

    bytes_streamed = 0
    busy_seconds = 0.0

    def __init__(self) -> None:
        self.asked: list[tuple[float, bool]] = []
        self.order = SimpleNamespace(version=0, left=tuple(1 - share for share in SHARES))
        self.improved = 0
        self.seconds: tuple[float, float] | None = (0.01, 0.002)
        self.now = 5.0
        self.costs = StreamingCosts(cpu_fixed=0.0, cpu_token=1e-5, copy=0.01)
        self.choice = StreamingChoice(self.costs, 4)
        self.learned: list[tuple[Any, ...]] = []
        learn = self.choice.learn

        def note(tokens: int, share: float, seconds: float) -> None:
            self.learned.append((tokens, share, seconds))
            learn(tokens, share, seconds)

        self.choice.learn = note  # type: ignore[method-assign]

    def begin(self, resident: Any, share: float, *, last_too: bool) -> Step:
        assert resident is RESIDENT
        self.asked.append((share, last_too))
        return Step(self.seconds)

    def improve_order(self) -> None:
        self.improved += 1

    @property
    def statistics(self) -> "Parts":
        return self


@pytest.fixture
def parts() -> Parts:
    return Parts()


@pytest.fixture
def steps(parts: Any) -> StreamingSteps:
    return StreamingSteps(parts, parts.costs, parts.choice, parts, layers=4, least_tokens=64, clock=lambda: parts.now)


def test_long_steps_stream_the_chosen_share(parts: Parts, steps: StreamingSteps) -> None:
    assert [steps.is_long(tokens) for tokens in (1, 63, 64, 1000)] == [False, False, True, True]
    assert steps.begin(RESIDENT, 64, 1) is RESIDENT  # too little for the CPU to do
    assert isinstance(steps.begin(RESIDENT, 1000, 1), Step)
    assert isinstance(steps.begin(RESIDENT, 1000, 64), Step)
    assert parts.asked == [(0.5, False), (0.5, True)]
    assert steps.steps == 2


def test_the_choice_learns_from_long_steps_except_the_first(parts: Parts, steps: StreamingSteps) -> None:
    for tokens in (1000, 1000, 63, 64):
        if steps.is_long(tokens):
            steps.begin(RESIDENT, tokens, 1)
        parts.now += 0.25
        steps.after_step()
        parts.now += 1
        steps.after_step()  # of no step
    assert parts.learned == [(1000, 0.5, 0.25), (64, 0.0, 0.25)]


def test_costs_learn_from_finished_steps_except_the_first(parts: Parts, steps: StreamingSteps) -> None:
    costs = parts.costs
    for learned in (False, True, False):
        if not learned and steps.steps:
            parts.seconds = None  # not done yet
        before = costs.copy, costs.cpu_token, costs.gpu_token
        steps.begin(RESIDENT, 1000, 1)
        parts.busy_seconds += 0.03
        parts.now += 0.022
        steps.after_step()
        assert ((costs.copy, costs.cpu_token, costs.gpu_token) != before) == learned
    assert len(parts.learned) == 1


def test_costs_learn_from_steps_that_stream_nothing(parts: Parts, steps: StreamingSteps) -> None:
    before = parts.costs.cpu_token
    for _ in range(2):
        steps.begin(RESIDENT, 64, 1)
        parts.busy_seconds += 4 * 0.001
        parts.now += 0.005
        steps.after_step()
    assert before < parts.costs.cpu_token < 2 * before


def test_another_order_of_uses_changes_the_costs_and_forgets_splits(parts: Parts, steps: StreamingSteps) -> None:
    for _ in range(30):
        steps.begin(RESIDENT, 1000, 1)
        parts.now += 0.05 if parts.asked[-1][0] == 1 else 9.0  # a split is slow
        assert steps.after_step()
    assert not steps.after_step()  # of no step
    assert parts.improved == 29 and parts.asked[-1][0] == 1.0  # the first step is not learned from
    parts.order.version, parts.order.left = 1, tuple((1 - share) ** 3 for share in SHARES)
    steps.begin(RESIDENT, 1000, 1)
    assert parts.costs.left == parts.order.left
    assert 0 < parts.asked[-1][0] < 1
