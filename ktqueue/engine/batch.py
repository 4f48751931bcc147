"""Rows to tensors: the packed token ids, positions, slots and page tables of one step.

In plain Python as far as it goes: a decode step has a few numbers a row, and a numpy call costs as much as several
rows. Knows nothing of why these rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ktqueue.engine.sequence import Sequence
from ktqueue.operators.kv_cache import KVCache
from ktqueue.operators.step import StepContext


@dataclass(frozen=True, slots=True)
class Batch:
    """Input of one forward.

    input_ids, position_ids: [1, tokens] int64. scored: [scored] int64, places of the tokens whose
    logits are wanted: the last token of each row that is computed to its end, in row order.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    scored: torch.Tensor
    step: StepContext


class BatchBuilder:
    """Batches whose keys and values go to `kv`, on that device."""

    def __init__(self, kv: KVCache, *, device: str) -> None:
        self._kv = kv
        self._device = None if device == "cpu" else device

    def build(self, rows: Mapping[Sequence, int]) -> Batch:
        """The batch that computes the next `rows[sequence]` tokens of each sequence."""
        page_size = self._kv.layout.page_size
        table = np.zeros((len(rows), max(one.page_count for one in rows)), dtype=np.int32)
        input_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, contexts, scored = [0], [], []
        for place, (one, count) in enumerate(rows.items()):
            pages = one.pages[: one.page_count]
            first, context = one.computed, one.computed + count
            table[place, : one.page_count] = pages
            input_ids += one.tokens[first:context].tolist()
            positions += range(first, context)
            slots += [pages[at // page_size] * page_size + at % page_size for at in range(first, context)]
            starts.append(len(input_ids))
            contexts.append(context)
            if context == one.length:
                scored.append(len(input_ids) - 1)
        return Batch(
            input_ids=self._tensor(np.array([input_ids], dtype=np.int64)),
            position_ids=self._tensor(np.array([positions], dtype=np.int64)),
            scored=self._tensor(np.array(scored, dtype=np.int64)),
            step=StepContext(
                query_starts=self._tensor(np.array(starts, dtype=np.int32)),
                context_lengths=self._tensor(np.array(contexts, dtype=np.int32)),
                page_table=self._tensor(table),
                slot_mapping=self._tensor(np.array(slots, dtype=np.int64)),
                kv=self._kv,
            ),
        )

    def _tensor(self, values: NDArray[np.int32] | NDArray[np.int64]) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        return tensor if self._device is None else tensor.to(self._device)
