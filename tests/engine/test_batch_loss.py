"""What is computed beside steps of the batch class where that slows them down."""

import pytest

from ktqueue.engine.batch_loss import (
    LOST_TO_PROMPTS,
    LOST_TO_TOKENS,
    MEASURED_SECONDS,
    NEARLY_ALL,
    PATIENCE,
    SECONDS_TO_TOKENS,
    BatchLoss,
    Beside,
    StepsAlone,
)

TOKENS, ALONE = 2000, 0.36


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def loss(clock: Clock) -> BatchLoss:
    """Steps of TOKENS tokens take ALONE seconds if nothing runs beside them."""
    made = BatchLoss(0.05, clock)
    for _ in range(2):
        step(made, clock, ALONE, is_alone=True)
    return made


def step(loss: BatchLoss, clock: Clock, seconds: float, *, is_alone: bool = False, tokens: int = TOKENS) -> Beside:
    """Run an overlapped step. Returns what was borne beside it; steps that are measured are done with, too."""
    clock.now += seconds
    loss.note(tokens, seconds, is_alone=is_alone)
    return loss.borne


def lose(loss: BatchLoss, clock: Clock, part: float, seconds: float) -> list[Beside]:
    """For `seconds`, run steps that lose `part` of their time, or nothing if nothing is borne. What was borne."""
    borne, end = [loss.borne], clock.now + seconds
    while clock.now < end:
        now = borne[-1]
        borne.append(step(loss, clock, ALONE if now is Beside.NOTHING else ALONE / (1 - part), is_alone=not now))
    return borne


def test_all_is_computed_beside_while_the_batch_class_loses_little(loss: BatchLoss, clock: Clock) -> None:
    borne = lose(loss, clock, LOST_TO_TOKENS - 0.02, 100.0)
    assert set(borne) == {Beside.ALL}


def test_tokens_ride_while_the_batch_class_loses_more(loss: BatchLoss, clock: Clock) -> None:
    borne = lose(loss, clock, LOST_TO_PROMPTS - 0.02, 100.0)
    assert set(borne) == {Beside.ALL, Beside.PROMPTS} and borne[-1] is Beside.PROMPTS
    assert borne == sorted(borne, reverse=True)


def test_prompts_ride_too_if_they_cost_too_much(loss: BatchLoss, clock: Clock) -> None:
    borne = lose(loss, clock, 0.6, 40.0)
    first = [borne.index(level) for level in (Beside.ALL, Beside.PROMPTS, Beside.NOTHING)]
    assert first == sorted(first) and first[0] == 0


def test_a_batch_never_loses_much_more_than_its_part(loss: BatchLoss, clock: Clock) -> None:
    borne = lose(loss, clock, 0.6, 1000.0)
    beside = sum(level > Beside.NOTHING for level in borne) * 0.6 * ALONE / 0.4
    assert beside / 1000.0 == pytest.approx(LOST_TO_PROMPTS, abs=0.02)
    assert borne.count(Beside.NOTHING) > 100


def test_tokens_are_computed_beside_again_when_time_is_saved(loss: BatchLoss, clock: Clock) -> None:
    lose(loss, clock, 0.6, 8.0)
    assert loss.borne is Beside.PROMPTS
    saved = 0.0
    while loss.borne is Beside.PROMPTS:
        saved += ALONE
        step(loss, clock, ALONE)
    least = NEARLY_ALL * SECONDS_TO_TOKENS / LOST_TO_TOKENS
    assert least <= saved <= 2.2 * least  # it had lost up to SECONDS_TO_TOKENS beyond its part


def test_time_without_overlapped_steps_is_saved_too(loss: BatchLoss, clock: Clock) -> None:
    lose(loss, clock, 0.6, 60.0)
    clock.now += MEASURED_SECONDS - 20.0
    assert loss.borne is Beside.ALL


def test_more_may_be_lost_where_interactive_steps_get_a_larger_share(clock: Clock) -> None:
    loss = BatchLoss(0.9, clock)
    for _ in range(2):
        step(loss, clock, ALONE, is_alone=True)
    assert set(lose(loss, clock, 0.8, 100.0)) == {Beside.ALL}


def test_steps_of_another_size_are_measured_first(loss: BatchLoss, clock: Clock) -> None:
    more = 4 * TOKENS
    assert [step(loss, clock, 2.0, tokens=more) for _ in range(PATIENCE)] == [Beside.PROMPTS] * PATIENCE
    assert step(loss, clock, 2.0, tokens=more) is Beside.NOTHING
    assert step(loss, clock, 2.0, tokens=more, is_alone=True) is Beside.NOTHING
    assert step(loss, clock, 0.4, tokens=more, is_alone=True) is Beside.ALL  # the first one compiled
    assert step(loss, clock, ALONE) is Beside.ALL
    for _ in range(40):
        borne = step(loss, clock, 1.0, tokens=more)
    assert borne is Beside.NOTHING


def test_a_step_is_measured_from_time_to_time(loss: BatchLoss, clock: Clock) -> None:
    """It is known for a while how long a step takes alone. Then tokens ride until one is measured again."""
    borne = lose(loss, clock, 0.1, 3 * MEASURED_SECONDS + 10.0)
    assert borne.count(Beside.NOTHING) == 3 and borne.count(Beside.PROMPTS) == 3 * PATIENCE


def test_one_slow_step_does_not_make_others_seem_fast(clock: Clock) -> None:
    alone = StepsAlone(clock)
    assert alone.seconds(TOKENS, unknown=7.0) == 7.0
    for seconds in (1.2, 0.36, 0.38, 5.0):
        alone.observe(TOKENS, seconds)
    assert alone.seconds(TOKENS, unknown=7.0) == 0.38
    assert alone.seconds(3 * TOKENS, unknown=7.0) == 7.0
