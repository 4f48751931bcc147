"""How long steps of both classes overlap where that slows the batch class down."""

import pytest

from ktqueue.engine.overlap import LONGEST_PAUSE_SECONDS, MOST_LOST_SECONDS, PAUSE_SECONDS, BatchLoss


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def overlapping(loss: BatchLoss, clock: Clock, seconds: float, alone: float) -> float:
    """Run overlapped steps until they are not borne any more, an hour at most. Returns the time that they took."""
    began = clock.now
    while loss.is_borne and clock.now < began + 3600:
        clock.now += seconds
        loss.note(seconds, alone)
    return clock.now - began


def pause(loss: BatchLoss, clock: Clock) -> float:
    began = clock.now
    while not loss.is_borne:
        clock.now += 0.5
    return clock.now - began


@pytest.mark.parametrize(("seconds", "alone"), [(0.4, 0.3), (0.29, 0.3), (9.0, 0.0)])
def test_steps_overlap_as_long_as_the_batch_class_loses_little(seconds: float, alone: float) -> None:
    clock = Clock()
    assert overlapping(BatchLoss(0.3, clock), clock, seconds, alone) >= 3600


def test_steps_are_shared_while_the_batch_class_would_lose_more() -> None:
    """It loses half of its time, so a fifth too much."""
    clock = Clock()
    loss = BatchLoss(0.3, clock)
    assert overlapping(loss, clock, 0.6, 0.3) == pytest.approx(MOST_LOST_SECONDS / 0.2, abs=1.0)
    assert pause(loss, clock) == pytest.approx(PAUSE_SECONDS, abs=0.5)


def test_pauses_grow_while_they_come_soon_after_each_other() -> None:
    clock = Clock()
    loss = BatchLoss(0.3, clock)
    pauses = []
    for _ in range(6):
        overlapping(loss, clock, 0.6, 0.3)
        pauses.append(pause(loss, clock))
    expected = [min(LONGEST_PAUSE_SECONDS, PAUSE_SECONDS * 2**place) for place in range(6)]
    assert pauses == pytest.approx(expected, abs=0.5)
    clock.now += LONGEST_PAUSE_SECONDS + 1.0  # nobody chats
    overlapping(loss, clock, 0.6, 0.3)
    assert pause(loss, clock) == pytest.approx(PAUSE_SECONDS, abs=0.5)


def test_a_loss_is_forgotten_with_time() -> None:
    clock = Clock()
    loss = BatchLoss(0.3, clock)
    for _ in range(100):
        loss.note(1.0 + 0.9 * MOST_LOST_SECONDS, 1.0)
        clock.now += 20.0
        assert loss.is_borne
