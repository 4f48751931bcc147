"""Tokens a second, of counters that are read now and then."""

import pytest

from ktqueue.workers.generation.engine_thread import TokenRates


def told(generation: float, prompt: float = 0.0) -> dict[str, float]:
    return {"generation_tokens": generation, "prompt_tokens": prompt, "running": 3.0}


def test_a_rate_is_that_of_the_last_seconds() -> None:
    rates = TokenRates()
    assert rates.update(100.0, told(50, 500)) == {"generation_tokens_per_second": 0.0, "prompt_tokens_per_second": 0.0}
    assert rates.update(100.5, told(60, 501))["generation_tokens_per_second"] == pytest.approx(20)
    for beat in range(1, 40):
        rate = rates.update(100.5 + beat / 2, told(60 + 5 * beat, 501))
    assert rate == {"generation_tokens_per_second": pytest.approx(10), "prompt_tokens_per_second": 0}


def test_rare_beats_are_windows_of_their_own() -> None:
    rates = TokenRates()
    rates.update(0.0, told(0))
    rates.update(60.0, told(6000))
    assert rates.update(120.0, told(6060))["generation_tokens_per_second"] == pytest.approx(1)


def test_what_rests_comes_to_nothing() -> None:
    rates = TokenRates()
    rates.update(0.0, told(0))
    for beat in range(1, 20):
        rate = rates.update(beat / 2, told(100))
    assert rate["generation_tokens_per_second"] == 0
