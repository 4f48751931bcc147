"""Rows to tensors: the packed token ids, positions, slots and page tables of one step, on the host.

In plain Python as far as it goes: a decode step has a few numbers a row, and a numpy call costs as much as several
rows. Knows nothing of why these rows, nor of the device that they go to.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ktqueue.engine.sequence import Sequence
from ktqueue.operators.kv_cache import KVCache
from ktqueue.operators.step import StepContext


@dataclass(frozen=True, slots=True)
class Batch:
    """Input of one forward; all tensors are on the CPU.

    input_ids, position_ids: [1, tokens] int64. scored: [scored] int64, places of the tokens whose
    logits are wanted: the last token of each row that is computed to its end, in row order.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    scored: torch.Tensor
    step: StepContext

    @property
    def decodes(self) -> bool:
        """Whether each row computes one token and wants its logits."""
        return self.step.context_lengths.shape[0] == self.input_ids.shape[1] == self.scored.shape[0]


class BatchBuilder:
    """Batches whose keys and values go to `kv`."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv

    def build(self, rows: Mapping[Sequence, int]) -> Batch:
        """The batch that computes the next `rows[sequence]` tokens of each sequence. Where a token is not known yet, as
        is that of a row to which the next one is promised, `tell` is to be called."""
        page_size = self._kv.layout.page_size
        table = np.zeros((len(rows), max(one.page_count for one in rows)), dtype=np.int32)
        input_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, contexts, scored = [0], [], []
        for row, (one, count) in zip(table, rows.items(), strict=True):
            row[: one.page_count] = one.pages[: one.page_count]
            first, context = one.computed, one.computed + count
            if count == 1:
                input_ids.append(one.tokens[first])
                positions.append(first)
                slots.append(int(row[first // page_size]) * page_size + first % page_size)
            else:
                at = np.arange(first, context)
                input_ids += one.tokens[first:context].tolist()
                positions += at.tolist()
                slots += (row[at // page_size] * page_size + at % page_size).tolist()
            starts.append(len(input_ids))
            contexts.append(context)
            if context >= one.length:
                scored.append(len(input_ids) - 1)
        return Batch(
            input_ids=torch.from_numpy(np.array([input_ids], dtype=np.int64)),
            position_ids=torch.from_numpy(np.array([positions], dtype=np.int64)),
            scored=torch.from_numpy(np.array(scored, dtype=np.int64)),
            step=StepContext(
                query_starts=torch.from_numpy(np.array(starts, dtype=np.int32)),
                context_lengths=torch.from_numpy(np.array(contexts, dtype=np.int32)),
                page_table=torch.from_numpy(table),
                slot_mapping=torch.from_numpy(np.array(slots, dtype=np.int64)),
                kv=self._kv,
            ),
        )

    @staticmethod
    def tell(batch: Batch, rows: Mapping[Sequence, int]) -> None:
        """Write the token of each row into `batch`, which was built for these rows of one token each."""
        batch.input_ids.numpy()[0] = [one.tokens[one.computed] for one in rows]
