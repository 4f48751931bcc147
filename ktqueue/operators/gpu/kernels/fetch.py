"""The kernels behind fetched.py: which experts a step fetches, and the copy out of pinned host memory (a door to
triton)."""

import torch
import triton
import triton.language as tl

_WORD = 8  # bytes
_BLOCK = 2048  # words that a program copies: enough are under way for the whole bus, from two experts on
_PAIRS = 64  # that are compared with all experts at a time


@triton.jit(do_not_specialize=["pairs", "share", "area"])
def _divide_kernel(
    ids,
    resident,
    addresses,
    offsets_out,
    sources_out,
    cpu_ids_out,
    pairs,
    share,
    area,
    record,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
):
    """One program."""
    expert = tl.arange(0, EXPERT_BLOCK)
    used = tl.zeros([EXPERT_BLOCK], tl.int32)
    begin = tl.program_id(0) * 0
    while begin < pairs:  # the interpreter has no range of what is only known at run time
        pair = begin + tl.arange(0, PAIR_BLOCK)
        chosen = tl.load(ids + pair, mask=pair < pairs, other=-1)
        used = tl.maximum(used, tl.max((chosen[:, None] == expert[None, :]).to(tl.int32), 0))
        begin += PAIR_BLOCK
    here = tl.load(resident + expert, mask=expert < EXPERTS, other=0)
    absent = ((used > 0) & (here < 0)).to(tl.int32)
    slot = tl.cumsum(absent, 0) - absent
    quota = tl.minimum((share * tl.sum(absent, 0).to(tl.float32)).to(tl.int32), SLOTS)
    comes = (absent > 0) & (slot < quota)
    offset = tl.where(comes, area + slot.to(tl.int64) * record, here)
    tl.store(offsets_out + expert, offset, mask=expert < EXPERTS)
    empty = tl.arange(0, SLOT_BLOCK)
    for part in tl.static_range(PARTS):
        address = tl.load(addresses + expert * PARTS + part, mask=comes, other=0)
        tl.store(sources_out + slot * PARTS + part, address, mask=comes)
        tl.store(
            sources_out + empty * PARTS + part,
            tl.zeros([SLOT_BLOCK], tl.int64),
            mask=(empty >= quota) & (empty < SLOTS),
        )
    begin = tl.program_id(0) * 0
    while begin < pairs:
        pair = begin + tl.arange(0, PAIR_BLOCK)
        chosen = tl.load(ids + pair, mask=pair < pairs, other=-1)
        on_gpu = tl.max(((chosen[:, None] == expert[None, :]) & (offset >= 0)[None, :]).to(tl.int32), 1)
        tl.store(cpu_ids_out + pair, tl.where(on_gpu > 0, -1, chosen), mask=pair < pairs)
        begin += PAIR_BLOCK


@triton.jit(do_not_specialize=["area"])
def _fetch_kernel(sources, parts, memory, area, record, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Program (i, part, slot) copies the i-th block of a part. All sizes in words."""
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
    area: int,
    record: int,
    offsets: torch.Tensor,
    sources: torch.Tensor,
    cpu_ids: torch.Tensor,
) -> None:
    """See fetched.divide; one launch."""
    experts, parts = addresses.shape
    _divide_kernel[(1,)](
        ids, resident, addresses, offsets, sources, cpu_ids, ids.numel(), share, area, record,
        EXPERTS=experts,
        EXPERT_BLOCK=triton.next_power_of_2(experts),
        PARTS=parts,
        SLOTS=len(sources),
        SLOT_BLOCK=triton.next_power_of_2(len(sources)),
        PAIR_BLOCK=min(_PAIRS, triton.next_power_of_2(ids.numel())),
        num_warps=4,
    )  # fmt: skip


def fetch(
    sources: torch.Tensor, parts: torch.Tensor, longest: int, memory: torch.Tensor, area: int, record: int
) -> None:
    """See fetched.fetch; one launch. longest: bytes of the largest part."""
    slots, count = sources.shape
    _fetch_kernel[(triton.cdiv(longest, _WORD * _BLOCK), count, slots)](
        sources, parts, memory.view(torch.int64), area // _WORD, record // _WORD,
        PARTS=count, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
