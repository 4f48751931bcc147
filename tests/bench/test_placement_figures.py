"""The simulation of placement uses the worker's own code, and says what a policy finds."""

import numpy as np
import pytest

from benchmarks.gpu.placement import Trace, simulate

EXPERTS, CHOSEN, LAYERS = 16, 2, 2


@pytest.fixture
def trace() -> Trace:
    """Each sequence uses four experts of its own all the time, and expert 15 is used by all."""
    draw = np.random.default_rng(0)
    sequences = []
    for number in range(12):
        own = draw.choice(4, size=(600, LAYERS, 1)) + 4 * (number % 3)
        sequences.append(np.concatenate((np.full_like(own, 15), own), axis=-1))
    return Trace(sequences[:6], sequences[6:], EXPERTS)


def found(trace: Trace, policy: str) -> dict[str, float]:
    return simulate(trace, policy, rows=1, room=5 / EXPERTS, steps=4000)


def test_recent_uses_find_the_experts_of_a_sequence(trace: Trace) -> None:
    both, frequency, decayed = (found(trace, policy) for policy in ("both", "frequency", "lfu with decay"))
    assert both["found"] > 0.9 and both["moves"] > frequency["moves"]
    assert both["found"] > frequency["found"] + 0.15 and both["found"] > decayed["found"] + 0.15
    assert both["missing"] == pytest.approx(CHOSEN * (1 - both["found"]))  # one row uses each expert once


def test_uses_of_an_earlier_run_are_worth_most_at_the_start(trace: Trace) -> None:
    alike = Trace(trace.earlier[2::3], trace.earlier[2::3], EXPERTS)  # experts 8 to 11
    cold, known = (found(alike, policy)["found_first"] for policy in ("both", "both, known"))
    assert known == 1.0 and cold < 0.95


def test_rows_are_of_different_sequences_and_each_begins_with_a_prompt(trace: Trace) -> None:
    steps = list(trace.steps(3, 1000))
    assert {len(decoded) for decoded, _ in steps} == {3 * LAYERS * CHOSEN}
    prompts = [len(prompt) for _, prompt in steps]
    assert sum(prompts) > 0 and {count % (256 * LAYERS * CHOSEN) for count in prompts} == {0}


def test_parts_that_a_worker_records_are_long_enough(trace: Trace) -> None:
    earlier, measured = ([sequence[:128] for sequence in part] for part in (trace.earlier, trace.measured))
    short = Trace(earlier, measured, EXPERTS)
    assert 0 < simulate(short, "both", rows=2, room=5 / EXPERTS, steps=600)["found"] < 1
