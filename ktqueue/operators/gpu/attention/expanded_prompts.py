"""Expanded latents in captured steps with prompts: a Triton kernel that expands as many keys as a step has, its twin.

The grid does not depend on the number of keys: a program computes one tile after the other, and takes their number from
the device. No host sync: it can be captured in a CUDA graph.
"""

from dataclasses import dataclass

import torch

from ktqueue.operators.gpu.attention.expanded import (
    EXPANDED_BYTES,
    AbsorbedPlan,
    ExpandedRows,
    absorbed_values,
    attend_expanded,
    plain_columns,
)
from ktqueue.operators.gpu.attention.triton_blocks import precision
from ktqueue.operators.gpu.kernels.operation import runs_kernel, tl, triton
from ktqueue.operators.gpu.side_stream import SideStream
from ktqueue.operators.kv_cache import KVCache
from ktqueue.operators.step import ScoreOptions

KEYS_AT_ONCE = 128
"""Keys of a tile that is expanded."""
_PROGRAMS = 2
"""Programs of a processor: as many as have room in its shared memory."""


@dataclass(frozen=True, slots=True)
class KeyTiles:
    """The keys that are expanded, KEYS_AT_ONCE of one row at a time. Index arrays are on the device, int32.

    tiles: [most tiles, 2], a row and the first key of the tile within the row. count: [1], how many tiles there are.
    page_starts, pages: see Tables. most_keys: of all rows.
    """

    tiles: torch.Tensor
    count: torch.Tensor
    page_starts: torch.Tensor
    pages: torch.Tensor
    most_keys: int


@dataclass(frozen=True, slots=True)
class CapturedRows:
    """The rows of a captured step. rows, keys: those that are expanded. places: [others] int32, the other tokens, and
    any token as padding. targets: [others] int64, where their results go, and the number of all tokens as padding."""

    rows: ExpandedRows
    keys: KeyTiles
    places: torch.Tensor
    targets: torch.Tensor


@triton.jit
def _expand_keys(
    cache, up, tiles, count, page_starts, pages, contexts, key_starts, out, positions, scale, page_stride, slot_stride,
    COLUMNS: tl.constexpr, LATENT: tl.constexpr, ROTARY: tl.constexpr, ROTARY_WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply tiles of M keys by N rows of `up` [COLUMNS, LATENT]. The first columns also copy the rotary part."""
    PARTS: tl.constexpr = (COLUMNS + N - 1) // N
    dtype: tl.constexpr = up.dtype.element_ty
    jobs = tl.load(count) * PARTS
    for job in range(tl.program_id(0), jobs, tl.num_programs(0)):
        tile = job // PARTS
        part = job % PARTS
        row = tl.load(tiles + 2 * tile)
        key = tl.load(tiles + 2 * tile + 1) + tl.arange(0, M)
        exists = key < tl.load(contexts + row)
        page = tl.load(pages + tl.load(page_starts + row) + key // PAGE_SIZE, mask=exists, other=0)
        slots = (cache + page.to(tl.int64) * page_stride + (key % PAGE_SIZE) * slot_stride)[:, None]
        target = (tl.load(key_starts + row) + key).to(tl.int64)[:, None]
        n = part * N + tl.arange(0, N)
        rows = up + n[:, None] * LATENT
        total = tl.zeros([M, N], tl.float32)
        for first in range(0, LATENT, K):
            column = first + tl.arange(0, K)
            inside = exists[:, None] & (column < LATENT)[None, :]
            latents = tl.load(slots + column[None, :], mask=inside, other=0.0).to(dtype)
            weights = tl.load(
                rows + column[None, :], mask=(n < COLUMNS)[:, None] & (column < LATENT)[None, :], other=0.0
            )
            total = tl.dot(latents, tl.trans(weights), total, input_precision=PRECISION)
        written = exists[:, None] & (n < COLUMNS)[None, :]
        tl.store(out + target * COLUMNS + n[None, :], (total * scale).to(dtype), mask=written)
        if part == 0:
            rotary = tl.arange(0, ROTARY_WIDTH)[None, :]
            copied = exists[:, None] & (rotary < ROTARY)
            position = tl.load(slots + LATENT + rotary, mask=copied, other=0.0).to(dtype).to(tl.float32)
            tl.store(positions + target * ROTARY + rotary, (position * scale).to(dtype), mask=copied)


def expand_keys(
    cache: torch.Tensor,
    up: torch.Tensor,
    keys: KeyTiles,
    rows: ExpandedRows,
    out: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    processors: int,
) -> None:
    """Expand the keys of `keys` to `out` [keys, heads, columns], and copy their rotary parts to `positions` [keys,
    rotary]. Other rows of these stay as they are.

    cache: [pages, page_size, 1, latent + rotary], dense, stored numbers, which are multiplied by `scale`. up: [heads,
    columns, latent], dense. rows: their key_starts say where the keys of each row go.
    """
    heads, columns, latent = up.shape
    if not runs_kernel(out):
        _twin(cache, up, keys, rows, out, positions, scale)
        return
    exact = up.dtype == torch.float32
    width = 64 if exact else 128
    jobs = len(keys.tiles) * triton.cdiv(heads * columns, width)
    _expand_keys[(min(jobs, _PROGRAMS * processors),)](
        cache, up, keys.tiles, keys.count, keys.page_starts, keys.pages, rows.contexts, rows.key_starts, out,
        positions, scale, cache.stride(0), cache.stride(1),
        COLUMNS=heads * columns,
        LATENT=latent,
        ROTARY=positions.shape[1],
        ROTARY_WIDTH=triton.next_power_of_2(positions.shape[1]),
        PAGE_SIZE=cache.shape[1],
        M=KEYS_AT_ONCE,
        N=width,
        K=32 if exact else 64,
        PRECISION=precision(up.dtype),
        num_warps=8,
        num_stages=3,
        maxnreg=None if exact else 128,  # else only one program has room
    )  # fmt: skip


def _twin(
    cache: torch.Tensor,
    up: torch.Tensor,
    keys: KeyTiles,
    rows: ExpandedRows,
    out: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
) -> None:
    """The torch twin, tile by tile."""
    size, latent = cache.shape[1], up.shape[-1]
    for row, first in keys.tiles[: int(keys.count)].tolist():
        key = torch.arange(first, min(first + KEYS_AT_ONCE, int(rows.contexts[row])))
        page = keys.pages[int(keys.page_starts[row]) + key // size].long()
        states = cache[page, key % size, 0].to(up.dtype) * scale
        target = int(rows.key_starts[row]) + key
        out[target] = torch.nn.functional.linear(states[:, :latent], up.flatten(0, 1)).view(-1, *up.shape[:2])
        positions[target] = states[:, latent:]


@dataclass(frozen=True, slots=True)
class CapturedExpansion:
    """Like Expansion, of a captured step: nothing depends on its lengths.

    other_plan: how the tokens at `places` attend. beside: where they do so, while the others are expanded; None: behind
    them.
    """

    captured: CapturedRows
    other_plan: AbsorbedPlan
    processors: int
    beside: SideStream | None

    def values(
        self, layer: int, query: torch.Tensor, up: torch.Tensor, kv: KVCache, options: ScoreOptions
    ) -> torch.Tensor:
        """See Expansion. Padding tokens get zeros."""
        captured, tokens, (heads, width, latent) = self.captured, len(query), up.shape
        rows, most_keys = captured.rows, captured.keys.most_keys

        def attend_others(query: torch.Tensor) -> torch.Tensor:
            others = query.index_select(0, captured.places)
            return absorbed_values(self.other_plan, layer, others, up, kv, options)

        other_values = attend_others if self.beside is None else self.beside.start(attend_others, query)
        out = query.new_zeros(tokens + 1, heads, width - plain_columns(query, up, kv))  # the last row: of padding
        positions = query.new_empty(most_keys, kv.layout.head_dim - latent)
        group = max(1, min(heads, EXPANDED_BYTES // (most_keys * width * up.itemsize)))
        expanded = query.new_empty(most_keys * group * width)
        for first in range(0, heads, group):
            matrix = up[first : first + group]
            states = expanded[: most_keys * len(matrix) * width].view(most_keys, len(matrix), width)
            expand_keys(
                kv.keys[layer], matrix, captured.keys, rows, states, positions,
                scale=kv.layout.scale(layer).key,
                processors=self.processors,
            )  # fmt: skip
            attend_expanded(query, states, positions, out, rows, scaling=options.scaling, first_head=first)
        out.index_copy_(0, captured.targets, other_values(query).view(-1, *out.shape[1:]))
        return out[:tokens].flatten(1)
