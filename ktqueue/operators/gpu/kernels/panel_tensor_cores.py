"""Some tokens times a matrix in panels, on tensor cores: how panel_tensor_cores.cu is launched.

Weights are decoded to bfloat16 between shared memory and the tensor cores, so no more bytes come from memory than the
packed ones. Some formats have codes that bfloat16 has exactly, so their weights need not be rounded. panel_matrix.py
has the matrix, and the product for fewer tokens; panel_clusters.py the kernel for few panels. No host sync: all can be
captured.

The kernels are CUDA C++, since Triton cannot say which weights a lane of a warp has. They are compiled at first use.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ktqueue.operators.gpu.device import is_gpu, launches_dependents, program_bytes
from ktqueue.operators.gpu.kernels import dots, panel_clusters, panel_layout
from ktqueue.operators.gpu.kernels.cuda_kernel import CudaKernel
from ktqueue.operators.gpu.kernels.norm import RmsNorm, add_rms_norm
from ktqueue.operators.gpu.kernels.operation import check_fits, launch_options
from ktqueue.operators.gpu.kernels.panel_clusters import ClusterTile
from ktqueue.operators.gpu.kernels.panel_layout import SLAB, SLABS
from ktqueue.operators.gpu.kernels.panel_matrix import PanelMatrix

SOURCE = Path(__file__).with_suffix(".cu")
NAME = "multiply_panels"
MOST_TOKENS, MOST_TOKENS_OF_LARGE = 32, 16
"""Up to here this is faster than torch with decoded weights (ADR 0080): for most matrices, and for those of many
panels, such as a head. A program multiplies several of these, and its registers hold 16 rows of x."""
_TILE_TOKENS = 8
_LINE_BYTES = 128
_TOKEN_STRIDE = 20  # as in the source
_SMALLEST_CAPABILITY = (8, 0)
"""Copies to shared memory that do not wait, and products of bfloat16, are in every GPU from here on."""
_OWN_BYTES = 1 << 10
"""Shared memory that a program takes beside its own."""
_PROCESSORS = 132
"""Of an H200, for which tiles are chosen."""
_LARGE_PANELS = 6 * _PROCESSORS


class Tile(NamedTuple):
    """Warps of a program, superblocks that each has in shared memory, and programs of a multiprocessor."""

    warps: int
    stages: int
    programs: int


class ProductFacts(NamedTuple):
    """What the kernel is compiled for. quants, rows: of one part or two. token_tiles: of eight tokens, a power of two.
    adds: products are added to the result. is_float: the result is float32, not bfloat16. epsilon: of the norm of x, if
    it has one."""

    quants: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    token_tiles: int
    tile: Tile | ClusterTile
    adds: bool = False
    has_bias: bool = False
    is_float: bool = False
    epsilon: float | None = None


def _blocks(columns: int) -> int:
    """Superblocks of a panel."""
    return -(-columns // (SLAB * SLABS))


def tile_of(columns: int, panels: int, token_tiles: int) -> Tile:
    """The tile for a matrix of so many panels."""
    blocks = _blocks(columns)
    if token_tiles > 1 and _PROCESSORS < panels <= 3 * _PROCESSORS and blocks >= 4:
        return Tile(4, 3, 4) if token_tiles > 2 else Tile(4, 4, 3)  # all panels at once
    if token_tiles > 2 and panels <= _PROCESSORS and blocks >= 16:
        return Tile(16, 2, 1)
    return Tile(min(blocks, 8), 3, 2)


def constants(facts: ProductFacts) -> dict[str, str | int]:
    """The constants of the kernel's source, by name. Without a second part, its constants are those of the first."""
    known: dict[str, str | int] = {}
    for part, prefix in enumerate(("", "SECOND_")):
        shape = panel_layout.constants(facts.quants[part * (len(facts.quants) - 1)], facts.columns)
        form = shape["FORMAT"]
        known |= {
            f"{prefix}QUANT": form,
            f"{prefix}HALVES": int(dots.halves(form)),
            f"{prefix}MINIMUMS": int(dots.minimums(form)),
            f"{prefix}OFFSET": dots.offset(form),
            f"{prefix}SUPERBLOCK_BYTES": shape["SUPERBLOCK_BYTES"],
            f"{prefix or 'FIRST_'}PANEL_BYTES": shape["PANEL_BYTES"],
            f"{prefix or 'FIRST_'}ROWS": (*facts.rows, 0)[part],
        }
    return known | {
        "FIRST_SUPERBLOCK_BYTES": known["SUPERBLOCK_BYTES"],
        "HAS_SECOND": int(len(facts.quants) > 1),
        "COLUMNS": facts.columns,
        "TILES": facts.token_tiles,
        **{name.upper(): number for name, number in facts.tile._asdict().items()},
        "ADDS": int(facts.adds),
        "BIASED": int(facts.has_bias),
        "FLOAT_OUT": int(facts.is_float),
        "NORMED": int(facts.epsilon is not None),
        "EPSILON": f"float({facts.epsilon or 0.0!r})",
    }


def shared_bytes(facts: ProductFacts) -> int:
    """Shared memory of a program: superblocks of its warps, and the sums of all tokens."""
    slot = max(-(-panel_layout.superblock_bytes(quant) // _LINE_BYTES) * _LINE_BYTES for quant in facts.quants)
    if isinstance(facts.tile, ClusterTile):
        tokens = _TILE_TOKENS * facts.token_tiles
        squares = 0 if facts.epsilon is None else tokens
        return facts.tile.shared_bytes(_blocks(facts.columns), slot, tokens * _TOKEN_STRIDE, squares)
    floats = _TOKEN_STRIDE * (2 if facts.token_tiles <= 2 else 1) + (0 if facts.epsilon is None else 1)
    return facts.tile.warps * (facts.tile.stages * slot + 4 * _TILE_TOKENS * facts.token_tiles * floats)


def fitting(facts: ProductFacts, most_bytes: int, processor_bytes: int) -> ProductFacts:
    """`facts` with a smaller tile, where a program or a multiprocessor has too little shared memory for theirs:
    most_bytes, processor_bytes."""
    assert isinstance(facts.tile, Tile)
    warps, stages, programs = facts.tile
    while True:
        for tile in (Tile(warps, few, many) for many in range(programs, 0, -1) for few in range(stages, 1, -1)):
            smaller = facts._replace(tile=tile)
            needed = shared_bytes(smaller)
            if needed <= most_bytes and tile.programs * (needed + _OWN_BYTES) <= processor_bytes:
                return smaller
        warps = max(1, warps // 2)


@cache
def _on_device(facts: ProductFacts, device: torch.device) -> tuple[CudaKernel, int]:
    """The kernel, and its programs: no more than the device can hold at once."""
    panels = sum(map(panel_layout.panel_count, facts.rows))
    if isinstance(facts.tile, ClusterTile):
        return _kernel(facts), facts.tile.grid(panels)
    known: Any = torch.cuda.get_device_properties(device)  # whose type stub lacks one of these
    facts = fitting(facts, program_bytes(device), known.shared_memory_per_multiprocessor)
    return _kernel(facts), min(panels, facts.tile.programs * known.multi_processor_count)


@cache
def _kernel(facts: ProductFacts) -> CudaKernel:
    options = [f"-D{name}={value}" for name, value in constants(facts).items()]
    by_clusters = isinstance(facts.tile, ClusterTile)
    source, name = (panel_clusters.SOURCE, panel_clusters.NAME) if by_clusters else (SOURCE, NAME)
    return CudaKernel(source, options, name, 32 * facts.tile.warps, shared_bytes(facts))


def fits(x: torch.Tensor) -> bool:
    """Whether `multiply_some` takes x [tokens, columns], for any matrix with so many columns."""
    if not is_gpu(x.device) or torch.cuda.get_device_capability(x.device) < _SMALLEST_CAPABILITY:
        return False
    return x.dtype == torch.bfloat16 and 1 <= len(x) <= MOST_TOKENS and x.shape[1] % SLAB == 0


def pays(x: torch.Tensor, rows: int) -> bool:
    """Whether `multiply_some` takes x, and is the fastest way to multiply it by a matrix of so many rows."""
    is_large = panel_layout.panel_count(rows) > _LARGE_PANELS
    return fits(x) and len(x) <= (MOST_TOKENS_OF_LARGE if is_large else MOST_TOKENS)


def multiply_some(
    parts: Sequence[PanelMatrix],
    x: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    adds: bool = False,
    norm: RmsNorm | None = None,
) -> None:
    """As `multiply_few`, with most weights rounded to bfloat16, for x that `fits` takes.

    out: bfloat16, or float32 if it is not `adds`. norm: with weights in bfloat16, x times these is rounded, and sums
    are multiplied by what is left of the norm. Raises ValueError for tensors that do not fit.
    """
    if norm is not None and norm.weight.dtype != x.dtype:
        x, norm = add_rms_norm(x, *norm), None
    rows = sum(part.rows for part in parts)
    fit = fits(x) and x.shape[1] == parts[0].columns and out.shape == (len(x), rows) and out.stride(1) == 1
    fit &= out.dtype == x.dtype or (out.dtype == torch.float32 and not adds)
    fit &= bias is None or (bias.shape == (rows,) and bias.dtype == x.dtype)
    check_fits(fit, "multiply_some", x=x, bias=bias, out=out)
    side_by_side = x.stride(1) == 1 and (len(x) == 1 or x.stride(0) % 8 == 0)
    if not side_by_side or x.data_ptr() % 16:  # rows are read 16 bytes at a time
        x = x.clone(memory_format=torch.contiguous_format)
    row = 0
    for i in range(0, len(parts), 2):
        some = parts[i : i + 2]
        end = row + sum(part.rows for part in some)
        _launch(some, x, None if bias is None else bias[row:end], out[:, row:end], adds, norm)
        row = end


def _launch(
    parts: Sequence[PanelMatrix],
    x: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    adds: bool,
    norm: RmsNorm | None,
) -> None:
    tokens, columns = x.shape
    panels = sum(panel_layout.panel_count(part.rows) for part in parts)
    token_tiles = 1 << (-(-tokens // _TILE_TOKENS) - 1).bit_length()
    tile: Tile | ClusterTile | None = None
    if launches_dependents(x.device):  # such GPUs have clusters
        tile = panel_clusters.tile_of(_blocks(columns), panels, tokens)
    facts = ProductFacts(
        tuple(part.quant for part in parts), tuple(part.rows for part in parts), columns, token_tiles,
        tile or tile_of(columns, panels, token_tiles), adds, bias is not None, out.dtype == torch.float32,
        None if norm is None else norm.epsilon,
    )  # fmt: skip
    kernel, programs = _on_device(facts, x.device)
    kernel.launch(
        (programs, 1),
        [
            parts[0].panels, parts[-1].panels, x, x if norm is None else norm.weight, x if bias is None else bias, out,
            tokens, x.stride(0), out.stride(0),
        ],
        early=launch_options()["WAITS"],
    )  # fmt: skip
