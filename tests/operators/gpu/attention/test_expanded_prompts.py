"""Captured steps with prompts of latent attention: any mix of rows equals the reference, by kernels and by twins."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: tests/gpu/test_latent.py", allow_module_level=True)

from ktqueue.operators.gpu.attention import expanded_prompts, latent
from ktqueue.operators.gpu.attention.expanded import attend_expanded
from ktqueue.operators.gpu.attention.expanded_prompts import CapturedExpansion
from ktqueue.operators.gpu.attention.latent import LatentPlanner, expansion_of
from ktqueue.operators.gpu.kernels.operation import kernels_on_any_device
from ktqueue.operators.kv_cache import KVCache
from ktqueue.operators.step import ScoreOptions

from ..attention_steps import BOUNDS, MIXED, absorbed_reference, make_cache, make_shape, make_step

SCORES = ScoreOptions(0.2)
STEPS = (
    MIXED,
    ([40], [70]),
    ([1, 39], [256, 39]),
    ([3], [4]),
    ([1] * 5, [70, 1, 33, 200, 2]),
    ([2, 30, 8], [130, 250, 8]),
)


def cache(dtype: torch.dtype = torch.float32, rotary: int = 16, page_size: int = 16) -> KVCache:
    return make_cache(
        kv_heads=1, head_dim=32 + rotary, page_size=page_size, dtype=dtype, pages=640 // page_size, latent=32
    )


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def captured(plan: Any) -> CapturedExpansion:
    found = expansion_of(plan)
    assert isinstance(found, CapturedExpansion)
    return found


@pytest.mark.parametrize("by_twin", [False, True])
@pytest.mark.parametrize(
    ("heads", "sizes", "page_size", "dtype", "stored"),
    [
        (3, (16, 16, 16), 16, torch.float32, torch.float32),
        (2, (24, 8, 40), 8, torch.float32, torch.float32),
        (2, (32, 16, 32), 16, torch.bfloat16, torch.bfloat16),
        (2, (32, 16, 32), 64, torch.bfloat16, torch.float8_e4m3fn),
    ],
)
def test_a_prompt_plan_follows_its_updates(
    heads: int, sizes: tuple[int, int, int], page_size: int, dtype: torch.dtype, stored: torch.dtype, by_twin: bool
) -> None:
    """sizes: columns without position, rotary ones, and of values. Steps are smaller than the plan, or as large. Tokens
    behind those of a step get zeros. The buffers stay."""
    plain, rotary, value = sizes
    kv = cache(stored, rotary, page_size)
    plan = LatentPlanner(make_shape(kv, heads, dtype)).prompt_plan(5, 40, 256 // page_size)
    places = [table.data_ptr() for table in (plan.tables.pages, plan.tables.contexts)]
    query, up = random(40, heads, plain + rotary, dtype=dtype), random(heads, plain + value, 32, dtype=dtype) * 0.2

    def values() -> torch.Tensor:
        if by_twin:
            return captured(plan).values(1, query, up, kv, SCORES)
        with kernels_on_any_device():
            return captured(plan).values(1, query, up, kv, SCORES)

    assert not values().any()
    is_first = page_size == 16 and dtype == torch.float32
    for chunks, contexts in STEPS if by_twin or is_first else STEPS[::2]:  # which mix follows is alike in all formats
        step, live = make_step(kv, chunks, contexts), sum(chunks)
        query[-1] = 0.5 if live == len(query) else torch.nan
        assert plan.holds(step)
        plan.update(step)
        got = values()
        bound = BOUNDS[dtype]
        assert got.shape == (40, heads * value) and got.dtype == dtype
        torch.testing.assert_close(
            got[:live].float(),
            absorbed_reference(step, query[:live], up, SCORES.scaling).flatten(1),
            rtol=bound,
            atol=bound,
        )
        assert not got[live:].any()
    assert places == [table.data_ptr() for table in (plan.tables.pages, plan.tables.contexts)]


def test_steps_with_more_keys_than_are_expanded_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one token have no expanded keys. Other limits are those of all plans."""
    monkeypatch.setattr(latent, "EXPANDED_KEYS", 100)
    kv = cache()
    plan = LatentPlanner(make_shape(kv, 2)).prompt_plan(3, 40, 16)
    for chunks, contexts in (([2, 3, 1], [50, 50, 250]), ([1, 1], [200, 200]), ([40], [100])):
        step = make_step(kv, chunks, contexts)
        assert plan.holds(step)
        plan.update(step)
    for chunks, contexts, problem in (
        ([2, 3, 1], [50, 51, 3], "100 keys of rows with several tokens"),
        ([1] * 4, [1] * 4, "3 rows"),
        ([41], [41], "40 tokens"),
        ([1], [257], "16 pages of 16 keys"),
    ):
        step = make_step(kv, chunks, contexts)
        assert not plan.holds(step)
        with pytest.raises(ValueError, match=problem):
            plan.update(step)
    with pytest.raises(ValueError, match="expanded latents"):
        plan.attend(0, random(40, 2, 48, dtype=torch.float32), kv, SCORES)


def test_heads_take_turns_if_there_are_many_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = cache()
    plan = LatentPlanner(make_shape(kv, 5)).prompt_plan(3, 40, 16)
    step = make_step(kv, *STEPS[-1])
    plan.update(step)
    query, up = random(40, 5, 32, dtype=torch.float32), random(5, 32, 32, dtype=torch.float32)
    turns: list[tuple[int, int]] = []

    def noted(query: Any, states: torch.Tensor, *rest: Any, first_head: int, **options: Any) -> None:
        turns.append((first_head, states.shape[1]))
        attend_expanded(query, states, *rest, first_head=first_head, **options)

    monkeypatch.setattr(expanded_prompts, "attend_expanded", noted)
    together = captured(plan).values(0, query, up, kv, SCORES)
    monkeypatch.setattr(expanded_prompts, "EXPANDED_BYTES", 2 * 3 * 256 * 32 * 4)
    torch.testing.assert_close(captured(plan).values(0, query, up, kv, SCORES), together)
    assert turns == [(0, 5), (0, 2), (2, 2), (4, 1)]
