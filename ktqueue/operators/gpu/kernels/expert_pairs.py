"""Pairs of a token and an expert that it chose, and their order by expert.

The experts are packed in GPU memory. One expert is a *record* of bytes in a pool: see panel_layout.ExpertRecord.
"""

from typing import NamedTuple

import torch

from ktqueue.operators.gpu.kernels.operation import tl, triton
from ktqueue.operators.gpu.kernels.panel_layout import ExpertRecord

SORTED_AT_ONCE = 2048
"""Pairs that a program of the sort reads at a time."""


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
    experts, or None.
    """

    pool: torch.Tensor
    offsets: torch.Tensor
    ids: torch.Tensor
    record: ExpertRecord
    biases: ExpertBiases | None = None


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


def sort_pairs(pairs: ExpertPairs) -> SortedPairs:
    """Sort the pairs by expert, on the device."""
    lists = SortedPairs.empty(pairs)
    _sort_kernel[(pairs.offsets.numel(),)](
        pairs.ids, pairs.offsets, pairs.ids.numel(), *lists, CHUNK=SORTED_AT_ONCE, num_warps=8
    )
    return lists
