"""Plans by the kind of a step: our own kernels where they are faster than those of another planner."""

import numpy as np

from ktqueue.operators.gpu.attention.base import AttentionPlanner, DecodePlan, PromptPlan
from ktqueue.operators.gpu.attention.page_lists import Indices
from ktqueue.operators.step import AttentionPlan, StepContext

FEW_ROWS = 16
"""Rows of the largest captured step that has our kernels, where attention is not one launch."""
PROMPT_KEYS = 32
"""A decode row reads a key as fast as a prompt multiplies it with 10 to 50 tokens, on an H200."""


class StepsPlanner:
    """An AttentionPlanner. `ours` makes the decode plans, of up to FEW_ROWS rows if attention is not `one_launch`, and
    all prompt plans. With `prompts` it also makes the plans of eager steps that mostly read prompts. `others` makes all
    others."""

    def __init__(self, ours: AttentionPlanner, others: AttentionPlanner, *, prompts: bool, one_launch: bool) -> None:
        self._ours = ours
        self._others = others
        self._prompts = prompts
        self._one_launch = one_launch
        self.backend = f"{ours.backend} and {others.backend}"

    @property
    def workspace_bytes(self) -> int:
        """See AttentionPlanner."""
        return self._ours.workspace_bytes + self._others.workspace_bytes

    def plan(self, host: StepContext) -> AttentionPlan:
        """See AttentionPlanner."""
        return (self._ours if self._prompts and reads_prompts(host) else self._others).plan(host)

    def another(self) -> "StepsPlanner":
        """See AttentionPlanner."""
        ours, others = self._ours.another(), self._others.another()
        return StepsPlanner(ours, others, prompts=self._prompts, one_launch=self._one_launch)

    def decode_plan(self, rows: int, max_pages: int) -> DecodePlan:
        """See AttentionPlanner."""
        return (self._ours if self._one_launch or rows <= FEW_ROWS else self._others).decode_plan(rows, max_pages)

    def prompt_plan(self, rows: int, tokens: int, max_pages: int) -> PromptPlan:
        """See AttentionPlanner."""
        return self._ours.prompt_plan(rows, tokens, max_pages)


def reads_prompts(host: StepContext) -> bool:
    """Whether the attention of a step of CPU tensors is mostly that of rows with several tokens."""
    starts: Indices = host.query_starts.numpy()
    keys, tokens = host.context_lengths.numpy().astype(np.int64), np.diff(starts)
    several = tokens > 1
    return bool(several.any() and (keys * tokens)[several].sum() >= PROMPT_KEYS * keys[~several].sum())
