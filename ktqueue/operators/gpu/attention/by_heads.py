"""Plans of a model whose layers differ in their key/value heads: each kind of heads has a planner of its own."""

from collections.abc import Sequence

import torch

from ktqueue.operators.gpu.attention.base import AttentionPlanner, DecodePlan, PromptPlan
from ktqueue.operators.kv_cache import KVCache
from ktqueue.operators.step import AttentionPlan, ScoreOptions, StepContext


class HeadsPlan:
    """The plans of one step, one for each kind of heads. kinds: of each layer, an index into the plans."""

    def __init__(self, plans: Sequence[AttentionPlan], kinds: Sequence[int]) -> None:
        self._plans = plans
        self._kinds = kinds

    def attend(self, layer: int, query: torch.Tensor, kv: KVCache, options: ScoreOptions) -> torch.Tensor:
        """See AttentionPlan."""
        return self.of_layer(layer).attend(layer, query, kv, options)

    def of_layer(self, layer: int) -> AttentionPlan:
        """The plan that attends in a layer."""
        return self._plans[self._kinds[layer]]


class HeadsDecodePlan(HeadsPlan):
    """The plans of captured decode steps of one size, one for each kind of heads."""

    def __init__(self, plans: Sequence[DecodePlan], kinds: Sequence[int]) -> None:
        super().__init__(plans, kinds)
        self._captured = plans

    def update(self, host: StepContext) -> None:
        """See DecodePlan and PromptPlan."""
        for plan in self._captured:
            plan.update(host)


class HeadsPromptPlan(HeadsDecodePlan):
    """The plans of captured steps with prompts of one size, one for each kind of heads."""

    def __init__(self, plans: Sequence[PromptPlan], kinds: Sequence[int]) -> None:
        super().__init__(plans, kinds)
        self._prompts = plans

    def holds(self, host: StepContext) -> bool:
        """See PromptPlan."""
        return all(plan.holds(host) for plan in self._prompts)


class HeadsPlanner:
    """An AttentionPlanner that has another one for each kind of heads. kinds: of each layer, an index into them."""

    def __init__(self, planners: Sequence[AttentionPlanner], kinds: Sequence[int]) -> None:
        self._planners = planners
        self._kinds = kinds
        self.backend = " and ".join(dict.fromkeys(planner.backend for planner in planners))

    @property
    def workspace_bytes(self) -> int:
        """See AttentionPlanner."""
        return sum(planner.workspace_bytes for planner in self._planners)

    def plan(self, host: StepContext) -> HeadsPlan:
        """See AttentionPlanner."""
        return HeadsPlan([planner.plan(host) for planner in self._planners], self._kinds)

    def another(self) -> "HeadsPlanner":
        """See AttentionPlanner."""
        return HeadsPlanner([planner.another() for planner in self._planners], self._kinds)

    def decode_plan(self, rows: int, max_pages: int) -> HeadsDecodePlan:
        """See AttentionPlanner."""
        return HeadsDecodePlan([planner.decode_plan(rows, max_pages) for planner in self._planners], self._kinds)

    def prompt_plan(self, rows: int, tokens: int, max_pages: int) -> HeadsPromptPlan:
        """See AttentionPlanner."""
        plans = [planner.prompt_plan(rows, tokens, max_pages) for planner in self._planners]
        return HeadsPromptPlan(plans, self._kinds)
