"""StepContext: everything that an operator may read in one step. It travels as the keyword `step=`."""

from dataclasses import dataclass
from typing import Protocol

import torch

from ktqueue.operators.kv_cache import KVCache


class AttentionPlan(Protocol):
    """How the tokens of one step attend on a GPU: made once a step, used by every layer."""

    def attend(
        self, layer: int, query: torch.Tensor, kv: KVCache, *, scaling: float, sliding_window: int = 0
    ) -> torch.Tensor:
        """query [tokens, heads, head_dim] -> [tokens, heads, value_dim]. The step's keys and values are in the cache
        already.

        `sliding_window`: keys that a token sees at most, itself included; 0 is no limit.
        """


@dataclass(frozen=True, slots=True)
class StepContext:
    """One packed ragged batch: `tokens` tokens of `rows` rows, row after row, any mix of prefill chunks and decode.

    query_starts: [rows + 1] int32, offsets of each row's tokens in the packed batch.
    context_lengths: [rows] int32, keys that the row's last token sees, those of this step included.
    page_table: [rows, max_pages] int32, the row's pages in order; unused entries are 0.
    slot_mapping: [tokens] int64, page * page_size + offset where each token's key and value go.
    kv: the paged cache.
    attention: how the step attends on a GPU; None: by the arrays above.
    live_tokens: [1] int32, tokens from the first that are real, the others pad a captured graph; None: all are real.
    """

    query_starts: torch.Tensor
    context_lengths: torch.Tensor
    page_table: torch.Tensor
    slot_mapping: torch.Tensor
    kv: KVCache
    attention: AttentionPlan | None = None
    live_tokens: torch.Tensor | None = None
