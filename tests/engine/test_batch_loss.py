"""What is computed beside steps of the batch class where that slows them down."""

import pytest

from ktqueue.engine.overlap import LONGEST_RIDE_SECONDS, MOST_LOST_SECONDS, RIDE_SECONDS, BatchLoss, Beside


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def lose(loss: BatchLoss, clock: Clock, seconds: float, alone: float) -> float:
    """Run overlapped steps until less is borne, an hour at most. Returns the time that they took."""
    began, borne = clock.now, loss.borne
    while loss.borne >= borne and clock.now < began + 3600:
        clock.now += seconds
        loss.note(seconds, alone)
    return clock.now - began


def ride(loss: BatchLoss, clock: Clock) -> float:
    """Let time pass until more is borne. Returns how long that was."""
    began, borne = clock.now, loss.borne
    while loss.borne == borne:
        clock.now += 0.5
    return clock.now - began


@pytest.mark.parametrize(("seconds", "alone"), [(0.4, 0.3), (0.29, 0.3), (9.0, 0.0)])
def test_all_is_computed_beside_as_long_as_the_batch_class_loses_little(seconds: float, alone: float) -> None:
    clock = Clock()
    loss = BatchLoss(0.3, clock)
    assert lose(loss, clock, seconds, alone) >= 3600 and loss.borne is Beside.ALL


def test_tokens_ride_and_then_prompts_while_the_batch_class_would_lose_more() -> None:
    """It loses half of its time, so a fifth too much."""
    clock = Clock()
    loss = BatchLoss(0.3, clock)
    for borne in (Beside.PROMPTS, Beside.NOTHING):
        most = MOST_LOST_SECONDS[loss.borne]
        assert lose(loss, clock, 0.6, 0.3) == pytest.approx(most / 0.2, abs=1.0)
        assert loss.borne is borne
    for _ in range(100):
        clock.now += 0.6
        loss.note(0.6, 0.3)  # nothing is left to ride
    assert loss.borne is Beside.NOTHING


def test_more_is_computed_beside_again_step_by_step() -> None:
    clock = Clock()
    loss = BatchLoss(0.3, clock)
    lose(loss, clock, 0.6, 0.3)
    lose(loss, clock, 0.6, 0.3)
    assert ride(loss, clock) == pytest.approx(2 * RIDE_SECONDS, abs=0.5)
    assert ride(loss, clock) == pytest.approx(RIDE_SECONDS, abs=0.5)
    assert loss.borne is Beside.ALL


def test_rides_grow_while_they_come_soon_after_each_other() -> None:
    clock = Clock()
    loss = BatchLoss(0.3, clock)
    rides = []
    for _ in range(6):
        lose(loss, clock, 0.6, 0.3)
        rides.append(ride(loss, clock))
    expected = [min(LONGEST_RIDE_SECONDS, RIDE_SECONDS * 2**place) for place in range(6)]
    assert rides == pytest.approx(expected, abs=0.5)
    clock.now += LONGEST_RIDE_SECONDS + 1.0  # nobody chats
    lose(loss, clock, 0.6, 0.3)
    assert ride(loss, clock) == pytest.approx(RIDE_SECONDS, abs=0.5)


def test_a_loss_is_forgotten_with_time() -> None:
    clock = Clock()
    loss = BatchLoss(0.3, clock)
    for _ in range(100):
        loss.note(1.0 + 0.9 * MOST_LOST_SECONDS[Beside.ALL], 1.0)
        clock.now += 20.0
        assert loss.borne is Beside.ALL
