"""The protocol of planners on the CPU: what a plan attends to, what a decode plan accepts, what is refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ktqueue.operators.gpu.attention.backends import make_planner
from ktqueue.operators.gpu.attention.base import AttentionPlanner
from ktqueue.operators.gpu.attention.by_heads import HeadsPlan, HeadsPromptPlan
from ktqueue.operators.gpu.attention.page_lists import page_lists, staged
from ktqueue.operators.gpu.attention.torch import TorchPlanner
from ktqueue.operators.kv_cache import KVCache, KVHeads
from ktqueue.operators.step import AttentionPlan, ScoreOptions

from ..attention_steps import assert_attended, attended, make_cache, make_step, random_cache, random_query


def small_cache(dtype: torch.dtype = torch.float32) -> KVCache:
    """Pages of four tokens."""
    return make_cache(kv_heads=2, head_dim=16, page_size=4, dtype=dtype)


def planner(kv: KVCache, backend: str = "auto") -> AttentionPlanner:
    return make_planner(kv.layout, heads=4, scaling=0.25, windows={0, 6}, device="cpu", backend=backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("window", [0, 6])
def test_a_plan_attends_as_the_reference(window: int, dtype: torch.dtype) -> None:
    kv = small_cache(dtype)
    step = make_step(kv, [5, 1, 3], [9, 17, 3])
    query = random_query(step, 4, torch.float32 if dtype == torch.float32 else torch.bfloat16)
    got = planner(kv).plan(step).attend(1, query, kv, ScoreOptions(0.25, window))
    assert_attended(got, step, query, layer=1, scaling=0.25, window=window)


def test_a_decode_plan_follows_its_updates() -> None:
    kv = small_cache()
    plan = planner(kv).decode_plan(3, 6)
    for contexts in ([9, 1, 17], [10, 2, 18]):
        step = make_step(kv, [1, 1, 1], contexts)
        query = random_query(step, 4, torch.float32)
        plan.update(step)
        expected = attended(step, query, scaling=0.25)
        step.context_lengths.fill_(1)  # as the host overwrites them for the next step
        step.page_table.zero_()
        torch.testing.assert_close(plan.attend(0, query, kv, ScoreOptions(0.25)), expected)


def test_a_prompt_plan_follows_its_updates_and_refuses_larger_steps() -> None:
    kv = small_cache()
    plan = planner(kv).prompt_plan(3, 12, 6)
    query = random_query(make_step(kv, [12], [12]), 4, torch.float32)
    assert not plan.attend(0, query, kv, ScoreOptions(0.25)).any()
    for chunks, contexts in (([5, 1], [9, 17]), ([12], [13]), ([1, 4, 7], [2, 24, 7])):
        step, live = make_step(kv, chunks, contexts), sum(chunks)
        assert plan.holds(step)
        plan.update(step)
        expected = attended(step, query[:live], scaling=0.25)
        step.context_lengths.fill_(1)  # as the host overwrites them for the next step
        step.page_table.zero_()
        got = plan.attend(0, query, kv, ScoreOptions(0.25))
        torch.testing.assert_close(got[:live], expected)
        assert not got[live:].any()
    for chunks, contexts in (([1] * 4, [1] * 4), ([13], [13]), ([1], [25])):
        step = make_step(kv, chunks, contexts)
        assert not plan.holds(step)
        with pytest.raises(ValueError, match="3 rows, 12 tokens and 6 pages of 4 keys at most"):
            plan.update(step)


def test_layers_with_different_heads_have_plans_of_their_own() -> None:
    by_layer = KVHeads(2, 16), KVHeads(1, 32)
    kv = random_cache(replace(small_cache().layout, by_layer=by_layer), 24)
    planner = make_planner(kv.layout, heads=4, scaling=0.25, windows=[0, 6], device="cpu")
    plan, prompts = planner.decode_plan(2, 6), planner.prompt_plan(2, 2, 6)
    step = make_step(kv, [1, 1], [9, 17])
    for captured in (plan, prompts):
        captured.update(step)
    smaller = HeadsPromptPlan([TorchPlanner(4).prompt_plan(2, 2, pages) for pages in (6, 4)], (0, 1))
    assert prompts.holds(step) and not smaller.holds(step)
    for layer, (heads, window) in enumerate(zip(by_layer, (0, 6), strict=True)):
        query = torch.randn(2, 4, heads.head_dim)
        for attend in (plan.attend, prompts.attend, planner.plan(step).attend):
            got = attend(layer, query, kv, ScoreOptions(0.25, window))
            assert_attended(got, step, query, layer=layer, scaling=0.25, window=window)


class FixedPlan:
    """Attends with a number."""

    def __init__(self, number: float) -> None:
        self._number = number

    def attend(self, layer: int, query: torch.Tensor, kv: KVCache, options: ScoreOptions) -> torch.Tensor:
        return torch.full_like(query, self._number)


def test_each_layer_uses_the_plan_of_its_heads() -> None:
    plan = HeadsPlan([FixedPlan(1.0), FixedPlan(2.0)], (0, 1, 0))
    attended = [plan.attend(layer, torch.zeros(1), small_cache(), ScoreOptions(1.0)).item() for layer in range(3)]
    assert attended == [1.0, 2.0, 1.0]


def test_a_decode_plan_refuses_what_does_not_fit() -> None:
    kv = small_cache()
    plan = planner(kv).decode_plan(2, 3)
    with pytest.raises(ValueError, match="for 2 rows of one token, not 3 rows of 3 tokens"):
        plan.update(make_step(kv, [1, 1, 1], [4, 4, 4]))
    with pytest.raises(ValueError, match="not 2 rows of 3 tokens"):
        plan.update(make_step(kv, [2, 1], [4, 4]))
    with pytest.raises(ValueError, match="rows of 3 pages of 4 keys, not 13 keys"):
        plan.update(make_step(kv, [1, 1], [13, 4]))


def test_backends_that_are_not_available_are_refused_by_name() -> None:
    kv = small_cache()
    with pytest.raises(ValueError, match="attention backend is 'fa7'; known are auto, flashinfer, triton, torch"):
        planner(kv, "fa7")
    for name in ("flashinfer", "triton"):
        with pytest.raises(ValueError, match=f"{name} needs a GPU, the device is cpu"):
            planner(kv, name)
    with pytest.raises(ValueError, match="5 query heads do not share 2"):
        make_planner(kv.layout, heads=5, scaling=1.0, windows=frozenset({0}), device="cpu")


def test_the_lists_have_the_pages_of_each_row_in_order() -> None:
    kv = small_cache()
    step = make_step(kv, [1, 2, 1], [4, 9, 1])
    lists = page_lists(step, 4)
    assert lists.starts.tolist() == [0, 1, 4, 5]
    assert lists.last.tolist() == [4, 1, 1]
    assert lists.pages.tolist() == [*step.page_table[0, :1], *step.page_table[1, :3], *step.page_table[2, :1]]
    host, offsets = staged([lists.starts, lists.pages], torch.device("cpu"))
    assert offsets == [0, 4] and host.dtype == torch.int32
    assert host[:9].tolist() == [*lists.starts, *lists.pages]
    assert staged([lists.last, lists.pages], torch.device("cpu"))[1] == [0, 4]


def test_lists_refuse_rows_without_keys_or_pages() -> None:
    kv = small_cache()
    step = make_step(kv, [1, 1], [4, 9])
    with pytest.raises(ValueError, match="at least one key"):
        page_lists(replace(step, context_lengths=torch.tensor([4, 0], dtype=torch.int32)), 4)
    with pytest.raises(ValueError, match="4 pages per row, a row of the step needs 5"):
        page_lists(replace(step, context_lengths=torch.tensor([4, 17], dtype=torch.int32)), 4)


def test_transformers_attention_uses_the_plan_of_the_step(tiny_model: Callable[..., Any]) -> None:
    """The whole model with a plan, in two chunks, equals eager attention; without a plan the same cache does too."""
    eager, paged = tiny_model(), tiny_model(paged=True)
    ids = torch.randint(0, 96, (1, 11), generator=torch.Generator().manual_seed(1))
    kv = small_cache()
    calls: list[int] = []

    class Recorded:
        """A plan that notes the layers that attend by it."""

        def __init__(self, plan: AttentionPlan) -> None:
            self.plan = plan

        def attend(self, layer: int, *arguments: Any, **named: Any) -> torch.Tensor:
            calls.append(layer)
            return self.plan.attend(layer, *arguments, **named)

    with torch.no_grad():
        expected = eager(ids).logits[0]
        got = []
        for begin, end in ((0, 7), (7, 11)):
            step = make_step(kv, [end - begin], [end])
            slots = [int(step.page_table[0, token // 4]) * 4 + token % 4 for token in range(begin, end)]
            plan = Recorded(planner(kv).plan(step))
            step = replace(step, slot_mapping=torch.tensor(slots), attention=plan)
            positions = torch.arange(begin, end)[None]
            got.append(paged(input_ids=ids[:, begin:end], position_ids=positions, use_cache=False, step=step).logits[0])
    assert calls == [0, 1, 0, 1]
    torch.testing.assert_close(torch.cat(got), expected, rtol=1e-4, atol=1e-5)
