"""Drafts of a small model, simulated with the real engine in virtual time: what they cost and gain."""

import pytest

from benchmarks.engine.simulated_drafts import simulate
from ktqueue.engine.draft_costs import ALLOWED_LOSS, FIRST_BALANCE, FIRST_READING

SURPRISE = 1.0  # step: what the scatter of times and an estimate of reading may add


@pytest.mark.parametrize("right", [0.0, 0.8])
def test_wrong_drafts_and_what_is_read_for_them_cost_a_hundredth_and_some_steps(right: float) -> None:
    """However many rows begin at once, with prompts that take as long to read as several steps."""
    figure = simulate("GPU", 4, right, prompt=1024, answer=400, requests=2)
    steps = 2 * 400
    assert figure["gain"] > -ALLOWED_LOSS - (FIRST_BALANCE + FIRST_READING + SURPRISE) / steps
    assert figure["first_gain"] > -ALLOWED_LOSS - (FIRST_BALANCE + FIRST_READING + SURPRISE) / 400


def test_right_drafts_gain() -> None:
    figure = simulate("GPU", 4, 1.0, prompt=64, answer=500, requests=2)
    assert figure["last_gain"] > 0.3 and figure["accepted"] > 0.9 * figure["drafted"] > 0
