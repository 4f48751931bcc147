"""Pairs of a token and an expert, sorted by expert on the device: one kernel, no sync."""

import torch
import triton
import triton.language as tl

_CHUNK = 2048


@triton.jit
def _sort_kernel(ids, offsets, pairs, sorted_pairs, starts, counts, CHUNK: tl.constexpr):
    """Program e finds the pairs of expert e, in order, and where they begin: after those of lower ids."""
    expert = tl.program_id(0)
    on_gpu = tl.load(offsets + expert) >= 0
    lower = tl.zeros((CHUNK,), tl.int32)
    begin = expert * 0
    while begin < pairs:  # the interpreter has no range of what is only known at run time
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
    tl.store(counts + expert, tl.where(on_gpu, found, 0))


def sort_pairs(ids: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids [pairs] int64 (negative: skip), offsets [experts] int64 (negative: skip) -> pairs by expert [pairs] int32,
    and for each expert where its own begin [experts] int32 and how many there are [experts] int32 (0 if skipped)."""
    sorted_pairs = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    starts = torch.empty(2, offsets.numel(), dtype=torch.int32, device=ids.device)
    _sort_kernel[(offsets.numel(),)](ids, offsets, ids.numel(), sorted_pairs, *starts, CHUNK=_CHUNK, num_warps=8)
    return sorted_pairs, starts[0], starts[1]
