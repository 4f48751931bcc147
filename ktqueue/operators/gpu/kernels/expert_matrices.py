"""Products of some tokens with packed experts, by int8 matrices on tensor cores: how expert_matrices.cu is launched.

The rows are those of expert_int8.py: `prepare` quantises x and sorts the pairs (of a token and an expert), and these
`gate_up` and `down` stand for the ones there. A program multiplies weights that it has decoded by eight pairs of an
expert at the cost of one. The result of a pair does not depend on other pairs.

The kernel is CUDA C++, since Triton cannot say which weights a lane of a warp has. It is compiled at first use.
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from ktqueue.operators.gpu.device import is_gpu, program_bytes
from ktqueue.operators.gpu.kernels import dots, panel_layout
from ktqueue.operators.gpu.kernels.cuda_kernel import CudaKernel
from ktqueue.operators.gpu.kernels.expert_int8 import Int8Rows
from ktqueue.operators.gpu.kernels.expert_pairs import ExpertPairs, SortedPairs
from ktqueue.operators.gpu.kernels.expert_tiles import MatrixTile, MatrixTiles
from ktqueue.operators.gpu.kernels.operation import launch_options
from ktqueue.operators.gpu.kernels.panel_layout import PANEL_ROWS, SLAB, SLABS, ExpertRecord
from ktqueue.operators.native import GateFacts

SOURCE = Path(__file__).with_suffix(".cu")
NAME = "multiply_experts"
_MULTIPROCESSOR_BYTES = 228 << 10
"""Shared memory of a multiprocessor. Where it is less, fewer programs run at once."""
_LINE_BYTES = 128
"""Of all banks of shared memory."""
_OWN_BYTES = 1 << 10
"""Shared memory that a program takes beside what the kernel declares."""
_KNOWN_PAIRS = 512
"""Most pairs of a step whose sorted list is in shared memory of programs with runs."""
_WARPS = 16
"""That a multiprocessor can hold of the kernel, by registers: 128 of a thread."""
_ENOUGH_WARPS = 12
"""Of a multiprocessor. With so many, larger programs gain nothing."""
_EXPERTS_OF_A_THREAD = 2
"""Whose pairs a thread of a program with runs may count, before more threads are faster."""
_FEWEST_WARPS = 8
"""Of a program that has a multiprocessor for itself."""
_SMALLEST_CAPABILITY = (8, 0)
"""Copies to shared memory that do not wait, and these products of int8, are in every GPU from here on."""


def fitting_tiles(record: ExpertRecord, experts: int, tiles: MatrixTiles, device: torch.device) -> MatrixTiles | None:
    """`tiles`, as `filling_tile` changes them. None: the kernel cannot multiply such experts on such a device."""
    if not is_gpu(device) or record.gate != record.up or {record.gate, record.down} & {*panel_layout.FLOAT_PRODUCTS}:
        return None
    if torch.cuda.get_device_capability(device) < _SMALLEST_CAPABILITY:
        return None
    largest = program_bytes(device)
    gate_up = filling_tile(record.gate, experts, record.hidden, tiles.gate_up, largest)
    down = filling_tile(record.down, experts, record.intermediate, tiles.down, largest)
    return MatrixTiles(gate_up, down) if gate_up and down else None


@cache
def filling_tile(quant: str, experts: int, columns: int, tile: MatrixTile, shared_bytes: int) -> MatrixTile | None:
    """`tile` as of `fitting_tile`, or with up to twice the warps.

    They are more for few pairs, where a multiprocessor would hold few warps and then holds more, or where a thread
    would count the pairs of many experts.
    """
    best = fitting_tile(quant, experts, columns, tile, shared_bytes)
    if best is None or not best.reads_once or 2 * best.warps > _WARPS:
        return best
    wider = fitting_tile(quant, experts, columns, best._replace(warps=2 * best.warps), shared_bytes)
    if wider is None or wider.warps <= best.warps:
        return best
    held, more = (warps_at_once(quant, experts, columns, one) for one in (best, wider))
    is_faster = held < min(more, _ENOUGH_WARPS) or experts > _EXPERTS_OF_A_THREAD * 32 * best.warps
    return wider if is_faster else best


def fitting_tile(quant: str, experts: int, columns: int, tile: MatrixTile, shared_bytes: int) -> MatrixTile | None:
    """`tile` with fewer warps or fewer pairs, where a program's shared memory is short. None: not even that fits."""
    fewest = min(tile.warps, _FEWEST_WARPS)
    for pairs in range(tile.pairs, 0, -8):
        for warps in range(tile.warps, fewest - 1, -2):
            smaller = tile._replace(pairs=pairs, warps=warps)
            if _shared_bytes(quant, columns, smaller) + _own_bytes(experts, smaller) - _OWN_BYTES <= shared_bytes:
                return smaller
    return None


def _shared_bytes(quant: str, columns: int, tile: MatrixTile) -> int:
    """Shared memory for rows of x with what scales them, and for superblocks."""
    form, slabs = panel_layout.panel_format(quant), columns // SLAB
    parts = 2 if dots.halves(form) else 1
    sums = -(-slabs // SLABS) * SLABS * parts if dots.minimums(form) else 0
    rows = tile.pairs * (slabs * (SLAB * parts + 4) + 4 * sums)
    slot = -(-panel_layout.superblock_bytes(quant) // _LINE_BYTES) * _LINE_BYTES
    return rows + tile.warps * tile.stages * 2 * slot


def _own_bytes(experts: int, tile: MatrixTile) -> int:
    """Shared memory for lists of pairs and for what warps tell each other, and for the GPU itself."""
    known = 4 * (_KNOWN_PAIRS + experts // 32 + 1) if tile.has_runs else 0
    return _OWN_BYTES + known + 20 * experts + tile.pairs * (12 + 12 * tile.warps)


class ProductFacts(NamedTuple):
    """What a kernel of experts is compiled for: matrices [rows, columns] of `quant`. gate: of gate and up; None: it is
    one matrix. is_weighted: whether rows of pairs are multiplied by their weights."""

    quant: str
    experts: int
    columns: int
    rows: int
    gate: GateFacts | None
    has_bias: bool = False
    is_weighted: bool = False


def product_constants(facts: ProductFacts) -> dict[str, str | int]:
    """The constants that a kernel's source has for such matrices, by name."""
    gate, shape = facts.gate, panel_layout.constants(facts.quant, facts.columns)
    form = shape["FORMAT"]
    return {
        "QUANT": form,
        "HALVES": int(dots.halves(form)),
        "MINIMUMS": int(dots.minimums(form)),
        "OFFSET": dots.offset(form),
        "SUPERBLOCK_BYTES": shape["SUPERBLOCK_BYTES"],
        "PANEL_BYTES": shape["PANEL_BYTES"],
        "COLUMNS": facts.columns,
        "ROWS": facts.rows,
        "ACTIVATION": gate.activation if gate else "NONE",
        "ALPHA": f"float({gate.alpha if gate else 0.0!r})",
        "LIMIT": f"float({gate.limit if gate else 0.0!r})",
        "WEIGHTED": int(facts.is_weighted),
        "BIASED": int(facts.has_bias),
        "EXPERTS": facts.experts,
    }


def warps_at_once(quant: str, experts: int, columns: int, tile: MatrixTile) -> int:
    """The warps of all programs that a multiprocessor can hold, by its registers and shared memory."""
    programs = _MULTIPROCESSOR_BYTES // (_shared_bytes(quant, columns, tile) + _own_bytes(experts, tile))
    return tile.warps * max(1, min(programs, _WARPS // tile.warps))


def constants(facts: ProductFacts, tile: MatrixTile) -> dict[str, str | int]:
    """The constants of this kernel's source, by name."""
    return product_constants(facts) | {
        "PAIRS": tile.pairs,
        "WARPS": tile.warps,
        "STAGES": tile.stages,
        "RUNS": int(tile.has_runs),
        "KNOWN_PAIRS": _KNOWN_PAIRS,
        "READ_ONCE": int(tile.reads_once),
        "PROGRAMS": warps_at_once(facts.quant, facts.experts, facts.columns, tile) // tile.warps,
    }


def options(constants: dict[str, str | int]) -> list[str]:
    """The compiler's options for such constants."""
    return [f"-D{name}={value}" for name, value in constants.items()]


@cache
def _kernel(facts: ProductFacts, tile: MatrixTile) -> tuple[CudaKernel, int]:
    """The kernel, and the programs that a multiprocessor can hold."""
    known, shared = constants(facts, tile), _shared_bytes(facts.quant, facts.columns, tile)
    return CudaKernel(SOURCE, options(known), NAME, 32 * tile.warps, shared), int(known["PROGRAMS"])


def gate_up(
    pairs: ExpertPairs,
    lists: SortedPairs,
    x: Int8Rows,
    gate: GateFacts,
    weights: torch.Tensor | None,
    tile: MatrixTile,
) -> Int8Rows:
    """As expert_int8.gate_up, for experts and tiles as of `fitting_tiles`."""
    record = pairs.record
    mid = Int8Rows.empty(pairs.ids.numel(), record.intermediate, pairs.ids.device)
    biases = None if pairs.biases is None else (pairs.biases.gate, pairs.biases.up)
    _launch(pairs, lists, x, record.gate, (mid.codes, mid.scales, mid.sums), 0, gate, weights, biases, tile)
    return mid


def down(
    pairs: ExpertPairs, lists: SortedPairs, mid: Int8Rows, weights: torch.Tensor | None, tile: MatrixTile
) -> torch.Tensor:
    """As expert_int8.down, for experts and tiles as of `fitting_tiles`."""
    record = pairs.record
    out = torch.empty(pairs.ids.numel(), record.hidden, dtype=torch.float32, device=pairs.ids.device)
    biases = None if pairs.biases is None else (pairs.biases.down, pairs.biases.down)
    outs = (out, mid.scales, mid.sums)
    _launch(pairs, lists, mid, record.down, outs, record.down_start, None, weights, biases, tile)
    return out.view(*pairs.ids.shape, record.hidden)


def _launch(
    pairs: ExpertPairs,
    lists: SortedPairs,
    x: Int8Rows,
    quant: str,
    outs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    start: int,
    gate: GateFacts | None,
    weights: torch.Tensor | None,
    biases: tuple[torch.Tensor, torch.Tensor] | None,
    tile: MatrixTile,
) -> None:
    number, rows = outs[0].shape
    tokens, columns = x.codes.shape
    experts = pairs.offsets.numel()
    facts = ProductFacts(quant, experts, columns, rows, gate, biases is not None, weights is not None)
    kernel, programs = _kernel(facts, tile)
    if tile.has_runs:
        grid = programs * torch.cuda.get_device_properties(x.codes.device).multi_processor_count, 1
    else:
        grid = -(-rows // (PANEL_ROWS * tile.warps * (1 if gate else 2))), experts
    kernel.launch(
        grid,
        [
            pairs.pool, pairs.offsets, pairs.ids, x.codes, x.scales, x.sums,
            x.scales if weights is None else weights, *(biases or (x.scales, x.scales)), *outs, *lists,
            number, number // tokens, start,
        ],
        early=launch_options()["WAITS"],
    )  # fmt: skip
