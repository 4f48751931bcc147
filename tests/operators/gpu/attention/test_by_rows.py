"""Captured steps of few rows have a planner of their own."""

from typing import Any

import torch

from ktqueue.operators.gpu.attention.by_rows import FEW_ROWS, RowsPlanner
from ktqueue.operators.gpu.attention.torch import TorchDecodePlan, TorchPlanner

from ..attention_steps import MIXED, check_plan, make_cache, make_step, random_query


class OtherPlan(TorchDecodePlan):
    """Of a planner that differs in its type alone."""


class OtherPlanner(TorchPlanner):
    backend = "other"

    def another(self) -> "OtherPlanner":
        return OtherPlanner(16)

    def decode_plan(self, rows: int, max_pages: int) -> Any:
        return OtherPlan(rows, max_pages, 16)


def test_few_rows_have_the_plans_of_their_planner() -> None:
    kv = make_cache(kv_heads=2, head_dim=16, page_size=16, dtype=torch.float32)
    ours = RowsPlanner(OtherPlanner(16), TorchPlanner(16))
    assert ours.backend == "other and torch"
    for planner in (ours, ours.another()):
        for rows in (1, FEW_ROWS, FEW_ROWS + 1):
            plan = planner.decode_plan(rows, 4)
            assert isinstance(plan, OtherPlan) == (rows <= FEW_ROWS)
            step = make_step(kv, [1] * rows, [7 + row for row in range(rows)])
            plan.update(step)
            check_plan(plan, step, random_query(step, 4))
        step = make_step(kv, *MIXED)
        check_plan(planner.plan(step), step, random_query(step, 4))
