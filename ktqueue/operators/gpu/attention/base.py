"""What all attention backends share: the protocols of plans and planners, the shape of the model, a shared workspace.

A planner is made once per model. Each eager step gets its own plan (`plan`). Captured steps of one size share a plan,
which is updated before their graph is replayed (`update`): decode steps one for each number of rows (`decode_plan`),
steps with prompts one for each number of tokens (`prompt_plan`). Plans are made from arrays on the host: nothing waits
for the device. Knows no model and no engine.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from ktqueue.operators.kv_cache import KVLayout
from ktqueue.operators.step import AttentionPlan, StepContext


class DecodePlan(AttentionPlan, Protocol):
    """The plan of captured decode steps with a fixed number of rows: `attend` is captured, its buffers never move."""

    def update(self, host: StepContext) -> None:
        """Make the next replay attend for `host`, a decode step (one token per row) of CPU tensors.

        It must have exactly as many rows as the bucket; padding rows have a length of 1 and their own page. Call it on
        the stream that replays. Raises ValueError for another number of rows or more pages than planned for.
        """


class PromptPlan(AttentionPlan, Protocol):
    """The plan of captured steps with prompts: `attend` is captured, its buffers never move."""

    def holds(self, host: StepContext) -> bool:
        """Whether the plan is large enough for `host`, any step of CPU tensors."""

    def update(self, host: StepContext) -> None:
        """Make the next replay attend for `host`, any step of CPU tensors that the plan holds.

        Tokens behind those of the step get zeros. Call it on the stream that replays. Raises ValueError for more rows,
        tokens or pages than planned for.
        """


class AttentionPlanner(Protocol):
    """Makes the plans of one model on one device."""

    backend: str
    """flashinfer, triton or torch."""

    @property
    def workspace_bytes(self) -> int:
        """Device memory of all plans in bytes: partial results, and indices of the decode plans."""

    def plan(self, host: StepContext) -> AttentionPlan:
        """Plan a step of CPU tensors with any mix of chunks and decode rows.

        The plan is valid until the next `plan` or `update` of this planner.
        """

    def another(self) -> "AttentionPlanner":
        """A planner of the same kind with memory of its own, whose plans may run at the same time as those of this."""

    def decode_plan(self, rows: int, max_pages: int) -> DecodePlan:
        """Make the plan of all captured decode steps of `rows` rows with at most `max_pages` pages each.

        Before the first `update` it attends to rows of length 1 on page 0.
        """

    def prompt_plan(self, rows: int, tokens: int, max_pages: int) -> PromptPlan:
        """Make the plan of captured steps of at most `rows` rows, with at most `tokens` tokens in all and `max_pages`
        pages each.

        Before the first `update` all results are zeros.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What all attention layers of a model have in common. `dtype` is that of the queries, `scaling` that of scores."""

    layout: KVLayout
    heads: int
    scaling: float
    windows: tuple[int, ...]
    """Sliding windows of the layers: the most keys that a token sees. 0: all keys."""
    device: str
    dtype: torch.dtype
    sinks: bool = False
    """Whether the softmax of each head has a further score without a value."""
    cap: float = 0.0
    """The soft limit of scores: see ScoreOptions."""
    chunk: int = 0
    """Of the layers that attend within chunks: see ScoreOptions. 0: none does."""


class SharedWorkspace:
    """One device buffer for all plans of a planner, since only one of them runs at a time.

    A larger request makes a new buffer, and earlier plans keep the old one: the largest should come first. Users must
    be on one stream, or order their work themselves.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self.bytes = 0
        """Bytes of all buffers that were made."""

    def take(self, size: int) -> torch.Tensor:
        """Return a buffer of at least `size` bytes [bytes] uint8, zero when new."""
        if self._buffer.numel() < size:
            with torch.inference_mode(False):  # so that it can be written in any mode
                self._buffer = torch.zeros(size, dtype=torch.uint8, device=self._buffer.device)
            self.bytes += self._buffer.nbytes
        return self._buffer
