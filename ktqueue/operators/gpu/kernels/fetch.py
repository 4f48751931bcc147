"""Fetching experts from pinned host memory within a step: which of them the GPU fetches, and the copy itself.

While the GPU fetches a share of the experts that it lacks, the CPU computes the others. Both read host memory at the
same time, and together they read more of it. A step is captured before anyone knows which experts it will use, so
kernels choose and copy them: `divide` after the router, then `fetch`. Knows no layer.
"""

from collections.abc import Sequence

import torch

from ktqueue.operators import native
from ktqueue.operators.gpu.kernels.operation import launch_options, runs_kernel, tl, triton, wait_for_previous

_WORD = 8
"""Bytes of a word."""
_BLOCK = 2048
"""Words that a program copies. From two experts on, enough are in flight for the whole bus."""
_PAIRS = 64
"""Pairs that are compared with all experts at a time."""


@triton.jit(do_not_specialize=["pairs", "share", "area"])
def _divide_kernel(
    ids, resident, addresses, allowed, offsets_out, sources_out, cpu_ids_out, pairs, share, area, record,
    EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr,
    SLOT_BLOCK: tl.constexpr, PAIR_BLOCK: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """One program in all."""
    wait_for_previous(WAITS)
    expert = tl.arange(0, EXPERT_BLOCK)
    used = tl.zeros([EXPERT_BLOCK], tl.int32)
    begin = tl.program_id(0) * 0
    while begin < pairs:  # the interpreter has no range over run-time values
        pair = begin + tl.arange(0, PAIR_BLOCK)
        chosen = tl.load(ids + pair, mask=pair < pairs, other=-1)
        used = tl.maximum(used, tl.max((chosen[:, None] == expert[None, :]).to(tl.int32), 0))
        begin += PAIR_BLOCK
    present = tl.load(resident + expert, mask=expert < EXPERTS, other=0)
    absent = ((used > 0) & (present < 0)).to(tl.int32)
    slot = tl.cumsum(absent, 0) - absent
    quota = tl.minimum((share * tl.load(allowed) * tl.sum(absent, 0).to(tl.float32)).to(tl.int32), SLOTS)
    fetched = (absent > 0) & (slot < quota)
    offset = tl.where(fetched, area + slot.to(tl.int64) * record, present)
    tl.store(offsets_out + expert, offset, mask=expert < EXPERTS)
    unused = tl.arange(0, SLOT_BLOCK)
    for part in tl.static_range(PARTS):
        address = tl.load(addresses + expert * PARTS + part, mask=fetched, other=0)
        tl.store(sources_out + slot * PARTS + part, address, mask=fetched)
        tl.store(
            sources_out + unused * PARTS + part,
            tl.zeros([SLOT_BLOCK], tl.int64),
            mask=(unused >= quota) & (unused < SLOTS),
        )
    begin = tl.program_id(0) * 0
    while begin < pairs:
        pair = begin + tl.arange(0, PAIR_BLOCK)
        chosen = tl.load(ids + pair, mask=pair < pairs, other=-1)
        on_gpu = tl.max(((chosen[:, None] == expert[None, :]) & (offset >= 0)[None, :]).to(tl.int32), 1)
        tl.store(cpu_ids_out + pair, tl.where(on_gpu > 0, -1, chosen), mask=pair < pairs)
        begin += PAIR_BLOCK


@triton.jit(do_not_specialize=["area"])
def _fetch_kernel(
    sources, parts, memory, area, record, PARTS: tl.constexpr, BLOCK: tl.constexpr, WAITS: tl.constexpr
):  # fmt: skip
    """Program (i, part, slot) copies the i-th block of a part. All sizes in words."""
    wait_for_previous(WAITS)
    part, slot = tl.program_id(1), tl.program_id(2)
    source = tl.load(sources + slot * PARTS + part)
    start, size = tl.load(parts + 2 * part), tl.load(parts + 2 * part + 1)
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (word < size) & (source != 0)
    pinned = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
    target = tl.multiple_of(area + slot.to(tl.int64) * record + start, 2)
    tl.store(memory + target + word, tl.load(pinned + word, mask=inside, other=0), mask=inside)


def divide(
    ids: torch.Tensor,
    resident: torch.Tensor,
    addresses: torch.Tensor,
    share: float,
    allowed: torch.Tensor,
    area: int,
    record: int,
    *,
    offsets: torch.Tensor,
    sources: torch.Tensor,
    cpu_ids: torch.Tensor,
) -> None:
    """Choose experts to fetch: `share` (0 to 1, rounded down) of those that are used and absent, lowest ids first.
    allowed: [1] float32, 1, or 0 while nothing may be fetched.

    ids [tokens, k] int64, negative: none; resident [experts] int64: offset of the expert's record, negative: absent;
    addresses [experts, parts] int64 in host memory; area: offset of the first fetched record, each of `record` bytes.
    Writes offsets [experts] int64: `resident` with the fetched experts added; sources [slots, parts] int64: the
    addresses to fetch from, 0: nothing; at most one expert per slot is fetched; cpu_ids [tokens, k] int64: `ids`, but
    -1 where the GPU has or fetches the expert.
    """
    if runs_kernel(ids):
        experts, parts = addresses.shape
        _divide_kernel[(1,)](
            ids.contiguous(), resident, addresses, allowed, offsets, sources, cpu_ids, ids.numel(), share, area, record,
            EXPERTS=experts,
            EXPERT_BLOCK=triton.next_power_of_2(experts),
            PARTS=parts,
            SLOTS=len(sources),
            SLOT_BLOCK=triton.next_power_of_2(len(sources)),
            PAIR_BLOCK=min(_PAIRS, triton.next_power_of_2(ids.numel())),
            **launch_options(),
            num_warps=4,
        )  # fmt: skip
        return
    used = torch.bincount(ids[ids >= 0], minlength=len(resident)) > 0
    absent = torch.where(used & (resident < 0))[0]
    fetched = absent[: min(int(share * float(allowed) * len(absent)), len(sources))]
    offsets.copy_(resident)
    offsets[fetched] = area + record * torch.arange(len(fetched))
    sources.zero_()
    sources[: len(fetched)] = addresses[fetched]
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

    sizes: (start, bytes) of the parts, multiples of 16; parts: the same in words of 8 bytes, [parts, 2] int64 on the
    device of `memory`. The host memory must be pinned if `memory` is on a GPU.
    """
    if runs_kernel(memory):
        longest = max(size for _, size in sizes)
        slots, count = sources.shape
        _fetch_kernel[(triton.cdiv(longest, _WORD * _BLOCK), count, slots)](
            sources, parts, memory.view(torch.int64), area // _WORD, record // _WORD,
            PARTS=count, BLOCK=_BLOCK, **launch_options(), num_warps=4,
        )  # fmt: skip
        return
    for slot, row in enumerate(sources.tolist()):
        for address, (start, size) in zip(row, sizes, strict=True):
            if address:
                begin = area + slot * record + start
                memory[begin : begin + size] = native.host_bytes(address, size)
