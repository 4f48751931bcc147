"""Captured steps of few rows, and steps that read prompts, have a planner of their own."""

from typing import Any

import pytest
import torch

from ktqueue.operators.gpu.attention.by_steps import FEW_ROWS, PROMPT_KEYS, StepsPlanner, reads_prompts
from ktqueue.operators.gpu.attention.torch import TorchDecodePlan, TorchPlan, TorchPlanner, TorchPromptPlan
from ktqueue.operators.step import StepContext

from ..attention_steps import MIXED, check_plan, make_cache, make_step, random_query


class OtherPlan(TorchDecodePlan):
    """Of a planner that differs in its type alone."""


class OtherPrompts(TorchPromptPlan):
    """The same of captured steps with prompts."""


class OtherStep(TorchPlan):
    """The same of an eager step."""


class OtherPlanner(TorchPlanner):
    backend = "other"

    def another(self) -> "OtherPlanner":
        return OtherPlanner(16)

    def plan(self, host: StepContext) -> Any:
        return OtherStep(host)

    def decode_plan(self, rows: int, max_pages: int) -> Any:
        return OtherPlan(rows, max_pages, 16)

    def prompt_plan(self, rows: int, tokens: int, max_pages: int) -> Any:
        return OtherPrompts(rows, tokens, max_pages, 16)


@pytest.mark.parametrize("one_launch", [True, False])
@pytest.mark.parametrize("prompts", [True, False])
def test_few_rows_and_prompts_have_the_plans_of_our_planner(prompts: bool, one_launch: bool) -> None:
    kv = make_cache(kv_heads=2, head_dim=16, page_size=16, dtype=torch.float32)
    ours = StepsPlanner(OtherPlanner(16), TorchPlanner(16), prompts=prompts, one_launch=one_launch)
    assert ours.backend == "other and torch"
    for planner in (ours, ours.another()):
        for rows in (1, FEW_ROWS, FEW_ROWS + 1):
            plan = planner.decode_plan(rows, 4)
            assert isinstance(plan, OtherPlan) == (one_launch or rows <= FEW_ROWS)
            step = make_step(kv, [1] * rows, [7 + row for row in range(rows)])
            plan.update(step)
            check_plan(plan, step, random_query(step, 4))
        for chunks, contexts in (MIXED, ([1, 50], [20, 50]), ([1, 1], [20, 30])):
            step = make_step(kv, chunks, contexts)
            eager = planner.plan(step)
            assert isinstance(eager, OtherStep) == (prompts and reads_prompts(step))
            check_plan(eager, step, random_query(step, 4))
            captured = planner.prompt_plan(16, 60, 8)
            assert isinstance(captured, OtherPrompts)
            captured.update(step)
            check_plan(captured, step, random_query(step, 4))


def test_a_step_reads_prompts_if_most_of_its_attention_is_theirs() -> None:
    kv = make_cache(kv_heads=2, head_dim=16, page_size=16, dtype=torch.float32)
    for chunks, contexts, expected in (
        ([1, 1], [40, 50], False),
        ([40], [40], True),
        ([1, 16], [8, 16], True),
        ([1, 16], [9, 16], False),
        ([2, 2, 1], [PROMPT_KEYS, PROMPT_KEYS, 5], False),
        ([2, 2, 1], [PROMPT_KEYS, PROMPT_KEYS, 4], True),
    ):
        assert reads_prompts(make_step(kv, chunks, contexts)) == expected, (chunks, contexts)
