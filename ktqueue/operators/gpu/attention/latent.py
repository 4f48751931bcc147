"""Plans of latent attention for our Triton kernel: every token of a step, chunks and decode rows alike, is an item."""

import numpy as np
import torch

from ktqueue.operators.gpu.attention.page_lists import Indices, page_lists, staged
from ktqueue.operators.gpu.attention.triton import DecodeRows, TritonDecodePlan, TritonPlan, TritonPlanner
from ktqueue.operators.gpu.kernels import attention_latent as triton_latent
from ktqueue.operators.gpu.kernels.attention_blocks import Tables
from ktqueue.operators.kv_cache import KVCache
from ktqueue.operators.step import StepContext


class LatentPlan(TritonPlan):
    """Attends for one step. Of its tables, `contexts` are those of each token."""

    def attend(
        self, layer: int, query: torch.Tensor, kv: KVCache, *, scaling: float, sliding_window: int = 0
    ) -> torch.Tensor:
        """See AttentionPlan. query [tokens, heads, head_dim] -> [tokens, heads, value_dim]. Raises ValueError for a
        window."""
        if sliding_window or self._decode is None:
            raise ValueError("latent attention has no sliding windows")
        query = query.contiguous()
        out = query.new_empty(*query.shape[:2], kv.layout.value_dim)
        triton_latent.attend(
            query,
            kv.keys[layer],
            out,
            self._decode.workspace,
            row_of=self._decode.rows,
            page_starts=self._tables.page_starts,
            pages=self._tables.pages,
            contexts=self._tables.contexts,
            splits=self._decode.splits,
            scaling=scaling,
        )
        return out


class LatentDecodePlan(LatentPlan, TritonDecodePlan):
    """The plan of a row bucket."""


class LatentPlanner(TritonPlanner):
    """An AttentionPlanner over a latent cache."""

    def plan(self, host: StepContext) -> LatentPlan:
        """See AttentionPlanner."""
        lists = page_lists(host, self._layout.page_size)
        starts: Indices = host.query_starts.numpy()
        chunks = np.diff(starts)
        row_of = np.repeat(np.arange(len(chunks), dtype=np.int32), chunks)
        tokens = np.arange(len(row_of), dtype=np.int32)
        contexts = (lists.contexts - starts[1:])[row_of] + tokens + 1  # the row's last token sees all of its keys
        arrays = [lists.starts, contexts.astype(np.int32), row_of, lists.pages]
        on_host, offsets = staged(arrays, self._device)
        on_device = on_host.to(self._device, non_blocking=True)
        page_starts, seen, rows, pages = (
            on_device[offset : offset + len(array)] for offset, array in zip(offsets, arrays, strict=True)
        )
        decode = self._decode_rows(len(tokens), rows, int(contexts.max()))
        return LatentPlan(Tables(page_starts=page_starts, contexts=seen, pages=pages), decode, None)

    def decode_plan(self, rows: int, max_pages: int) -> LatentDecodePlan:
        """See AttentionPlanner."""
        page_size = self._layout.page_size
        decode = self._decode_rows(rows, None, max_pages * page_size)
        plan = LatentDecodePlan(rows, max_pages, page_size, self._device, decode)
        self._index_bytes += plan.bytes
        return plan

    def _decode_rows(self, items: int, rows: torch.Tensor | None, max_keys: int) -> DecodeRows:
        heads = self._shape.heads
        splits = triton_latent.split_count(items, heads, max_keys, self._processors)
        size = triton_latent.workspace_bytes(items, heads, self._layout.value_dim, splits)
        return DecodeRows(items, rows, splits, self._workspace.take(size))
