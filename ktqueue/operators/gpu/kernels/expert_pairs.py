"""Pairs of a token and an expert that it chose, and their order by expert.

The experts are packed in GPU memory. One expert is a *record* of bytes in a pool: see panel_layout.ExpertRecord.
"""

from typing import NamedTuple

import torch

from ktqueue.operators.gpu.kernels.operation import tl, triton
from ktqueue.operators.gpu.kernels.panel_layout import ExpertRecord

SORTED_AT_ONCE = 2048
"""Pairs that a program of the sort reads at a time."""
MOST_READ_BY_EACH = 8192
"""Pairs up to which a program for each expert reads them all, in one launch. More are sorted block by block."""
_BLOCK, _BLOCKS_AT_ONCE = 32, 1024


class ExpertBiases(NamedTuple):
    """Biases of all experts of a layer, float32 on the device. gate, up: [experts, intermediate]; down: [experts,
    hidden]."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class ExpertPairs(NamedTuple):
    """The pairs of a step, and where their experts are.

    pool: [bytes] uint8; offsets: [experts] int64, where the record of each expert begins in the pool, negative: its
    pairs are skipped; ids: [tokens, k] int64, contiguous, the expert of each pair, negative: skipped; biases: of all
    experts, or None. first: if the records lie side by side, in the order of the experts, the offset of the first one;
    else None. Kernels that need few records then compute where they begin, since a load would wait for ids.
    """

    pool: torch.Tensor
    offsets: torch.Tensor
    ids: torch.Tensor
    record: ExpertRecord
    biases: ExpertBiases | None = None
    first: int | None = None

    @property
    def even_pool(self) -> tuple[torch.Tensor, int]:
        """The pool, and the bytes from one record to the next, if it begins with the first. Else 0: see `offset_of`."""
        return (self.pool, 0) if self.first is None else (self.pool[self.first :], self.record.bytes)


@triton.jit
def offset_of(expert, offsets, RECORD_BYTES: tl.constexpr):
    """Where an expert's record begins in the pool, both as of `even_pool`. Of a negative id, that of expert 0."""
    expert = tl.maximum(expert, 0)
    offset = expert.to(tl.int64) * RECORD_BYTES if RECORD_BYTES > 0 else tl.load(offsets + expert)
    return tl.multiple_of(offset, 64)


class SortedPairs(NamedTuple):
    """Pairs by expert, all int32. sorted: [pairs]; starts, counts: [experts], which of them are an expert's. The count
    of an expert that is skipped is 0."""

    sorted: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def empty(cls, pairs: ExpertPairs) -> "SortedPairs":
        """Uninitialised lists."""
        experts, device = pairs.offsets.numel(), pairs.ids.device
        return cls(*(torch.empty(n, dtype=torch.int32, device=device) for n in (pairs.ids.numel(), experts, experts)))

    @classmethod
    def of(cls, ids: torch.Tensor, offsets: torch.Tensor) -> "SortedPairs":
        """The lists for ids and offsets as of ExpertPairs. The torch twin of the kernels."""
        flat, experts = ids.flatten(), offsets.numel()
        counts = torch.bincount(flat[flat >= 0], minlength=experts)
        order = torch.where(flat < 0, experts, flat).argsort(stable=True)
        return cls(order.int(), (counts.cumsum(0) - counts).int(), torch.where(offsets >= 0, counts, 0).int())


@triton.jit
def list_pairs(expert, ids, offsets, pairs, sorted_pairs, starts, counts, CHUNK: tl.constexpr):
    """List the pairs of one expert, in order, behind those of experts with lower ids. Reads CHUNK pairs at a time."""
    lower = tl.zeros((CHUNK,), tl.int32)
    begin = expert * 0
    while begin < pairs:  # the interpreter has no range over run-time values
        pair = begin + tl.arange(0, CHUNK)
        chosen = tl.load(ids + pair, mask=pair < pairs, other=-1)
        lower += ((chosen >= 0) & (chosen < expert)).to(tl.int32)
        begin += CHUNK
    start = tl.sum(lower, 0)
    found = tl.zeros((), tl.int32)
    begin = expert * 0
    while begin < pairs:
        pair = begin + tl.arange(0, CHUNK)
        match = tl.load(ids + pair, mask=pair < pairs, other=-1) == expert
        place = start + found + tl.cumsum(match.to(tl.int32), 0) - 1
        tl.store(sorted_pairs + place, pair, mask=match)
        found += tl.sum(match.to(tl.int32), 0)
        begin += CHUNK
    tl.store(starts + expert, start)
    tl.store(counts + expert, tl.where(tl.load(offsets + expert) >= 0, found, 0))


@triton.jit
def _sort_kernel(ids, offsets, pairs, sorted_pairs, starts, counts, CHUNK: tl.constexpr):
    """One program for each expert."""
    list_pairs(tl.program_id(0), ids, offsets, pairs, sorted_pairs, starts, counts, CHUNK)


@triton.jit
def _chosen(ids, pairs, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """The pairs of a program's block, the expert of each, and [BLOCK, EXPERTS], whether it is that."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + pair, mask=pair < pairs, other=-1).to(tl.int32)
    return pair, expert, expert[:, None] == tl.arange(0, EXPERTS)[None, :]


@triton.jit
def _count_blocks(ids, pairs, experts, counts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """counts [blocks, experts]: pairs of each expert in each block. One program for a block."""
    _, _, matches = _chosen(ids, pairs, BLOCK, EXPERTS)
    every = tl.arange(0, EXPERTS)
    tl.store(counts + tl.program_id(0) * experts + every, tl.sum(matches.to(tl.int32), 0), mask=every < experts)


@triton.jit
def _add_blocks(counts, totals, blocks, experts, CHUNK: tl.constexpr):
    """Make counts those of earlier blocks. totals: [experts], of all. One program for an expert."""
    expert = tl.program_id(0)
    total = tl.zeros((), tl.int32)
    begin = expert * 0
    while begin < blocks:
        block = begin + tl.arange(0, CHUNK)
        count = tl.load(counts + block * experts + expert, mask=block < blocks, other=0)
        tl.store(counts + block * experts + expert, total + tl.cumsum(count, 0) - count, mask=block < blocks)
        total += tl.sum(count, 0)
        begin += CHUNK
    tl.store(totals + expert, total)


@triton.jit
def _place_pairs(
    ids, offsets, pairs, experts, earlier, totals, sorted_pairs, starts, counts,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """One program for a block."""
    pair, expert, matches = _chosen(ids, pairs, BLOCK, EXPERTS)
    every = tl.arange(0, EXPERTS)
    known = every < experts
    total = tl.load(totals + every, mask=known, other=0)
    start = tl.cumsum(total, 0) - total
    if tl.program_id(0) == 0:
        tl.store(starts + every, start, mask=known)
        on_gpu = tl.load(offsets + every, mask=known, other=-1) >= 0
        tl.store(counts + every, tl.where(on_gpu, total, 0), mask=known)
    first = start + tl.load(earlier + tl.program_id(0) * experts + every, mask=known, other=0)
    number = tl.arange(0, BLOCK)
    before = (expert[:, None] == expert[None, :]) & (number[None, :] < number[:, None])
    place = tl.sum(tl.where(matches, first[None, :], 0), 1) + tl.sum(before.to(tl.int32), 1)
    tl.store(sorted_pairs + place, pair, mask=expert >= 0)


def sort_pairs(pairs: ExpertPairs) -> SortedPairs:
    """Sort the pairs by expert, on the device. Those of an expert stay in order."""
    lists, number, experts = SortedPairs.empty(pairs), pairs.ids.numel(), pairs.offsets.numel()
    if number <= MOST_READ_BY_EACH:
        _sort_kernel[(experts,)](pairs.ids, pairs.offsets, number, *lists, CHUNK=SORTED_AT_ONCE, num_warps=8)
        return lists
    blocks = triton.cdiv(number, _BLOCK)
    width = triton.next_power_of_2(experts)
    shape = {"BLOCK": _BLOCK, "EXPERTS": width, "num_warps": max(1, width // 128)}
    counts = torch.empty(blocks + 1, experts, dtype=torch.int32, device=pairs.ids.device)
    totals = counts[blocks]
    _count_blocks[(blocks,)](pairs.ids, number, experts, counts, **shape)
    _add_blocks[(experts,)](counts, totals, blocks, experts, CHUNK=_BLOCKS_AT_ONCE)
    _place_pairs[(blocks,)](pairs.ids, pairs.offsets, number, experts, counts, totals, *lists, **shape)
    return lists
