"""Plans of captured decode steps by their rows: few rows have another planner than all other steps."""

from ktqueue.operators.gpu.attention.base import AttentionPlanner, DecodePlan
from ktqueue.operators.step import AttentionPlan, StepContext

FEW_ROWS = 4
"""Rows of the largest captured step that has the planner of few rows."""


class RowsPlanner:
    """An AttentionPlanner whose decode plans of up to FEW_ROWS rows are those of `few`. `others` makes all others."""

    def __init__(self, few: AttentionPlanner, others: AttentionPlanner) -> None:
        self._few = few
        self._others = others
        self.backend = f"{few.backend} and {others.backend}"

    @property
    def workspace_bytes(self) -> int:
        """See AttentionPlanner."""
        return self._few.workspace_bytes + self._others.workspace_bytes

    def plan(self, host: StepContext) -> AttentionPlan:
        """See AttentionPlanner."""
        return self._others.plan(host)

    def another(self) -> "RowsPlanner":
        """See AttentionPlanner."""
        return RowsPlanner(self._few.another(), self._others.another())

    def decode_plan(self, rows: int, max_pages: int) -> DecodePlan:
        """See AttentionPlanner."""
        return (self._few if rows <= FEW_ROWS else self._others).decode_plan(rows, max_pages)
