"""Products of many tokens with packed experts on Hopper's tensor cores: how expert_warpgroups.cu is launched.

Weights are decoded to bfloat16 between shared memory and the tensor cores: again for every 288 pairs (of a token and an
expert) of an expert, or for every 128 where experts have few. So nothing decoded is written to memory, as
decoded_experts.py does it. Gate and up are joined in float32; the rows between both products and those of down are
rounded to bfloat16. A pair has the same bits beside any others.

The kernel is CUDA C++, since Triton cannot say which weights a lane of a warp has. Knows no layer and no placement.
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
from ktqueue.operators.gpu.kernels.norm import in_order
from ktqueue.operators.gpu.kernels.operation import check_fits, runs_kernel
from ktqueue.operators.gpu.kernels.panel_layout import ExpertRecord
from ktqueue.operators.native import GateFacts

SOURCE = Path(__file__).with_suffix(".cu")
NAME = "multiply_many"
_THREADS = 384
_CHUNK_COLUMNS, _PANELS, _STAGES, _INFOS, _EXCHANGED_BYTES = 64, 8, 2, 3, 1 << 14  # as in the source
_CHUNK_SLOTS = 5, 4, 3
"""Chunks of x in shared memory. The first number that fits is taken."""
_ARCHITECTURE = "90a"
_LINE_BYTES = 128
_SHARED_BYTES = 227 << 10
"""That a program may have on Hopper."""
_ROW_STEP = 256
"""A matrix has a multiple of so many rows and columns, which are whole superblocks."""
LEAST_PAIRS = 20
"""Of an expert, on average, from which on this is faster than int8 matrices (ADR 0076)."""
LEAST_WIDE_PAIRS = 100
"""Of an expert, on average, from which on `WIDE` is faster than `NARROW` (ADR 0086)."""


class WarpgroupKernel(NamedTuple):
    """The kernel for some numbers of columns, each a multiple of 16 up to 288, in ascending order.

    A list of an expert's pairs is multiplied by the fewest `widths` that it needs. With five of them, registers would
    not suffice. takes_jobs: whether a program that is done takes the next job. Otherwise each has every 132nd, which is
    faster where jobs are short.
    """

    widths: tuple[int, ...]
    takes_jobs: bool

    @property
    def pairs(self) -> int:
        """Of an expert, that are multiplied by weights that are decoded once."""
        return self.widths[-1]

    def shared_bytes(self, facts: ProductFacts) -> tuple[int, int]:
        """Chunks of x in shared memory, and its bytes beside what the source declares. Raises ValueError if a program
        cannot have so much."""
        slot = -(-panel_layout.superblock_bytes(facts.quant) // _LINE_BYTES) * _LINE_BYTES
        others = _PANELS * _STAGES * slot + (_EXCHANGED_BYTES if facts.gate else 0)
        own = 4 * facts.experts + _INFOS * (8 * self.pairs + 16) + 128 + 1024
        for slots in _CHUNK_SLOTS:
            needed = slots * self.pairs * 2 * _CHUNK_COLUMNS + others
            if needed + own <= _SHARED_BYTES:
                return slots, needed
        raise ValueError(f"{facts.experts} experts of {facts.quant} need more than {_SHARED_BYTES} bytes at once")

    def constants(self, facts: ProductFacts) -> dict[str, str | int]:
        """The constants of the source, by name."""
        return product_constants(facts) | {
            "PAIRS": self.pairs,
            "WIDTHS": ",".join(map(str, self.widths)),
            "TAKES_JOBS": int(self.takes_jobs),
            "CHUNK_SLOTS": self.shared_bytes(facts)[0],
        }


NARROW = WarpgroupKernel((32, 64, 96, 128), takes_jobs=False)
WIDE = WarpgroupKernel((128, 192, 256, 288), takes_jobs=True)


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
    return CudaKernel(SOURCE, known, NAME, _THREADS, shared, _ARCHITECTURE)


def product_facts(record: ExpertRecord, experts: int, gate: GateFacts, *, biased: bool) -> list[ProductFacts]:
    """Those of both products of a layer."""
    hidden, intermediate = record.hidden, record.intermediate
    weighs_x = bool(gate.weighted_input)
    return [
        ProductFacts(record.gate, experts, hidden, intermediate, gate, biased, weighs_x),
        ProductFacts(record.down, experts, intermediate, hidden, None, biased, not weighs_x),
    ]


def compile_products(products: Iterable[tuple[WarpgroupKernel, ProductFacts]]) -> None:
    """Compile the kernels in threads, so that no step has to. A few seconds each, unless they are kept on disk."""
    with ThreadPoolExecutor() as threads:
        for product in dict.fromkeys(products):
            _kernel(*product).compile_in(threads)


def experts(
    pairs: ExpertPairs,
    down_offsets: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    gate: GateFacts,
    ordered: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return weight * expert(x) of each pair, or expert(weight * x) if the gate says so: [tokens, slots, hidden] of x's
    dtype. Rows of skipped pairs are zero.

    Arguments as in expert_products.experts, x bfloat16 on a GPU. ordered: x as of norm.in_order, if it is known.
    Raises ValueError for shapes that do not fit.
    """
    record, (tokens, slots) = pairs.record, pairs.ids.shape
    fits = len(x) == tokens and x.shape[1] == record.hidden and pairs.ids.is_contiguous()
    check_fits(fits, "experts of warpgroups", ids=pairs.ids, x=x)
    weights = weights.contiguous()
    of_input, of_output = (weights, None) if gate.weighted_input else (None, weights)
    mid = x.new_empty(tokens, slots, record.intermediate)
    partials = x.new_empty(tokens, slots, record.hidden)
    down_pairs = pairs._replace(offsets=down_offsets)
    rows = mid.view(tokens * slots, -1)
    if runs_kernel(x):
        lists = sort_pairs(pairs)
        kernel = kernel_for(tokens * slots, pairs.offsets.numel())
        counters = torch.zeros(2, 1, dtype=torch.int32, device=x.device) if kernel.takes_jobs else (lists.counts,) * 2
        ordered = in_order(x) if ordered is None else ordered
        _launch(kernel, pairs, lists, counters[0], ordered, record.gate, mid, gate, of_input)
        _launch(
            kernel, down_pairs, lists, counters[1], rows, record.down, partials, None, of_output,
            start=record.down_start,
        )  # fmt: skip
    else:
        expert_products.gate_up_twin(pairs, x, gate, mid, of_input)
        exact = torch.empty(tokens, slots, record.hidden)
        expert_products.down_twin(down_pairs, rows, of_output, exact)
        partials.copy_(exact)
    return partials


def _launch(
    kernel: WarpgroupKernel,
    pairs: ExpertPairs,
    lists: SortedPairs,
    counter: torch.Tensor,
    x: torch.Tensor,
    quant: str,
    out: torch.Tensor,
    gate: GateFacts | None,
    weights: torch.Tensor | None,
    *,
    start: int = 0,
) -> None:
    experts, columns, rows = pairs.offsets.numel(), x.shape[-1], out.shape[-1]
    known = pairs.biases
    biases = (out, out) if known is None else (known.gate, known.up) if gate else (known.down, known.down)
    facts = ProductFacts(quant, experts, columns, rows, gate, known is not None, weights is not None)
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    _kernel(kernel, facts).launch(
        (programs, 1),
        [
            pairs.pool, pairs.offsets, pairs.ids, x, out if weights is None else weights, *biases, out, *lists,
            counter, pairs.ids.numel(), pairs.ids.shape[1], start,
        ],
    )  # fmt: skip
