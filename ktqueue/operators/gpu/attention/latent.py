"""Multi-head latent attention over absorbed queries: its Triton kernel, and plans in which every token is an item.

Each program computes one token, some of its heads and a split of its keys. See triton_blocks.py for the method. The
twin is reference.paged_attention over a latent cache. For rows of many tokens a plan also has an Expansion, which is
faster if the caller has the matrix that expands latents.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ktqueue.operators.gpu.attention.base import AttentionShape
from ktqueue.operators.gpu.attention.expanded import ExpandedRows, Expansion, tile_tokens
from ktqueue.operators.gpu.attention.expanded_prompts import KEYS_AT_ONCE, CapturedExpansion, CapturedRows, KeyTiles
from ktqueue.operators.gpu.attention.page_lists import Indices, PageLists, page_lists, sent
from ktqueue.operators.gpu.attention.triton import TritonDecodePlan, TritonPlan, TritonPlanner, TritonPromptPlan
from ktqueue.operators.gpu.attention.triton_blocks import LOG2_E, DecodeRows, Tables, looked_up, padded, precision
from ktqueue.operators.gpu.attention.triton_decode import (
    MAX_SPLITS,
    join,
    joined,
    key_share,
    partial_bytes,
    partial_results,
)
from ktqueue.operators.gpu.kernels.operation import launch_options, tl, triton, wait_for_previous
from ktqueue.operators.gpu.side_stream import SideStream
from ktqueue.operators.kv_cache import UNSCALED, CacheScale, KVCache
from ktqueue.operators.latent_shape import expand_values
from ktqueue.operators.step import AttentionPlan, ScoreOptions, StepContext

HEADS_AT_ONCE = 16
"""Heads of one program: the fewest rows that tl.dot accepts."""
EXPANDED_TOKENS = 64
"""Rows with at least so many tokens in a step attend over expanded latents. On an H200, 64 tokens of 8,192 keys then
take 0.24 instead of 0.29 ms with 16 heads and 0.78 instead of 1.46 ms with 128."""
EXPANDED_KEYS = 16384
"""Most expanded keys of a captured step. One with more runs eagerly: it has memory for the keys that it has."""
_JOINED_HEADS = 16
"""Up to so many heads of all tokens, joining the splits of their keys and expanding the result is one launch: each of
its programs joins again. With more, two launches are as fast or faster (adr/0067)."""
_VALUE_COLUMNS = 16
"""Columns of a value that a program expands to: 16 heads of 128 columns then fill a GPU."""


@dataclass(frozen=True, slots=True)
class LatentTile:
    """How a split of keys is launched: keys of a block, warps of a program, and blocks that it has in flight."""

    keys: int
    warps: int
    stages: int


TILE, EXACT_TILE = LatentTile(32, 4, 2), LatentTile(16, 4, 2)


@triton.jit(do_not_specialize=["splits"])
def _latent_split(
    query, keys, row_of, page_starts, pages, contexts,
    parts,  # [tokens, heads, splits, LATENT_WIDTH] float32; with one split the result, [tokens, heads, LATENT]
    levels,  # [tokens, heads, splits] float32: log2 of the sum of exponentials
    scale, value_scale, splits, page_stride, slot_stride,
    HEADS: tl.constexpr, M: tl.constexpr, LATENT: tl.constexpr, ROTARY: tl.constexpr, LATENT_WIDTH: tl.constexpr,
    ROTARY_WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Compute one split of the keys of one token for M of its heads. Empty splits return immediately.

    WHOLE: there is only one split. A latent is read once, for scores and sums alike; the rotary part of a key is read
    for the scores only.
    """
    wait_for_previous(WAITS)
    token = tl.program_id(0)
    split = tl.program_id(2)
    row = looked_up(row_of, token)
    context = tl.load(contexts + token)
    _, share = key_share(context, splits, 0, 0, BLOCK)
    first = split * share
    end = tl.minimum(context, first + share)
    if first < end:
        head = tl.program_id(1) * M + tl.arange(0, M)
        real = head < HEADS
        column = tl.arange(0, LATENT_WIDTH)
        rotary_column = tl.arange(0, ROTARY_WIDTH)
        rows = (token.to(tl.int64) * HEADS + head)[:, None]
        states = query + rows * (LATENT + ROTARY)
        latent_query = tl.load(states + column[None, :], mask=real[:, None] & (column < LATENT)[None, :], other=0.0)
        rotary_query = tl.load(
            states + LATENT + rotary_column[None, :], mask=real[:, None] & (rotary_column < ROTARY)[None, :], other=0.0
        )
        best = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        sums = tl.zeros([M, LATENT_WIDTH], tl.float32)
        row_pages = pages + tl.load(page_starts + row)
        for block in range(first, end, BLOCK):
            index = block + tl.arange(0, BLOCK)
            exists = index < end
            page = tl.load(row_pages + index // PAGE_SIZE, mask=exists, other=0)
            slots = keys + (page.to(tl.int64) * page_stride + (index % PAGE_SIZE) * slot_stride)[:, None]
            latent = tl.load(slots + column[None, :], mask=exists[:, None] & (column < LATENT)[None, :], other=0.0)
            rotary_inside = exists[:, None] & (rotary_column < ROTARY)[None, :]
            rotary_key = tl.load(slots + LATENT + rotary_column[None, :], mask=rotary_inside, other=0.0)
            latent = latent.to(latent_query.dtype)
            scores = tl.dot(latent_query, tl.trans(latent), input_precision=PRECISION)
            rotary_key = rotary_key.to(latent_query.dtype)
            scores = tl.dot(rotary_query, tl.trans(rotary_key), scores, input_precision=PRECISION) * scale
            scores = tl.where(exists[None, :], scores, float("-inf"))
            top = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp2(scores - top[:, None])
            shrink = tl.exp2(best - top)
            total = total * shrink + tl.sum(weights, 1)
            sums = tl.dot(weights.to(latent_query.dtype), latent, sums * shrink[:, None], input_precision=PRECISION)
            best = top
        sums = sums / total[:, None]
        if WHOLE:
            sums = sums * value_scale
            cells = rows * LATENT + column[None, :]
            tl.store(parts + cells, sums.to(parts.dtype.element_ty), mask=real[:, None] & (column < LATENT)[None, :])
        else:
            part = (token.to(tl.int64) * HEADS + head) * splits + split
            tl.store(parts + part[:, None] * LATENT_WIDTH + column[None, :], sums, mask=real[:, None])
            tl.store(levels + part, best + tl.log2(total), mask=real)


@triton.jit(do_not_specialize=["splits"])
def _latent_join(
    contexts, parts, levels, up, out, value_scale, splits, head_stride, value_stride,
    HEADS: tl.constexpr, LATENT: tl.constexpr, VALUE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, MOST: tl.constexpr, STEP: tl.constexpr, LOG2: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Join the splits of one head of one token, and expand the result to COLUMNS columns of its value."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    latent = tl.arange(0, WIDTH)
    cells = up + head * head_stride + column[:, None] * value_stride + latent[None, :]
    weights = tl.load(cells, mask=(column < VALUE)[:, None] & (latent < LATENT)[None, :], other=0.0).to(tl.float32)
    wait_for_previous(WAITS)  # while weights arrive, which no kernel of a step writes
    context = tl.load(contexts + token)
    _, share = key_share(context, splits, 0, 0, BLOCK)
    first = (token.to(tl.int64) * HEADS + head) * splits
    attended = joined(parts, levels, first, tl.cdiv(context, share), None, head, latent, WIDTH, MOST, STEP, LOG2)
    attended = (attended * value_scale).to(out.dtype.element_ty).to(tl.float32)  # as it is without expansion
    value = tl.sum(weights * attended[None, :], 1)
    cells = (token.to(tl.int64) * HEADS + head) * VALUE + column
    tl.store(out + cells, value.to(out.dtype.element_ty), mask=column < VALUE)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    out: torch.Tensor,
    tables: Tables,
    decode_rows: DecodeRows,
    *,
    scaling: float,
    scale: CacheScale = UNSCALED,
    value_up: torch.Tensor | None = None,
    tile: LatentTile | None = None,
) -> None:
    """Attend for every token of `query` [tokens, heads, latent + rotary], dense, into `out` [tokens, heads, latent].

    keys: [pages, page_size, 1, latent + rotary], dense. tables: `contexts` are those of each token, no query_starts.
    decode_rows: one item per token; splits: at most MAX_SPLITS; workspace: at least partial_bytes(...), unless there is
    only one split. scale: of the stored latents. value_up: [heads, latent, value], whose first two dimensions may be
    strided; needs several splits. With it, the launch that joins them expands the result too, and `out` is [tokens,
    heads, value]. tile: None: that of the queries' type.
    """
    tokens, heads, width = query.shape
    latent = out.shape[-1] if value_up is None else value_up.shape[1]
    splits = decode_rows.splits
    parts, levels = (out, out) if splits == 1 else partial_results(decode_rows, heads, latent)
    tile = tile or (EXACT_TILE if query.dtype == torch.float32 else TILE)
    block = tile.keys
    _latent_split[(tokens, -(-heads // HEADS_AT_ONCE), splits)](
        query, keys, decode_rows.rows, tables.page_starts, tables.pages, tables.contexts, parts, levels,
        scaling * scale.key * LOG2_E, scale.value, splits, keys.stride(0), keys.stride(1),
        HEADS=heads,
        M=HEADS_AT_ONCE,
        LATENT=latent,
        ROTARY=width - latent,
        LATENT_WIDTH=padded(latent),
        ROTARY_WIDTH=padded(width - latent),
        PAGE_SIZE=keys.shape[1],
        BLOCK=block,
        WHOLE=splits == 1,
        PRECISION=precision(query.dtype),
        **launch_options(),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
    if value_up is not None:
        value = value_up.shape[2]
        columns = min(padded(value), _VALUE_COLUMNS)
        _latent_join[(tokens, heads, triton.cdiv(value, columns))](
            tables.contexts, parts, levels, value_up, out, scale.value, splits, value_up.stride(0), value_up.stride(2),
            HEADS=heads,
            LATENT=latent,
            VALUE=value,
            WIDTH=padded(latent),
            COLUMNS=columns,
            BLOCK=block,
            MOST=MAX_SPLITS,
            STEP=16,
            LOG2=LOG2_E,
            **launch_options(),
            num_warps=4,
        )  # fmt: skip
    elif splits > 1:
        rows = replace(decode_rows, rows=None)
        join(parts, levels, tables, rows, out, ScoreOptions(scaling), scale.value, block=block)


def split_count(tokens: int, heads: int, max_keys: int, processors: int) -> int:
    """Return how many splits keep `processors` busy with `tokens` tokens of at most `max_keys` keys.

    Few tokens always get several splits, even for one block of keys. They need another kernel than many tokens do, and
    so it is compiled before there are long contexts.
    """
    wanted = -(-4 * processors // (tokens * -(-heads // HEADS_AT_ONCE)))
    wanted = 1 << wanted.bit_length() - 1  # a join takes as long as that of the next power of two
    return max(1, min(wanted, MAX_SPLITS, max(2, -(-max_keys // 32))))


class LatentPlan(TritonPlan):
    """Attends for one step. The `contexts` of its tables are those of each token."""

    expansion: Expansion | CapturedExpansion | None = None
    """How rows of the step attend over expanded latents; None: none does."""

    def attend(self, layer: int, query: torch.Tensor, kv: KVCache, options: ScoreOptions) -> torch.Tensor:
        """See AttentionPlan. query [tokens, heads, head_dim] -> [tokens, heads, value_dim].

        Raises ValueError for a window, sinks and a cap.
        """
        if options.sliding_window or options.sinks is not None or options.cap or self.decode_rows is None:
            raise ValueError("latent attention has no sliding windows, no sinks and no cap")
        query = query.contiguous()
        out = query.new_empty(*query.shape[:2], kv.layout.value_dim)
        scale = kv.layout.scale(layer)
        attend(query, kv.keys[layer], out, self.tables, self.decode_rows, scaling=options.scaling, scale=scale)
        return out

    def values(
        self, layer: int, query: torch.Tensor, value_up: torch.Tensor, kv: KVCache, options: ScoreOptions
    ) -> torch.Tensor:
        """Attend, and expand the results: query [tokens, heads, latent + rotary] -> [tokens, heads * value].

        value_up: [heads, latent, value], see latent_shape. Few heads are joined and expanded in one launch.
        """
        if self.decode_rows is None or self.decode_rows.splits == 1 or query.shape[:2].numel() > _JOINED_HEADS:
            return expand_values(self.attend(layer, query, kv, options), value_up)
        query = query.contiguous()
        out = query.new_empty(*query.shape[:2], value_up.shape[2])
        rows, scaling, scale = self.decode_rows, options.scaling, kv.layout.scale(layer)
        attend(query, kv.keys[layer], out, self.tables, rows, scaling=scaling, scale=scale, value_up=value_up)
        return out.flatten(1)


class LatentDecodePlan(LatentPlan, TritonDecodePlan):
    """The plan of a row bucket."""


class LatentPromptPlan(LatentPlan, TritonPromptPlan):
    """The plan of captured steps with prompts. Rows of several tokens are expanded, all others attend over latents.

    So few tokens have absorbed queries, and their keys are split. Most keys of all expanded rows are EXPANDED_KEYS.
    """

    _least = 2

    def __init__(self, planner: "LatentPlanner", rows: int, tokens: int, max_pages: int, page_size: int) -> None:
        self._most_keys = min(rows * max_pages * page_size, EXPANDED_KEYS)
        self._most_key_tiles = min(self._most_keys, self._most_keys // KEYS_AT_ONCE + rows)
        super().__init__(planner, rows, tokens, max_pages, page_size)
        at, tables = self._staging.device, self.tables
        decode = planner.decode_rows(rows, at["row_of"], max_pages * page_size)
        assert tables.query_starts is not None and self._tiles is not None
        expanded = ExpandedRows(self._tiles, tables.query_starts, at["key_starts"], tables.contexts)
        others = LatentPlan(Tables(tables.page_starts, tables.pages, at["seen"]), decode, None)
        keys = KeyTiles(at["key_tiles"], at["key_count"], tables.page_starts, tables.pages, self._most_keys)
        captured = CapturedRows(expanded, keys, at["places"], at["targets"])
        self.expansion = CapturedExpansion(captured, others, planner.processors, planner.beside)

    def attend(self, layer: int, query: torch.Tensor, kv: KVCache, options: ScoreOptions) -> torch.Tensor:
        """Raises ValueError: see `expansion`."""
        raise ValueError("captured steps with prompts attend over expanded latents")

    def holds(self, host: StepContext) -> bool:
        """See PromptPlan."""
        several = np.diff(host.query_starts.numpy()) >= self._least
        return super().holds(host) and int(host.context_lengths.numpy()[several].sum()) <= self._most_keys

    def update(self, host: StepContext) -> None:
        """See PromptPlan. Raises ValueError, too, for more keys of rows with several tokens than are expanded."""
        if super().holds(host) and not self.holds(host):
            raise ValueError(f"this plan is for {self._most_keys} keys of rows with several tokens at most")
        super().update(host)

    def _arrays(self, starts: Indices, lists: PageLists) -> dict[str, NDArray[Any]]:
        """See TritonPromptPlan. Before the pages: where the expanded keys of each row begin, tiles of these keys
        and their number; of the other tokens their places, where their results go, the keys that they see and their
        rows. Padding results go behind those of all tokens."""
        arrays = super()._arrays(starts, lists)
        pages = arrays.pop("pages")
        rows, tokens = self._limits[:2]
        key_starts, key_tiles = np.zeros(rows + 1, dtype=np.int32), np.zeros((self._most_key_tiles, 2), dtype=np.int32)
        count, places = np.zeros(1, dtype=np.int32), np.zeros(rows, dtype=np.int32)
        targets = np.full(rows, tokens, dtype=np.int64)
        seen, row_of = np.ones(rows, dtype=np.int32), np.zeros(rows, dtype=np.int32)  # padding sees any real key
        if len(starts):
            chunks = np.diff(starts)
            several, single = np.flatnonzero(chunks >= self._least), np.flatnonzero(chunks == 1)
            contexts = lists.contexts[several]
            key_starts[several[1:]] = np.cumsum(contexts)[:-1]
            counts = -(-contexts // KEYS_AT_ONCE)
            count[0] = counts.sum()
            key_tiles[: count[0], 0] = np.repeat(several, counts)
            firsts = np.arange(count[0]) - np.repeat(np.cumsum(counts) - counts, counts)
            key_tiles[: count[0], 1] = firsts * KEYS_AT_ONCE
            places[: len(single)] = targets[: len(single)] = starts[single]
            seen[: len(single)], row_of[: len(single)] = lists.contexts[single], single
        arrays |= {"key_starts": key_starts, "key_tiles": key_tiles, "key_count": count, "places": places}
        return {**arrays, "targets": targets, "seen": seen, "row_of": row_of, "pages": pages}


def expansion_of(plan: AttentionPlan) -> Expansion | CapturedExpansion | None:
    """How rows of the plan's step are expanded; None: none is, or another kind of plan attends without expanding."""
    return plan.expansion if isinstance(plan, LatentPlan) else None


class LatentPlanner(TritonPlanner):
    """An AttentionPlanner over a latent cache."""

    _decode_plan_type = LatentDecodePlan
    _prompt_plan_type = LatentPromptPlan

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self.beside = SideStream(shape.device)

    def plan(self, host: StepContext) -> LatentPlan:
        """See AttentionPlanner."""
        lists = page_lists(host, self._layout.page_size)
        starts: Indices = host.query_starts.numpy()
        chunks = np.diff(starts)
        row_of = np.repeat(np.arange(len(chunks), dtype=np.int32), chunks)
        tokens = np.arange(len(row_of), dtype=np.int32)
        seen = ((lists.contexts - starts[1:])[row_of] + tokens + 1).astype(np.int32)  # the last token sees all keys
        long = chunks >= EXPANDED_TOKENS
        others = np.flatnonzero(~long[row_of]).astype(np.int32)
        arrays = [lists.starts, lists.pages, seen, row_of, others, seen[others], row_of[others]]
        arrays += self._expanded_rows(starts, lists, np.flatnonzero(long)) if long.any() else []
        page_starts, pages, *rest = sent(arrays, self.device)
        plan = self._plan(page_starts, pages, rest[0], rest[1], seen)
        if long.any():
            indices, other_seen, other_rows, tiles, query_starts, key_starts, contexts, slots = rest[2:]
            other_plan = self._plan(page_starts, pages, other_seen, other_rows, seen[others]) if len(others) else None
            rows = ExpandedRows(tiles.view(-1, 2), query_starts, key_starts, contexts)
            plan.expansion = Expansion(rows, slots, indices if len(others) else None, other_plan)
        return plan

    def _plan(
        self, page_starts: torch.Tensor, pages: torch.Tensor, seen: torch.Tensor, rows: torch.Tensor, on_host: Indices
    ) -> LatentPlan:
        """Plan absorbed attention of tokens that see `seen` [tokens] keys of their `rows`. on_host: the same."""
        decode = self.decode_rows(len(on_host), rows, int(on_host.max()))
        return LatentPlan(Tables(page_starts=page_starts, contexts=seen, pages=pages), decode, None)

    def _expanded_rows(self, starts: Indices, lists: PageLists, long: np.ndarray) -> list[Indices]:
        """Return the arrays of ExpandedRows for the rows `long`, and the slots of their keys, row after row."""
        chunks, contexts = np.diff(starts), lists.contexts
        key_starts = np.zeros(len(chunks), dtype=np.int32)
        key_starts[long[1:]] = np.cumsum(contexts[long])[:-1]
        size, offsets = self._layout.page_size, np.arange(self._layout.page_size, dtype=np.int32)
        slots = [
            (lists.pages[lists.starts[row] : lists.starts[row + 1], None] * size + offsets).reshape(-1)[: contexts[row]]
            for row in long
        ]
        tiles = self.tiles(np.where(np.isin(np.arange(len(chunks)), long), chunks, 0), contexts)
        return [tiles, starts, key_starts, contexts, np.concatenate(slots)]

    def decode_rows(self, items: int, rows: torch.Tensor | None, max_keys: int) -> DecodeRows:
        """What a launch for `items` tokens of at most `max_keys` keys computes. rows: see DecodeRows."""
        heads = self._shape.heads
        splits = split_count(items, heads, max_keys, self.processors)
        size = 0 if splits == 1 else partial_bytes(items, heads, self._layout.value_dim, splits)
        return DecodeRows(items, rows, splits, self._workspace.take(size))

    @property
    def tile_tokens(self) -> int:
        return tile_tokens(self._shape.dtype)
