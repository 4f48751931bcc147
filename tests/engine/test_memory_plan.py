"""Memory plans use all memory and no byte twice. Errors name what does not fit."""

from functools import partial
from typing import Any

import pytest

from ktqueue.core.errors import ConfigError
from ktqueue.engine.memory_plan import (
    DeviceUse,
    auto_rows,
    estimate_beside,
    estimate_graphs,
    estimate_selection,
    estimate_step,
    plan_memory,
)

GIB = 1 << 30
USE = DeviceUse(weights=3 * GIB, experts=8 * GIB, workspaces=2 * GIB, graphs=GIB)
PAGE = 3 << 20


def test_the_cache_gets_the_memory_that_is_left() -> None:
    plan = plan_memory(80 * GIB, USE, utilization=0.9, page_bytes=PAGE)
    assert plan.pages == (72 - 14) * GIB // PAGE
    assert plan.limit_bytes == 72 * GIB
    assert sum(plan.parts().values()) == plan.device_bytes
    assert 8 * GIB <= plan.parts()["free"] < 8 * GIB + PAGE
    assert plan.parts()["cache"] == plan.pages * PAGE


def test_the_cache_may_be_smaller() -> None:
    assert plan_memory(80 * GIB, USE, utilization=0.9, page_bytes=PAGE, cache_bytes=GIB).pages == GIB // PAGE
    plan = plan_memory(80 * GIB, USE, utilization=0.9, page_bytes=PAGE, cache_bytes=GIB, num_pages=7)
    assert plan.pages == 7 and sum(plan.parts().values()) == 80 * GIB


@pytest.mark.parametrize(
    ("device", "asked", "param", "limit", "value"),
    [
        (15 * GIB, {}, "engine.gpu_memory_utilization", int(15 * GIB * 0.9), 0.9),
        (80 * GIB, {"cache_bytes": 100 * GIB}, "engine.kv_cache_bytes", 58 * GIB, 100 * GIB),
        (80 * GIB, {"cache_bytes": 5}, "engine.kv_cache_bytes", 58 * GIB, 5),
        (80 * GIB, {"num_pages": 10**6}, "engine.num_pages", 58 * GIB, 10**6),
    ],
)
def test_an_error_names_what_does_not_fit(device: Any, asked: Any, param: Any, limit: Any, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_memory(device, USE, utilization=0.9, page_bytes=PAGE, **asked)
    assert (caught.value.param, caught.value.limit, caught.value.value) == (param, limit, value)
    assert param in caught.value.message


def test_estimates_grow_with_their_settings() -> None:
    sizes = {"hidden": 2048, "vocabulary": 151_936, "experts_per_token": 8}
    small, large = estimate_step(512, 32, **sizes), estimate_step(8192, 32, **sizes)
    assert GIB // 2 < small < large < 4 * GIB
    assert estimate_step(512, 64, **sizes) > small
    assert 0 < estimate_selection(64, 151_936) < GIB
    for few, rows, part, scored in ((512, 64, 16, 64), (512, 2048, 16, 256), (16, 64, 512, 16), (9000, 64, 1, 64)):
        beside = estimate_beside(large, 8192, rows, few=few, vocabulary=151_936, planner_bytes=7)
        assert beside == large // part + 4 * scored * 151_936 + 7
    assert estimate_graphs(0, large, 8192, 64, 151_936) == 0
    decode = estimate_graphs(9, large, 8192, 64, 151_936)
    assert 100 << 20 < decode < GIB
    assert estimate_graphs(9, large, 8192, 64, 151_936, prompts=[32]) == decode + (36 << 20)
    with_prompts = estimate_graphs(9, large, 8192, 64, 151_936, prompts=[512, 32])
    assert with_prompts == decode + (72 << 20) + large * 512 // 8192 - large * 64 // 8192
    assert estimate_graphs(9, large, 8192, 64, 151_936, expanded_bytes=5) == decode
    assert estimate_graphs(9, large, 8192, 64, 151_936, prompts=[512, 32], expanded_bytes=5) == with_prompts + 5


@pytest.mark.parametrize(
    ("memory", "step_tokens", "vocabulary", "row_state_bytes", "rows"),
    [
        (80 * GIB, 8192, 151_936, 0, 942),
        (141 * GIB, 8192, 151_936, 0, 1660),
        (200 * GIB, 8192, 151_936, 0, 2112),
        (141 * GIB, 512, 151_936, 0, 512),
        (8 * GIB, 8192, 151_936, 0, 94),
        (80 * GIB, 8192, 151_936, 150 << 20, 54),
        (GIB, 8192, 151_936, 150 << 20, 32),
        (GIB, 8, 151_936, 150 << 20, 8),
    ],
)
def test_the_number_of_rows_suits_the_memory(
    memory: int, step_tokens: int, vocabulary: int, row_state_bytes: int, rows: int
) -> None:
    found = auto_rows(memory, step_tokens=step_tokens, vocabulary=vocabulary, row_state_bytes=row_state_bytes)
    assert found == rows


def test_logits_in_parts_do_not_limit_the_rows() -> None:
    rows = partial(auto_rows, 8 * GIB, step_tokens=8192, vocabulary=151_936, in_parts=True)
    assert rows(row_state_bytes=0) == 2112
    assert rows(row_state_bytes=8 << 20) == 102
