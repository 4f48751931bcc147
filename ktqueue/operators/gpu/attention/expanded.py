"""Attention of long chunks over latents that are expanded to keys and values first: its Triton kernel and torch twin.

A query and a key then cost a third of the absorbed products (adr/0032). Each program computes a tile of tokens of one
row for one head. See triton_blocks.py for the method.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from ktqueue.operators.gpu.attention.triton_blocks import LOG2_E, padded, precision
from ktqueue.operators.gpu.kernels.operation import runs_kernel, tl, triton
from ktqueue.operators.kv_cache import KVCache
from ktqueue.operators.latent_shape import absorb_rotated
from ktqueue.operators.step import ScoreOptions

EXPANDED_BYTES = 256 << 20
"""Memory for the expanded keys and values of a layer, or in eager steps twice that of the queries if they are larger.
Heads take turns if all of them need more."""


class AbsorbedPlan(Protocol):
    """What LatentPlan does: it attends over latents."""

    def values(
        self, layer: int, query: torch.Tensor, value_up: torch.Tensor, kv: KVCache, options: ScoreOptions
    ) -> torch.Tensor:
        """See LatentPlan."""


@dataclass(frozen=True, slots=True)
class ExpandedRows:
    """Index arrays of the rows whose latents are expanded, on the device, int32.

    tiles: [tiles, 2], a row and the first token of the tile within the row; see tile_tokens. query_starts: [rows + 1],
    the first token of each row of the step. key_starts: [rows], the first key of each row among the expanded keys.
    contexts: [rows], the number of keys of each row.
    """

    tiles: torch.Tensor
    query_starts: torch.Tensor
    key_starts: torch.Tensor
    contexts: torch.Tensor


@dataclass(frozen=True, slots=True)
class Expansion:
    """The long rows of an eager step. Their latents are read from the cache and expanded to keys and values.

    slots: [keys] int32, where the keys of these rows are in the cache, row after row. others: [tokens] int32, the
    tokens of all other rows, and other_plan: how they attend over latents; None: there are none.
    """

    rows: ExpandedRows
    slots: torch.Tensor
    others: torch.Tensor | None
    other_plan: AbsorbedPlan | None

    def values(
        self, layer: int, query: torch.Tensor, up: torch.Tensor, kv: KVCache, options: ScoreOptions
    ) -> torch.Tensor:
        """Attend for all tokens: query [tokens, heads, plain + rotary], rotated -> [tokens, heads * value].

        up: [heads, plain + value, latent], the matrix that expands latents.
        """
        out = query.new_empty(*query.shape[:2], up.shape[1] - plain_columns(query, up, kv))
        self.attend(layer, query, up, out, kv, options.scaling)
        if self.others is not None and self.other_plan is not None:
            values = absorbed_values(self.other_plan, layer, query[self.others], up, kv, options)
            out[self.others] = values.view(-1, *out.shape[1:])
        return out.flatten(1)

    def attend(
        self, layer: int, query: torch.Tensor, up: torch.Tensor, out: torch.Tensor, kv: KVCache, scaling: float
    ) -> None:
        """Attend for the tokens of the long rows. out: [tokens, heads, value]. For the others see `values`."""
        cache = kv.keys[layer].flatten(0, 2)
        if cache.dtype.itemsize == 1:  # index_select does not know it
            latents = cache.view(torch.uint8).index_select(0, self.slots).view(cache.dtype).to(query.dtype)
            if (scale := kv.layout.scale(layer).key) != 1:
                latents.mul_(scale)
        else:
            latents = cache.index_select(0, self.slots).to(query.dtype)
        heads = len(up)
        head_bytes = len(latents) * up.shape[1] * up.itemsize
        group = max(1, min(heads, max(EXPANDED_BYTES, 2 * query.nbytes) // head_bytes))
        for first in range(0, heads, group):
            matrix = up[first : first + group].flatten(0, 1)
            expanded = torch.nn.functional.linear(latents[:, : up.shape[-1]], matrix)
            states = expanded.view(len(latents), -1, up.shape[1])
            attend_expanded(query, states, latents, out, self.rows, scaling=scaling, first_head=first)


def plain_columns(query: torch.Tensor, up: torch.Tensor, kv: KVCache) -> int:
    """Columns without position of a rotated query: see Expansion.values."""
    return query.shape[-1] - (kv.layout.head_dim - up.shape[-1])


def absorbed_values(
    plan: AbsorbedPlan, layer: int, query: torch.Tensor, up: torch.Tensor, kv: KVCache, options: ScoreOptions
) -> torch.Tensor:
    """Attend over latents with rotated queries: the shapes of Expansion.values."""
    plain = plain_columns(query, up, kv)
    return plan.values(layer, absorb_rotated(query, up[:, :plain]), up[:, plain:].transpose(1, 2), kv, options)


@triton.jit
def _expanded_block(
    plain_query, rotary_query, best, total, sums, first, end, position, states, latents, scale,
    HEADS: tl.constexpr, PLAIN: tl.constexpr, ROTARY: tl.constexpr, VALUE: tl.constexpr, LATENT: tl.constexpr,
    PLAIN_WIDTH: tl.constexpr, ROTARY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a block of BLOCK keys of one head to the running softmax; returns (best, total, sums).

    states: the head's first expanded key. CAUSAL: some tokens may not see all keys of the block, which may pass `end`.
    """
    index = first + tl.arange(0, BLOCK)
    plain_column = tl.arange(0, PLAIN_WIDTH)
    rotary_column = tl.arange(0, ROTARY_WIDTH)
    value_column = tl.arange(0, VALUE_WIDTH)
    exists = index < end
    rows = index.to(tl.int64)[:, None]
    cells = states + rows * (HEADS * (PLAIN + VALUE))
    if CAUSAL:
        plain_inside = exists[:, None] & (plain_column < PLAIN)[None, :]
        rotary_inside = exists[:, None] & (rotary_column < ROTARY)[None, :]
        value_inside = exists[:, None] & (value_column < VALUE)[None, :]
    else:
        plain_inside = (plain_column < PLAIN)[None, :]
        rotary_inside = (rotary_column < ROTARY)[None, :]
        value_inside = (value_column < VALUE)[None, :]
    plain = tl.load(cells + plain_column[None, :], mask=plain_inside, other=0.0)
    rotary_cells = latents + rows * (LATENT + ROTARY) + LATENT + rotary_column[None, :]
    rotary = tl.load(rotary_cells, mask=rotary_inside, other=0.0)
    value = tl.load(cells + PLAIN + value_column[None, :], mask=value_inside, other=0.0)
    scores = tl.dot(plain_query, tl.trans(plain), input_precision=PRECISION)
    scores = tl.dot(rotary_query, tl.trans(rotary), scores, input_precision=PRECISION) * scale
    if CAUSAL:  # the first key is seen by every token, so `top` is a number
        scores = tl.where(index[None, :] <= position[:, None], scores, float("-inf"))
    top = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - top[:, None])
    shrink = tl.exp2(best - top)
    total = total * shrink + tl.sum(weights, 1)
    sums = tl.dot(weights.to(value.dtype), value, sums * shrink[:, None], input_precision=PRECISION)
    return top, total, sums


@triton.jit(do_not_specialize=["first_head"])
def _expanded_tile(
    query, expanded, latents, tiles, query_starts, key_starts, contexts, out, scale, first_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PLAIN: tl.constexpr, ROTARY: tl.constexpr, VALUE: tl.constexpr,
    LATENT: tl.constexpr, PLAIN_WIDTH: tl.constexpr, ROTARY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    M: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute M tokens of one row for one head: first the keys that all of them see.

    GROUP: heads in `expanded`, the first of which is first_head.
    """
    tile = tl.program_id(0)
    member = tl.program_id(1)
    head = first_head + member
    row = tl.load(tiles + 2 * tile)
    offset = tl.load(tiles + 2 * tile + 1)
    begin = tl.load(query_starts + row)
    chunk = tl.load(query_starts + row + 1) - begin
    context = tl.load(contexts + row)
    key_start = tl.load(key_starts + row).to(tl.int64)
    token = offset + tl.arange(0, M)
    real = token < chunk
    plain_column = tl.arange(0, PLAIN_WIDTH)
    rotary_column = tl.arange(0, ROTARY_WIDTH)
    value_column = tl.arange(0, VALUE_WIDTH)
    rows = ((begin + token).to(tl.int64) * HEADS + head)[:, None]
    cells = query + rows * (PLAIN + ROTARY)
    plain_inside = real[:, None] & (plain_column < PLAIN)[None, :]
    plain_query = tl.load(cells + plain_column[None, :], mask=plain_inside, other=0.0)
    rotary_inside = real[:, None] & (rotary_column < ROTARY)[None, :]
    rotary_query = tl.load(cells + PLAIN + rotary_column[None, :], mask=rotary_inside, other=0.0)
    lowest = context - chunk + offset  # keys before the first token's own
    position = context - chunk + token
    end = tl.minimum(lowest + M, context)
    states = expanded + (key_start * GROUP + member) * (PLAIN + VALUE)
    row_latents = latents + key_start * (LATENT + ROTARY)
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, VALUE_WIDTH], tl.float32)
    masked_from = (lowest + 1) // BLOCK * BLOCK
    for block in range(0, masked_from, BLOCK):
        best, total, sums = _expanded_block(
            plain_query, rotary_query, best, total, sums, block, end, position, states, row_latents, scale,
            GROUP, PLAIN, ROTARY, VALUE, LATENT, PLAIN_WIDTH, ROTARY_WIDTH, VALUE_WIDTH, BLOCK, False, PRECISION,
        )  # fmt: skip
    for block in range(masked_from, end, BLOCK):
        best, total, sums = _expanded_block(
            plain_query, rotary_query, best, total, sums, block, end, position, states, row_latents, scale,
            GROUP, PLAIN, ROTARY, VALUE, LATENT, PLAIN_WIDTH, ROTARY_WIDTH, VALUE_WIDTH, BLOCK, True, PRECISION,
        )  # fmt: skip
    result = (sums / total[:, None]).to(out.dtype.element_ty)
    value_inside = real[:, None] & (value_column < VALUE)[None, :]
    tl.store(out + rows * VALUE + value_column[None, :], result, mask=value_inside)


def attend_expanded(
    query: torch.Tensor,
    expanded: torch.Tensor,
    latents: torch.Tensor,
    out: torch.Tensor,
    rows: ExpandedRows,
    *,
    scaling: float,
    first_head: int = 0,
) -> None:
    """Attend for the tokens of `rows.tiles` with some of the heads, from `first_head` on. All tensors are dense.

    query: [tokens, all heads, plain + rotary], rotated. expanded: [keys, heads, plain + value]. latents: [keys, latent
    + rotary], of which the rotary columns are read. out: [tokens, all heads, value].
    """
    heads, width = query.shape[1:]
    value = out.shape[-1]
    group, plain = expanded.shape[1], expanded.shape[2] - value
    rotary = width - plain
    if not runs_kernel(query):
        part = slice(first_head, first_head + group)
        _twin(query[:, part], expanded, latents[:, -rotary:], out[:, part], rows, scaling)
        return
    exact = query.dtype == torch.float32
    _expanded_tile[(len(rows.tiles), group)](
        query, expanded, latents, rows.tiles, rows.query_starts, rows.key_starts, rows.contexts, out, scaling * LOG2_E,
        first_head,
        HEADS=heads,
        GROUP=group,
        PLAIN=plain,
        ROTARY=rotary,
        VALUE=value,
        LATENT=latents.shape[-1] - rotary,
        PLAIN_WIDTH=padded(plain),
        ROTARY_WIDTH=padded(rotary),
        VALUE_WIDTH=padded(value),
        M=tile_tokens(query.dtype),
        BLOCK=32 if exact else 64,
        PRECISION=precision(query.dtype),
        num_warps=4 if exact else 8,
        num_stages=2 if exact else 3,
    )  # fmt: skip


def tile_tokens(dtype: torch.dtype) -> int:
    """Tokens of one tile of queries of type `dtype`."""
    return 32 if dtype == torch.float32 else 128


def _twin(
    query: torch.Tensor,
    expanded: torch.Tensor,
    rotary: torch.Tensor,
    out: torch.Tensor,
    rows: ExpandedRows,
    scaling: float,
) -> None:
    """The torch twin, row by row. All tensors have the heads of `expanded`; rotary: [keys, rotary]."""
    value = out.shape[-1]
    for row in rows.tiles[:, 0].unique().tolist():
        tokens = slice(int(rows.query_starts[row]), int(rows.query_starts[row + 1]))
        count, context, start = tokens.stop - tokens.start, int(rows.contexts[row]), int(rows.key_starts[row])
        states, positions = expanded[start : start + context], rotary[start : start + context, None]
        plain, values = torch.split(states, [states.shape[-1] - value, value], -1)
        keys = torch.cat([plain, positions.expand(-1, plain.shape[1], -1)], -1)
        scores = torch.einsum("qhd,khd->hqk", query[tokens].float(), keys.float()) * scaling
        unseen = torch.ones(count, context, dtype=torch.bool, device=query.device).triu(context - count + 1)
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        out[tokens] = torch.einsum("hqk,khd->qhd", weights, values.float()).to(out.dtype)
