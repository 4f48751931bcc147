"""Figures of a profile, computed from lines with known numbers."""

from typing import Any

import pytest

from ktqueue.profiling.folder import ProcessProfile
from ktqueue.profiling.records import STEP_PARTS
from ktqueue.profiling.summary import bucket_name, buckets, percentile


def step(rows: int, seconds: float, **more: Any) -> dict[str, Any]:
    """A step whose launch takes three quarters of it, and the sample the rest."""
    parts = dict.fromkeys(STEP_PARTS, 0.0) | {"launch": 0.75 * seconds, "sample": 0.25 * seconds}
    return {"rows": rows, "tokens": rows, "prompt_tokens": 0, "seconds": seconds, **parts, **more}


@pytest.mark.parametrize(
    ("rows", "name"), [(1, "1"), (2, "2"), (3, "3-4"), (4, "3-4"), (5, "5-8"), (16, "9-16"), (17, "17-32")]
)
def test_buckets_end_at_powers_of_two(rows: int, name: str) -> None:
    assert bucket_name(step(rows, 1.0)) == name
    assert bucket_name(step(rows, 1.0, prompt_tokens=1)) == "prompts"


def test_a_bucket_compares_experts_with_the_memory() -> None:
    work = {"cpu_experts": 8, "cpu_bytes": 2000, "cpu_seconds": 0.5}
    steps = [step(9, 1.0, **work), step(1, 0.25), step(16, 3.0, **work), step(2, 1.0, prompt_tokens=7)]
    process = ProcessProfile("x", {"memory_bandwidth": 8000.0}, steps=steps)
    one, many, prompts = buckets(process)
    assert (one.rows, many.rows, prompts.rows) == ("1", "9-16", "prompts")
    assert one.floor is None
    assert (many.steps, many.tokens, many.seconds, many.experts) == (2, 25, 4.0, 16)
    assert many.tokens_per_second == pytest.approx(25 / 4)
    assert many.expert_bandwidth == pytest.approx(4000.0)
    assert many.floor == pytest.approx(2000 / 8000)
    shares = {part.name: part.share for part in many.parts}
    assert (shares["launch"], shares["sample"], shares["wait"]) == pytest.approx((0.75, 0.25, 0.0))


def test_a_bucket_says_where_experts_were_found() -> None:
    work = {"bus_bytes": 10, "uses": 8, "gpu_uses": 6, "gpu_experts": 4, "fetched_bytes": 100}
    one, two = buckets(ProcessProfile("x", {}, steps=[step(1, 1.0, **work), step(1, 1.0, **work), step(2, 1.0)]))
    assert (one.bus_bytes, one.gpu_experts, one.fetched_bytes, one.found) == (20, 8, 200, 0.75)
    assert two.found is None and two.gpu_experts == 0


def test_percentiles_are_values_of_the_list() -> None:
    values = [float(number) for number in range(100)]
    assert (percentile(values, 0.5), percentile(values, 0.95), percentile(values, 1.0)) == (50.0, 95.0, 99.0)
    assert percentile([], 0.5) == 0.0
