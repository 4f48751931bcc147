"""Plans for our Triton kernels: index arrays on the device and, for chunks, a list of tiles. The host decides grids."""

from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from ktqueue.operators.gpu.attention import by_clusters, by_warpgroups
from ktqueue.operators.gpu.attention.base import AttentionShape, SharedWorkspace
from ktqueue.operators.gpu.attention.page_lists import (
    Indices,
    PageLists,
    check_decode_step,
    check_prompt_step,
    one_page_each,
    page_lists,
    prompt_step_fits,
    sent,
)
from ktqueue.operators.gpu.attention.triton_blocks import DecodeRows, Tables
from ktqueue.operators.gpu.attention.triton_decode import decode, partial_bytes, split_count
from ktqueue.operators.gpu.attention.triton_prefill import prefill, tile_tokens
from ktqueue.operators.gpu.device import is_gpu
from ktqueue.operators.gpu.staging import FixedStaging
from ktqueue.operators.kv_cache import KVCache
from ktqueue.operators.step import ScoreOptions, StepContext


class TritonPlan:
    """Attends for one step by index arrays on the device. `tiles`: those of rows with several tokens. counter: of
    by_warpgroups.attend, which then has the tiles."""

    _pads = False  # whether a step may have tokens of no row

    def __init__(
        self,
        tables: Tables,
        decode: DecodeRows | None,
        tiles: torch.Tensor | None,
        counter: torch.Tensor | None = None,
    ) -> None:
        self.tables = tables
        self.decode_rows = decode
        self._tiles = tiles
        self._counter = counter

    def attend(self, layer: int, query: torch.Tensor, kv: KVCache, options: ScoreOptions) -> torch.Tensor:
        """See AttentionPlan. query [tokens, heads, head_dim]."""
        query = query.contiguous()
        # Padding tokens must not get what memory held before. Warpgroups clear theirs.
        pads = self._pads and self._counter is None
        out = torch.zeros_like(query) if pads else torch.empty_like(query)
        keys, values, scale = kv.keys[layer], kv.values[layer], kv.layout.scale(layer)
        if self.decode_rows is not None:
            decode(query, keys, values, self.tables, self.decode_rows, out, options, scale)
        if self._tiles is not None and self._counter is not None:
            by_warpgroups.attend(query, keys, values, self.tables, self._tiles, out, options, self._counter)
        elif self._tiles is not None:
            prefill(query, keys, values, self.tables, self._tiles, out, options, scale)
        return out


class TritonDecodePlan(TritonPlan):
    """The plan of a row bucket. Its buffers stay in place, their contents change."""

    def __init__(
        self, rows: int, max_pages: int, page_size: int, device: torch.device, decode: DecodeRows | None
    ) -> None:
        self._limits = rows, max_pages, page_size
        sizes = {"page_starts": rows + 1, "contexts": rows, "pages": rows * max_pages}
        self._staging = FixedStaging({name: ((size,), np.int32) for name, size in sizes.items()}, device)
        self._write(one_page_each(rows))
        super().__init__(Tables(**self._staging.device), decode, None)

    @property
    def bytes(self) -> int:
        """Device memory of the index arrays."""
        return self._staging.bytes

    def update(self, host: StepContext) -> None:
        """See DecodePlan. Takes one copy to the device."""
        rows, max_pages, page_size = self._limits
        check_decode_step(host, rows, max_pages, page_size)
        self._write(page_lists(host, page_size))

    def _write(self, lists: PageLists) -> None:
        self._staging.write({"page_starts": lists.starts, "contexts": lists.contexts, "pages": lists.pages})


class ClusterDecodePlan(TritonDecodePlan):
    """The plan of a row bucket whose attention is one launch: see by_clusters.py."""

    def __init__(
        self, rows: int, max_pages: int, page_size: int, device: torch.device, memory: by_clusters.ClusterMemory
    ) -> None:
        super().__init__(rows, max_pages, page_size, device, None)
        self._memory = memory

    @property
    def bytes(self) -> int:
        """Device memory of the index arrays and counters."""
        return super().bytes + self._memory.counters.nbytes

    def attend(self, layer: int, query: torch.Tensor, kv: KVCache, options: ScoreOptions) -> torch.Tensor:
        """See AttentionPlan. query [rows, heads, head_dim]."""
        return self.attend_to(layer, query.contiguous(), query.shape[1], kv, options)

    def attend_to(
        self, layer: int, x: torch.Tensor | by_clusters.Projection, heads: int, kv: KVCache, options: ScoreOptions
    ) -> torch.Tensor:
        """As `attend`, for queries, or for what becomes queries and the step's keys and values."""
        return by_clusters.attend(x, heads, kv.keys[layer], kv.values[layer], self.tables, self._memory, options)


class TritonPromptPlan(TritonPlan):
    """The plan of captured steps with prompts. Its buffers stay in place, their contents change.

    Every row has tiles, also one with a single token. Tiles without tokens are of a further row, without tokens and
    keys.
    """

    _pads = True
    _least = 1  # tokens of a row that has tiles

    def __init__(self, planner: "TritonPlanner", rows: int, tokens: int, max_pages: int, page_size: int) -> None:
        self._planner = planner
        self._limits = rows, tokens, max_pages, page_size
        self._most_tiles = min(tokens, tokens // planner.tile_tokens + rows)
        none = np.zeros(0, dtype=np.int32)
        arrays = self._arrays(none, PageLists(none, none, none, none))
        shapes = {name: (array.shape, array.dtype) for name, array in arrays.items()}
        self._staging = FixedStaging({**shapes, "pages": ((rows * max_pages,), np.int32)}, planner.device)
        self._staging.write(arrays)
        at = self._staging.device
        tables = Tables(**{name: at[name] for name in ("page_starts", "contexts", "pages", "query_starts")})
        super().__init__(tables, None, at["tiles"], planner.counter)

    @property
    def bytes(self) -> int:
        """Device memory of the index arrays."""
        return self._staging.bytes

    def holds(self, host: StepContext) -> bool:
        """See PromptPlan."""
        return prompt_step_fits(host, *self._limits)

    def update(self, host: StepContext) -> None:
        """See PromptPlan. Takes one copy to the device."""
        check_prompt_step(host, *self._limits)
        lists = page_lists(host, self._limits[3])
        self._staging.write(self._arrays(host.query_starts.numpy(), lists))

    def _arrays(self, starts: Indices, lists: PageLists) -> dict[str, NDArray[Any]]:
        """The arrays by name, padded. Only the length of the last one varies. No `starts`: padding only."""
        rows = self._limits[0]
        query_starts = np.full(rows + 2, starts[-1] if len(starts) else 0, dtype=np.int32)
        page_starts, contexts = np.zeros(rows + 2, dtype=np.int32), np.zeros(rows + 1, dtype=np.int32)
        tiles = np.full((self._most_tiles, 2), (rows, 0), dtype=np.int32)
        if len(starts):
            query_starts[: len(starts)] = starts
            page_starts[: len(starts)] = lists.starts
            contexts[: len(lists.contexts)] = lists.contexts
            used = self._planner.tiles(np.diff(starts), lists.contexts, least=self._least)
            tiles[: len(used)] = used
        first = {"query_starts": query_starts, "page_starts": page_starts, "contexts": contexts, "tiles": tiles}
        return {**first, "pages": lists.pages}


class TritonPlanner:
    """An AttentionPlanner whose plans launch our own kernels."""

    backend = "triton"
    _decode_plan_type = TritonDecodePlan
    _prompt_plan_type = TritonPromptPlan

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._layout = shape.layout
        self.device = torch.device(shape.device)
        self._workspace = SharedWorkspace(self.device)
        self._index_bytes = 0
        self.counter: torch.Tensor | None = None
        """Of by_warpgroups.attend. None: prompts have the Triton kernel."""
        if by_warpgroups.fits(shape):
            with torch.inference_mode(False):  # so that it can be written in any mode
                self.counter = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.processors = 4
        if is_gpu(self.device):
            self.processors = torch.cuda.get_device_properties(self.device).multi_processor_count

    @property
    def workspace_bytes(self) -> int:
        """See AttentionPlanner."""
        return self._workspace.bytes + self._index_bytes

    def plan(self, host: StepContext) -> TritonPlan:
        """See AttentionPlanner."""
        lists = page_lists(host, self._layout.page_size)
        starts: Indices = host.query_starts.numpy()
        chunks = np.diff(starts)
        single = np.flatnonzero(chunks == 1).astype(np.int32)
        tiles = self.tiles(chunks, lists.contexts)
        arrays = [starts, lists.starts, lists.contexts, lists.pages, single, tiles]
        query_starts, page_starts, contexts, pages, rows, flat_tiles = sent(arrays, self.device)
        tables = Tables(page_starts, pages, contexts, query_starts)
        decode = None
        if len(single):
            decode = self.decode_rows(len(single), rows, int(lists.contexts[single].max()))
        on_device = flat_tiles.view(-1, 2) if len(tiles) else None
        return TritonPlan(tables, decode, on_device, self.counter)

    def another(self) -> Self:
        """See AttentionPlanner."""
        return type(self)(self._shape)

    def decode_plan(self, rows: int, max_pages: int) -> TritonDecodePlan:
        """See AttentionPlanner."""
        page_size = self._layout.page_size
        if by_clusters.fits(self._shape):
            size, counters = by_clusters.memory_of(self._shape, rows)
            with torch.inference_mode(False):  # so that they can be written in any mode
                zeros = torch.zeros(counters, dtype=torch.int32, device=self.device)
            memory = by_clusters.ClusterMemory(self._workspace.take(size), zeros)
            plan: TritonDecodePlan = ClusterDecodePlan(rows, max_pages, page_size, self.device, memory)
        else:
            decode = self.decode_rows(rows, None, max_pages * page_size)
            plan = self._decode_plan_type(rows, max_pages, page_size, self.device, decode)
        self._index_bytes += plan.bytes
        return plan

    def prompt_plan(self, rows: int, tokens: int, max_pages: int) -> TritonPromptPlan:
        """See AttentionPlanner."""
        plan = self._prompt_plan_type(self, rows, tokens, max_pages, self._layout.page_size)
        self._index_bytes += plan.bytes
        return plan

    def decode_rows(self, items: int, rows: torch.Tensor | None, max_keys: int) -> DecodeRows:
        """What a launch for `items` tokens of at most `max_keys` keys computes. rows: see DecodeRows."""
        splits = split_count(items, self._layout.kv_heads, max_keys, self.processors)
        size = partial_bytes(items, self._shape.heads, self._layout.head_dim, splits)
        return DecodeRows(items, rows, splits, self._workspace.take(size))

    def tiles(self, chunks: Indices, contexts: Indices, *, least: int = 2) -> Indices:
        """List the tiles of rows with at least `least` tokens [tiles, 2]: row and first token. Most keys come first."""
        size = self.tile_tokens
        chunk_rows = np.flatnonzero(chunks >= least)
        if not len(chunk_rows):
            return np.zeros((0, 2), dtype=np.int32)
        firsts = [np.arange(0, chunks[row], size, dtype=np.int32) for row in chunk_rows]
        rows = np.repeat(chunk_rows, [len(tokens) for tokens in firsts]).astype(np.int32)
        tiles = np.stack([rows, np.concatenate(firsts)], axis=1)
        keys = contexts[rows] - chunks[rows] + tiles[:, 1]
        return np.ascontiguousarray(tiles[np.argsort(-keys, kind="stable")])

    @property
    def tile_tokens(self) -> int:
        """Tokens of one tile."""
        group = self._shape.heads // self._layout.kv_heads
        return tile_tokens(group, self._layout.head_dim, self._shape.dtype)
