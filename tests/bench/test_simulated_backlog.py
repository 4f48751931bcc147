"""A backlog is simulated with the real engine, in virtual time: steps overlap as they are told, and slow each other."""

import time
from dataclasses import replace
from functools import partial

import pytest

from benchmarks.engine import simulated_backlog
from benchmarks.engine.simulated_backlog import BATCH_ALONE, WAYS
from benchmarks.engine.simulated_runner import step_seconds
from benchmarks.engine.virtual_clock import VirtualClock

WAY = {way.name: way for way in WAYS}
SECONDS = 6.0
simulate = partial(simulated_backlog.simulate, seconds=SECONDS, rows=256, alone=3.0)


def test_both_steps_are_slower_while_both_are_computed() -> None:
    clock = VirtualClock()
    clock.left = 1.0  # of an overlapped step
    clock.compute(0.26, 0.52, 0.68)
    assert clock.monotonic() == pytest.approx(0.5) and clock.left == pytest.approx(1 - 0.5 * 0.68)
    clock.compute(0.52, 0.52, 0.68)  # the overlapped step is done before it
    both = (1 - 0.5 * 0.68) / 0.68
    assert clock.left == 0 and clock.monotonic() == pytest.approx(0.5 + both + 0.52 - 0.52 * both)


def test_a_step_takes_what_lies_between_two_points() -> None:
    assert step_seconds(1) == 0.0115 and step_seconds(8192) == 0.355
    assert step_seconds(768) == pytest.approx((0.25 + 0.265) / 2)


def test_time_is_virtual_and_each_run_gives_the_same() -> None:
    real = time.monotonic
    first, second = (simulate(WAY["overlapping"], 4.0, poisson=True) for _ in range(2))
    assert first == second and first["requests"] > 0 and time.monotonic is real


def test_tokens_beside_overlapped_steps_come_sooner_and_all_that_is_computed_there_costs_the_batch() -> None:
    ways = "overlapping", "prompts alone beside", "nothing beside"
    beside, prompts, nothing = (simulate(WAY[way], 1.0) for way in ways)
    alone = simulate(BATCH_ALONE, 0.0)
    assert beside["between_tokens_p50_ms"] < prompts["between_tokens_p50_ms"] / 2
    rates = [figure["batch_tokens_per_second"] for figure in (beside, prompts, nothing, alone)]
    assert rates == sorted(rates) and rates[0] > 0


def test_a_first_token_waits_for_no_long_step_even_where_the_prompt_arrives_between_two() -> None:
    """Overlapped steps take a second and more. A prompt beside them takes half a second."""
    way = replace(WAY["prompts alone beside"], longer=3.0, cpu_rate=0.8, bus_rate=0.68)
    assert simulate(way, 2.0, seconds=20.0, poisson=True)["first_token_p95_ms"] < 600


def test_chats_alone_need_no_batch() -> None:
    chats = simulate(WAY["chats alone"], 1.0)
    assert chats["batch_tokens_per_second"] == 0 and chats["requests"] == SECONDS
