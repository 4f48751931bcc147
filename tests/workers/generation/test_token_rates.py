"""Tokens per second, computed from counters that are read now and then."""

import pytest

from ktqueue.workers.generation.engine_thread import TokenRates


def counters(generation: float, prompt: float = 0.0) -> dict[str, float]:
    return {"generation_tokens": generation, "prompt_tokens": prompt, "running": 3.0}


def test_a_rate_covers_the_last_seconds() -> None:
    rates = TokenRates()
    assert rates.update(100.0, counters(50, 500)) == {
        "generation_tokens_per_second": 0.0,
        "batch_tokens_per_second": 0.0,
        "prompt_tokens_per_second": 0.0,
    }
    assert rates.update(100.5, counters(60, 501))["generation_tokens_per_second"] == pytest.approx(20)
    for beat in range(1, 40):
        rate = rates.update(100.5 + beat / 2, counters(60 + 5 * beat, 501))
    assert rate == {
        "generation_tokens_per_second": pytest.approx(10),
        "batch_tokens_per_second": 0,
        "prompt_tokens_per_second": 0,
    }


def test_rare_heartbeats_give_the_rate_between_two_of_them() -> None:
    rates = TokenRates()
    rates.update(0.0, counters(0))
    rates.update(60.0, counters(6000))
    assert rates.update(120.0, counters(6060))["generation_tokens_per_second"] == pytest.approx(1)


def test_a_counter_that_does_not_change_has_rate_zero() -> None:
    rates = TokenRates()
    rates.update(0.0, counters(0))
    for beat in range(1, 20):
        rate = rates.update(beat / 2, counters(100))
    assert rate["generation_tokens_per_second"] == 0
