"""StepContext: everything that an operator may read in one step. It travels as the keyword `step=`."""

from dataclasses import dataclass

import torch

from ktqueue.operators.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class StepContext:
    """One packed ragged batch: `tokens` tokens of `rows` rows, row after row, any mix of prefill chunks and decode.

    query_starts: [rows + 1] int32, offsets of each row's tokens in the packed batch.
    context_lengths: [rows] int32, keys that the row's last token sees, those of this step included.
    page_table: [rows, max_pages] int32, the row's pages in order; unused entries are 0.
    slot_mapping: [tokens] int64, page * page_size + offset where each token's key and value go.
    kv: the paged cache.
    """

    query_starts: torch.Tensor
    context_lengths: torch.Tensor
    page_table: torch.Tensor
    slot_mapping: torch.Tensor
    kv: KVCache
