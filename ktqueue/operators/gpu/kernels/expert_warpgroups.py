"""Products of many tokens with packed experts on Hopper's tensor cores: how two kernels in CUDA C++ are launched.

Weights are decoded to bfloat16 between shared memory and the tensor cores: again for every 128 pairs (of a token and
an expert) of an expert, or for every 256 by the wide kernel. So nothing decoded is written to memory, as
decoded_experts.py does it. Gate and up are joined in float32; the rows between both products and those of down are
rounded to bfloat16. The weighted sum is float32 and in the order of a token's slots. Both kernels add in the same
order, so a pair has the same bits by both.

The kernels are CUDA C++, since Triton cannot say which weights a lane of a warp has. Knows no layer and no placement.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from ktqueue.operators.gpu.device import has_warpgroups
from ktqueue.operators.gpu.kernels import expert_products, panel_layout
from ktqueue.operators.gpu.kernels.cuda_kernel import CudaKernel
from ktqueue.operators.gpu.kernels.expert_matrices import ProductFacts, options, product_constants
from ktqueue.operators.gpu.kernels.expert_pairs import ExpertPairs, SortedPairs, sort_pairs
from ktqueue.operators.gpu.kernels.operation import check_fits, runs_kernel, tl, triton
from ktqueue.operators.gpu.kernels.panel_layout import ExpertRecord
from ktqueue.operators.native import GateFacts

_CHUNK_COLUMNS, _STAGES = 64, 2  # as in the sources
_ARCHITECTURE = "90a"
_LINE_BYTES = 128
_SHARED_BYTES = 227 << 10
"""That a program may have on Hopper."""
_MOST_COLUMNS = 1024
"""Columns that one program adds."""
_ROW_STEP = 256
"""A matrix has a multiple of so many rows. The wide kernel could do with 128."""
_WORDS = 1024
"""Of 4 bytes, that a program puts in the order of the kernel."""
LEAST_PAIRS = 20
"""Of an expert, on average, from which on this is faster than int8 matrices (ADR 0076)."""
LEAST_WIDE_PAIRS = 384
"""Of an expert, on average, from which on the wide kernel is faster than the narrow one (ADR 0076)."""


class WarpgroupKernel(NamedTuple):
    """A source of products by warpgroups. pairs: of an expert that are multiplied by weights that are decoded once.

    threads, panels: of a program. slots: the numbers of chunks of x in shared memory from which the first that fits is
    taken. exchanged_bytes: shared memory in which gate and up meet.
    """

    source: Path
    name: str
    pairs: int
    threads: int
    panels: int
    slots: tuple[int, ...]
    exchanged_bytes: int

    def shared_bytes(self, facts: ProductFacts) -> tuple[int, int]:
        """Chunks of x in shared memory, and its bytes beside what the source declares. Raises ValueError if a program
        cannot have so much."""
        slot = -(-panel_layout.superblock_bytes(facts.quant) // _LINE_BYTES) * _LINE_BYTES
        others = self.panels * _STAGES * slot + (self.exchanged_bytes if facts.gate else 0)
        own = 4 * facts.experts + 3 * (4 * self.pairs + 16) + 128 + 1024
        for slots in self.slots:
            needed = slots * self.pairs * 2 * _CHUNK_COLUMNS + others
            if needed + own <= _SHARED_BYTES:
                return slots, needed
        raise ValueError(f"{facts.experts} experts of {facts.quant} need more than {_SHARED_BYTES} bytes at once")

    def constants(self, facts: ProductFacts) -> dict[str, str | int]:
        """The constants of the source, by name."""
        return product_constants(facts) | {"PAIRS": self.pairs, "CHUNK_SLOTS": self.shared_bytes(facts)[0]}


_FOLDER = Path(__file__).parent
NARROW = WarpgroupKernel(_FOLDER / "expert_warpgroups.cu", "multiply_many", 128, 256, 16, (5,), 0)
WIDE = WarpgroupKernel(_FOLDER / "expert_wide_warpgroups.cu", "multiply_very_many", 256, 384, 8, (5, 4), 1 << 14)


def kernel_for(pairs: int, experts: int) -> WarpgroupKernel:
    """The kernel for so many pairs of a layer of `experts` experts."""
    return WIDE if pairs >= LEAST_WIDE_PAIRS * experts else NARROW


def pays(pairs: int, experts: int) -> bool:
    """Whether a layer of `experts` experts multiplies so many pairs faster in this way."""
    return pairs >= LEAST_PAIRS * experts


def fits(record: ExpertRecord) -> bool:
    """Whether the kernels have the formats and sizes of such experts."""
    formats = record.gate == record.up and not {record.gate, record.down} & {*panel_layout.FLOAT_PRODUCTS}
    return formats and record.hidden % _ROW_STEP == 0 and record.intermediate % _ROW_STEP == 0


def can_multiply(record: ExpertRecord, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `device` multiplies rows of `dtype` by such experts. CPU tensors are multiplied by a twin, if asked to,
    since that is not faster."""
    return has_warpgroups(device) and fits(record) and dtype == torch.bfloat16


@cache
def _kernel(kernel: WarpgroupKernel, facts: ProductFacts) -> CudaKernel:
    known, shared = options(kernel.constants(facts)), kernel.shared_bytes(facts)[1]
    return CudaKernel(kernel.source, known, kernel.name, kernel.threads, shared, _ARCHITECTURE)


def product_facts(record: ExpertRecord, experts: int, gate: GateFacts, *, biased: bool) -> list[ProductFacts]:
    """Those of both products of a layer."""
    of_gate = ProductFacts(
        record.gate, experts, record.hidden, record.intermediate, gate, biased, bool(gate.weighted_input)
    )
    return [of_gate, ProductFacts(record.down, experts, record.intermediate, record.hidden, None)]


def compile_products(products: Iterable[tuple[WarpgroupKernel, ProductFacts]]) -> None:
    """Compile the kernels in threads, so that no step has to. A few seconds each, unless they are kept on disk."""
    with ThreadPoolExecutor() as threads:
        for product in dict.fromkeys(products):
            _kernel(*product).compile_in(threads)


def experts(
    pairs: ExpertPairs, down_offsets: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, gate: GateFacts
) -> torch.Tensor:
    """Return the sum over slots of weight * expert(x), or of expert(weight * x) if the gate says so: [tokens, 1,
    hidden] float32. Skipped pairs add nothing.

    Arguments as in expert_products.experts, x bfloat16 on a GPU. Raises ValueError for shapes that do not fit.
    """
    record, (tokens, slots) = pairs.record, pairs.ids.shape
    fits = len(x) == tokens and x.shape[1] == record.hidden and pairs.ids.is_contiguous()
    check_fits(fits, "experts of warpgroups", ids=pairs.ids, x=x)
    weights = weights.contiguous()
    of_input, of_output = (weights, None) if gate.weighted_input else (None, weights)
    mid = x.new_empty(tokens, slots, record.intermediate)
    products = x.new_empty(tokens * slots, record.hidden)
    down_pairs = pairs._replace(offsets=down_offsets)
    if runs_kernel(x):
        lists = sort_pairs(pairs)
        kernel = kernel_for(tokens * slots, pairs.offsets.numel())
        biases = None if pairs.biases is None else (pairs.biases.gate, pairs.biases.up)
        rows = mid.view(tokens * slots, -1)
        _launch(kernel, pairs, lists, in_kernel_order(x), record.gate, rows, gate, of_input, biases)
        _launch(kernel, down_pairs, lists, mid, record.down, products, None, None, None, start=record.down_start)
    else:
        expert_products.gate_up_twin(pairs, x, gate, mid, of_input)
        partials = torch.empty(tokens, slots, record.hidden)
        rows = mid.view(tokens * slots, -1)
        expert_products.down_twin(down_pairs._replace(biases=None), rows, None, partials)
        products.copy_(partials.view(products.shape))
    return add_pairs(pairs, products, of_output)


def in_kernel_order(x: torch.Tensor) -> torch.Tensor:
    """x [rows, columns] of 2 bytes -> the same, of each 32 columns 8t + 4s + 2h + e at 16s + 8h + 2t + e."""
    words = x.contiguous().view(torch.int32)
    if not runs_kernel(x):
        return words.view(-1, 4, 2, 2).permute(0, 2, 3, 1).reshape(words.shape).view(x.dtype)
    out = torch.empty_like(words)
    if words.numel():
        _order_words[(triton.cdiv(words.numel(), _WORDS),)](words, out, words.numel(), BLOCK=_WORDS)
    return out.view(x.dtype)


@triton.jit
def _order_words(x, out, words, BLOCK: tl.constexpr):
    """One program for BLOCK words of two columns."""
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = word < words
    source = word // 16 * 16 + word % 4 * 4 + word // 8 % 2 * 2 + word // 4 % 2
    tl.store(out + word, tl.load(x + source, mask=inside), mask=inside)


def _launch(
    kernel: WarpgroupKernel,
    pairs: ExpertPairs,
    lists: SortedPairs,
    x: torch.Tensor,
    quant: str,
    out: torch.Tensor,
    gate: GateFacts | None,
    weights: torch.Tensor | None,
    biases: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    start: int = 0,
) -> None:
    experts, columns, rows = pairs.offsets.numel(), x.shape[-1], out.shape[1]
    facts = ProductFacts(quant, experts, columns, rows, gate, biases is not None, weights is not None)
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    _kernel(kernel, facts).launch(
        (programs, 1),
        [
            pairs.pool, pairs.offsets, x, out if weights is None else weights, *(biases or (out, out)), out, *lists,
            pairs.ids.shape[1], start,
        ],
    )  # fmt: skip


@triton.jit
def _add_pairs(
    products,  # [tokens, SLOTS, HIDDEN]
    ids,  # [tokens, SLOTS]
    offsets,
    pair_weights,  # [tokens, SLOTS] float32
    bias,  # [experts, HIDDEN] float32 or None
    out,  # [tokens, HIDDEN] float32
    SLOTS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for BLOCK columns of a token."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(SLOTS):
        pair = token * SLOTS + slot
        expert = tl.load(ids + pair)
        used = (expert >= 0) & (tl.load(offsets + tl.maximum(expert, 0)) >= 0)
        inside = (n < HIDDEN) & used
        value = tl.load(products + pair * HIDDEN + n, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            value += tl.load(bias + expert * HIDDEN + n, mask=inside, other=0.0)
        if WEIGHTED:
            value = tl.where(inside, value * tl.load(pair_weights + pair), 0.0)  # of a skipped pair it may be NaN
        total += value
    tl.store(out + token * HIDDEN + n, total, mask=n < HIDDEN)


def add_pairs(pairs: ExpertPairs, products: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Add weight * (product + bias) over the slots of each token: [tokens, 1, hidden] float32.

    products: [pairs, hidden], undefined for skipped pairs; weights: [tokens, k] float32; None: all 1.
    """
    tokens, slots = pairs.ids.shape
    hidden, bias = products.shape[1], None if pairs.biases is None else pairs.biases.down
    out = torch.empty(tokens, 1, hidden, device=products.device)
    if runs_kernel(products) and tokens:
        block = min(triton.next_power_of_2(hidden), _MOST_COLUMNS)
        _add_pairs[(tokens, triton.cdiv(hidden, block))](
            products, pairs.ids, pairs.offsets, out if weights is None else weights, bias, out,
            SLOTS=slots,
            WEIGHTED=weights is not None,
            HIDDEN=hidden,
            BLOCK=block,
            num_warps=max(block // 256, 1),
        )  # fmt: skip
        return out
    used = (pairs.ids >= 0) & (pairs.offsets[pairs.ids.clamp(min=0)] >= 0)
    terms = torch.zeros(tokens, slots, hidden)
    terms[used] = products.view(terms.shape)[used].float() + (0.0 if bias is None else bias[pairs.ids[used]])
    if weights is not None:
        terms[used] *= weights[used][:, None]
    out.zero_()
    for slot in range(slots):
        out[:, 0] += terms[:, slot]
    return out
