"""Rows to tensors: the packed token ids, positions, slots and page tables of one step.

Everything is built in numpy buffers that live as long as the engine. Knows nothing of why these rows.
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
    """Input of one forward. The tensors are views of the builder's buffers: valid until the next build.

    input_ids, position_ids: [1, tokens] int64. scored: [scored] int64, places of the tokens whose
    logits are wanted: the last token of each row that is computed to its end, in row order.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    scored: torch.Tensor
    step: StepContext


class BatchBuilder:
    """Buffers for at most `max_rows` rows and `max_tokens` tokens, rows of at most `max_pages` pages."""

    def __init__(self, kv: KVCache, *, max_rows: int, max_tokens: int, max_pages: int, device: str) -> None:
        self._kv = kv
        self._device = None if device == "cpu" else device
        self._page_size = kv.layout.page_size
        self._input_ids = np.zeros(max_tokens, dtype=np.int64)
        self._positions = np.zeros(max_tokens, dtype=np.int64)
        self._slots = np.zeros(max_tokens, dtype=np.int64)
        self._count = np.arange(max_tokens, dtype=np.int64)
        self._starts = np.zeros(max_rows + 1, dtype=np.int32)
        self._contexts = np.zeros(max_rows, dtype=np.int32)
        self._table = np.zeros(max_rows * max_pages, dtype=np.int32)

    def build(self, rows: Mapping[Sequence, int]) -> Batch:
        """The batch that computes the next `rows[sequence]` tokens of each sequence."""
        page_size = self._page_size
        width = max(one.page_count for one in rows)
        table = self._table[: len(rows) * width].reshape(len(rows), width)
        table.fill(0)
        starts = self._starts[: len(rows) + 1]
        contexts = self._contexts[: len(rows)]
        scored = []
        end = 0
        for place, (one, count) in enumerate(rows.items()):
            start, end = end, end + count
            context = one.computed + count
            self._input_ids[start:end] = one.tokens[one.computed : context]
            starts[place + 1] = end
            contexts[place] = context
            table[place, : one.page_count] = one.pages[: one.page_count]
            if context == one.length:
                scored.append(end - 1)
        counts = np.diff(starts)
        row = np.repeat(np.arange(len(rows)), counts)
        positions = self._positions[:end]
        np.add(self._count[:end], (contexts - starts[1:])[row], out=positions)
        page, offset = np.divmod(positions, page_size)
        np.add(table[row, page] * np.int64(page_size), offset, out=self._slots[:end])
        return Batch(
            input_ids=self._tensor(self._input_ids[:end])[None],
            position_ids=self._tensor(positions)[None],
            scored=self._tensor(np.array(scored, dtype=np.int64)),
            step=StepContext(
                query_starts=self._tensor(starts),
                context_lengths=self._tensor(contexts),
                page_table=self._tensor(table),
                slot_mapping=self._tensor(self._slots[:end]),
                kv=self._kv,
            ),
        )

    def _tensor(self, values: NDArray[np.int32] | NDArray[np.int64]) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        return tensor if self._device is None else tensor.to(self._device)
