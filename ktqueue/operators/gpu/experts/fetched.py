"""Some of the experts that a step uses and the GPU has not come to it over the bus, the CPU computes the others.

Both read the same memory at the same time, and together they read more of it. The step is captured before anybody knows
which experts it will use, so kernels choose and copy them: `divide` behind the router, `fetch` out of pinned host
memory. Each has a Triton kernel for CUDA tensors and a plain torch twin for others. Knows no layer.
"""

from collections.abc import Sequence

import torch

from ktqueue.operators.gpu.copy_stream import host_bytes

Ranges = Sequence[tuple[int, int]]
"""(address, bytes) one after the other."""


def parts_of(ranges: Ranges, others: Sequence[Ranges]) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """How experts of one layer lie in host memory, `ranges` of the first and `others` of all: the parts that all have
    in common, (start, bytes) in a record, and the address of each part of each expert.

    Ranges may touch in some of them and not in others. Raises ValueError where sizes differ.
    """
    starts = sorted({start for one in (ranges, *others) for start in _starts(one)})
    size = sum(held for _, held in ranges)
    parts = [(start, end - start) for start, end in zip(starts, [*starts[1:], size], strict=True)]
    addresses = []
    for one in others:
        if sum(held for _, held in one) != size:
            raise ValueError(f"experts of a layer have {size} bytes, not {sum(held for _, held in one)}")
        addresses.append([_address(one, start) for start, _ in parts])
    return parts, addresses


def divide(
    ids: torch.Tensor,
    resident: torch.Tensor,
    addresses: torch.Tensor,
    share: float,
    area: int,
    record: int,
    *,
    offsets: torch.Tensor,
    sources: torch.Tensor,
    cpu_ids: torch.Tensor,
) -> None:
    """Choose `share` (from 0 to 1, rounded down to whole experts) of those that are used and not resident, the lowest
    numbers first.

    ids [tokens, k] int64, negative: none; resident [experts] int64: offset of the expert's record, negative: absent;
    addresses [experts, parts] int64: in host memory; area: offset of the first fetched record, each of `record` bytes.
    Written: offsets [experts] int64, as `resident` but with those that come; sources [slots, parts] int64: the
    addresses of what is to be fetched, 0: nothing; no more come than there are slots; cpu_ids [tokens, k] int64: as
    ids, and -1 where the GPU has the expert or gets it.
    """
    if ids.is_cuda:
        from ktqueue.operators.gpu.kernels import fetch as triton_fetch

        triton_fetch.divide(ids.contiguous(), resident, addresses, share, area, record, offsets, sources, cpu_ids)
        return
    used = torch.bincount(ids[ids >= 0], minlength=len(resident)) > 0
    absent = torch.where(used & (resident < 0))[0]
    coming = absent[: min(int(share * len(absent)), len(sources))]
    offsets.copy_(resident)
    offsets[coming] = area + record * torch.arange(len(coming))
    sources.zero_()
    sources[: len(coming)] = addresses[coming]
    cpu_ids.copy_(torch.where((ids >= 0) & (offsets[ids.clamp(min=0)] >= 0), -1, ids))


def fetch(
    sources: torch.Tensor,
    parts: torch.Tensor,
    sizes: Sequence[tuple[int, int]],
    memory: torch.Tensor,
    area: int,
    record: int,
) -> None:
    """Copy what `divide` has chosen to its place in `memory` [bytes] uint8.

    sizes: (start, bytes) of the parts, multiples of 16; parts: the same in words of 8 bytes, [parts, 2] int64 where
    `memory` is. The host memory must be pinned if `memory` is on a GPU.
    """
    if memory.is_cuda:
        from ktqueue.operators.gpu.kernels import fetch as triton_fetch

        triton_fetch.fetch(sources, parts, max(size for _, size in sizes), memory, area, record)
        return
    for slot, row in enumerate(sources.tolist()):
        for address, (start, size) in zip(row, sizes, strict=True):
            if address:
                begin = area + slot * record + start
                memory[begin : begin + size] = host_bytes(address, size)


def _starts(ranges: Ranges) -> list[int]:
    """Where each range begins in the record."""
    starts, at = [], 0
    for _, size in ranges:
        starts.append(at)
        at += size
    return starts


def _address(ranges: Ranges, start: int) -> int:
    """Of byte `start` of the record."""
    for (address, size), begin in zip(ranges, _starts(ranges), strict=True):
        if begin <= start < begin + size:
            return address + start - begin
    raise ValueError(f"a record ends before byte {start}")
