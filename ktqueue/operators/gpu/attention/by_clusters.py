"""Attention of one token of each row in one launch, for Hopper and later: how by_clusters.cu is launched.

A cluster of programs has the query heads of one key/value head of a row. Each warp attends over some of the keys, and
the programs give each other what they have found through shared memory. The same launch can make queries, keys and
values from their product: norms, rotation, and the append to the cache (see qk_norm_rope_append, its twin).

The kernel is CUDA C++, since Triton has no clusters. It is compiled at first use.
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from ktqueue.operators.gpu.attention.base import AttentionShape
from ktqueue.operators.gpu.attention.triton_blocks import LOG2_E, Tables
from ktqueue.operators.gpu.device import is_gpu
from ktqueue.operators.gpu.kernels.cuda_kernel import CudaKernel
from ktqueue.operators.gpu.kernels.operation import launch_options
from ktqueue.operators.step import ScoreOptions

SOURCE = Path(__file__).with_suffix(".cu")
NAME = "attend_to_rows"
_BLOCK = 16
"""Keys that a warp reads at once. They lie on one page."""
_HEAD_DIMS = (64, 128)
_LARGEST_GROUP = 16
"""Query heads of a key/value head: registers hold no more."""
_SMALLEST_CAPABILITY = (9, 0)
"""The first GPUs with clusters of programs, which can write to each other's shared memory."""


class Tile(NamedTuple):
    """Programs of a cluster, a power of two, the warps of each, and the clusters that share long contexts."""

    programs: int
    warps: int
    clusters: int = 1


_TILES = {4: Tile(2, 8, 16), 8: Tile(2, 8, 8), 16: Tile(2, 8, 4), 32: Tile(2, 8, 2), 64: Tile(2, 8), 128: Tile(1, 8)}
_TILES |= {256: Tile(1, 4), 512: Tile(1, 2)}
"""For up to so many key/value heads of all rows. A processor of an H200 has room for one program of eight warps, and
clusters of two programs fit everywhere. Larger clusters do not all run at once."""
_LARGEST_TILE = Tile(2, 2)
"""For more of them."""


class Projection(NamedTuple):
    """The product for query, key and value, and what makes them of it: see qk_norm_rope_append. Norms are those of one
    head, [head_dim], and every head is rotated whole: cosine and sine are [positions, head_dim / 2]."""

    qkv: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    epsilon: float
    cosine: torch.Tensor
    sine: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor


class ClusterFacts(NamedTuple):
    """What the kernel is compiled for. projected: it makes queries, keys and values. norm: the type of its norms'
    weights; None: there are none. The rest: see ScoreOptions."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    tile: Tile
    scaling: float
    window: int = 0
    chunk: int = 0
    cap: float = 0.0
    has_sinks: bool = False
    projected: bool = False
    norm: torch.dtype | None = None
    epsilon: float = 0.0


def fits(shape: AttentionShape) -> bool:
    """Whether the kernel can attend over the model's cache, on its device."""
    layout, device = shape.layout, torch.device(shape.device)
    if not is_gpu(device) or torch.cuda.get_device_capability(device) < _SMALLEST_CAPABILITY:
        return False
    fits = layout.latent is None and layout.page_size % _BLOCK == 0 and layout.head_dim in _HEAD_DIMS
    fits &= shape.heads <= _LARGEST_GROUP * layout.kv_heads
    return fits and layout.dtype == shape.dtype and shape.dtype in (torch.bfloat16, torch.float16)


def tile_of(rows: int, kv_heads: int, head_dim: int) -> Tile:
    """The tile for so many rows. A program joins at least eight columns of a head."""
    tile = next((tile for most, tile in _TILES.items() if rows * kv_heads <= most), _LARGEST_TILE)
    return tile._replace(programs=min(tile.programs, head_dim // 8))


def constants(facts: ClusterFacts) -> dict[str, str | int]:
    """The constants of the kernel's source, by name."""
    return {
        "HEADS": facts.heads,
        "KV_HEADS": facts.kv_heads,
        "HEAD_DIM": facts.head_dim,
        "PAGE_SIZE": facts.page_size,
        "IS_BFLOAT16": int(facts.dtype == torch.bfloat16),
        "PROGRAMS": facts.tile.programs,
        "WARPS": facts.tile.warps,
        "CLUSTERS": facts.tile.clusters,
        "SCALE": f"float({facts.scaling * LOG2_E!r})",
        "WINDOW": facts.window,
        "CHUNK": facts.chunk,
        "CAP": f"float({facts.cap * LOG2_E!r})",
        "LOG2_E": f"float({LOG2_E!r})",
        "HAS_SINKS": int(facts.has_sinks),
        "PROJECTED": int(facts.projected),
        "HAS_NORMS": int(facts.norm is not None),
        "FLOAT_NORMS": int(facts.norm == torch.float32),
        "EPSILON": f"float({facts.epsilon!r})",
    }


def shared_bytes(facts: ClusterFacts) -> int:
    """Shared memory for the sums of all warps of a cluster, of those columns that a program joins."""
    return 4 * facts.tile.warps * facts.head_dim * _padded_group(facts.heads, facts.kv_heads)


@cache
def _kernel(facts: ClusterFacts) -> CudaKernel:
    options = [f"-D{name}={value}" for name, value in constants(facts).items()]
    return CudaKernel(SOURCE, options, NAME, 32 * facts.tile.warps, shared_bytes(facts))


class ClusterMemory(NamedTuple):
    """Where the clusters of a row join: parts [bytes] uint8, which hold float32; counters int32, 0 between launches."""

    parts: torch.Tensor
    counters: torch.Tensor


def memory_of(shape: AttentionShape, rows: int) -> tuple[int, int]:
    """The bytes of the parts and the number of counters of ClusterMemory, for so many rows."""
    kv_heads, head_dim = shape.layout.kv_heads, shape.layout.head_dim
    tile = tile_of(rows, kv_heads, head_dim)
    if tile.clusters == 1:
        return 16, 1
    row_heads = rows * kv_heads
    size = row_heads * tile.clusters * _padded_group(shape.heads, kv_heads) * head_dim * 8
    return size, row_heads * tile.programs


def _padded_group(heads: int, kv_heads: int) -> int:
    """The query heads of a key/value head, rounded up to eights."""
    return -(-heads // kv_heads // 8) * 8


def attend(
    x: torch.Tensor | Projection,
    heads: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: Tables,
    memory: ClusterMemory,
    options: ScoreOptions,
) -> torch.Tensor:
    """Attend for the one token of each row, which is the last of its context: [rows, heads, head_dim].

    x: queries, dense, [rows, heads, head_dim], whose keys and values are in the cache already; or the step's product,
    whose keys and values are written there. keys, values: [pages, page_size, kv_heads, head_dim], of the same strides.
    No other kernel of the step may write to them, but the one before this may write the newest ones. tables: without
    query_starts. memory: as `memory_of` says. Takes what `fits` says.
    """
    page_size, kv_heads, head_dim = keys.shape[1:]
    none = tables.contexts  # stands for tensors that the kernel does not read
    norm, epsilon, table_stride = None, 0.0, 0
    made_of = [none] * 6
    if isinstance(x, Projection):
        query, q_norm, k_norm, epsilon, *rest = x
        norm, table_stride = None if q_norm is None else q_norm.dtype, x.cosine.stride(0)
        made_of = [none if q_norm is None else q_norm, none if k_norm is None else k_norm, *rest]
    else:
        query = x
    rows = len(query)
    facts = ClusterFacts(
        heads, kv_heads, head_dim, page_size, query.dtype, tile_of(rows, kv_heads, head_dim), options.scaling,
        options.sliding_window, options.chunk, options.cap, options.sinks is not None,
        isinstance(x, Projection), norm, epsilon,
    )  # fmt: skip
    out = query.new_empty(rows, heads, head_dim)
    sinks = none if options.sinks is None else options.sinks
    _kernel(facts).launch(
        (facts.tile.programs * kv_heads * facts.tile.clusters, rows),
        [query, keys, values, tables.page_starts, tables.pages, tables.contexts, sinks, out, *made_of, *memory,
         query.stride(0), *keys.stride()[:2], table_stride],
        early=launch_options()["WAITS"],
    )  # fmt: skip
    return out
