"""Attention of prompts on Hopper's tensor cores: how by_warpgroups.cu is launched.

It computes what triton_prefill.py does, of the same tiles, for caches of 16 bits. The kernel is CUDA C++, since Triton
copies by one warp. It is compiled at first use.
"""

import ctypes
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from ktqueue.operators.gpu.attention.base import AttentionShape
from ktqueue.operators.gpu.attention.triton_blocks import LOG2_E, Tables
from ktqueue.operators.gpu.device import has_warpgroups
from ktqueue.operators.gpu.kernels.cuda_kernel import CudaKernel
from ktqueue.operators.step import ScoreOptions

SOURCE = Path(__file__).with_suffix(".cu")
NAME = "attend_to_prompts"
ARCHITECTURE = "90a"
THREADS = 384
TILE = 128
"""Rows of a tile: tokens times the query heads of a key/value head."""
BLOCK = 128
"""Keys that are multiplied at once."""
_HEAD_DIMS = (64, 128)
_SMALLEST_PAGE = 8
_OPERANDS = 6
"""Tiles of queries, and blocks of keys and of values, that shared memory has: two of each."""
_COLUMNS = 64
"""Of a box of keys or values that is copied at once."""


class PromptFacts(NamedTuple):
    """What the kernel is compiled for. scaling and what follows: see ScoreOptions."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    scaling: float
    window: int = 0
    chunk: int = 0
    cap: float = 0.0
    has_sinks: bool = False


def fits(shape: AttentionShape) -> bool:
    """Whether the kernel can attend over the model's cache, on its device."""
    layout, size = shape.layout, shape.layout.page_size
    fits = layout.latent is None and layout.head_dim in _HEAD_DIMS and shape.heads <= TILE * layout.kv_heads
    fits &= size % _SMALLEST_PAGE == 0 and (BLOCK % size == 0 or size % BLOCK == 0) and shape.scaling > 0
    fits &= layout.dtype == shape.dtype and shape.dtype in (torch.bfloat16, torch.float16)
    return fits and has_warpgroups(shape.device)


def constants(facts: PromptFacts) -> dict[str, str | int]:
    """The constants of the kernel's source, by name."""
    return {
        "HEADS": facts.heads,
        "KV_HEADS": facts.kv_heads,
        "HEAD_DIM": facts.head_dim,
        "PAGE_SIZE": facts.page_size,
        "IS_BFLOAT16": int(facts.dtype == torch.bfloat16),
        "SCALE": f"float({facts.scaling * LOG2_E!r})",
        "WINDOW": facts.window,
        "CHUNK": facts.chunk,
        "HAS_CAP": int(facts.cap > 0),
        "CAP": f"float({(facts.cap or 1.0) * LOG2_E!r})",
        "LOG2_E": f"float({LOG2_E!r})",
        "HAS_SINKS": int(facts.has_sinks),
    }


def shared_bytes(head_dim: int) -> int:
    """Shared memory of a program, in bytes."""
    return _OPERANDS * TILE * head_dim * 2


@cache
def _kernel(facts: PromptFacts) -> CudaKernel:
    options = [f"-D{name}={value}" for name, value in constants(facts).items()]
    return CudaKernel(SOURCE, options, NAME, THREADS, shared_bytes(facts.head_dim), ARCHITECTURE)


@lru_cache(4096)
def _map(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """The CUtensorMap by which boxes of a head's keys are copied, from numbers of 16 bits at `address`. Raises
    RuntimeError.

    shape, strides: those of a tensor [pages, page_size, kv_heads, head_dim].
    """
    store = ctypes.create_string_buffer(192)
    start = -ctypes.addressof(store) % 64
    sizes, ones = (ctypes.c_uint64 * 4)(*shape[::-1]), (ctypes.c_uint32 * 4)(1, 1, 1, 1)
    steps = (ctypes.c_uint64 * 3)(*(2 * step for step in strides[2::-1]))
    box = (ctypes.c_uint32 * 4)(_COLUMNS, 1, min(shape[1], BLOCK), 1)
    types, swizzle, promotion = 1, 3, 3  # CU_TENSOR_MAP_..._UINT16, _128B, _L2_256B; what is outside is zeros
    status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(store) + start), types, 4, ctypes.c_void_p(address), sizes, steps, box, ones,
        0, swizzle, promotion, 0,
    )  # fmt: skip
    if status:
        raise RuntimeError(f"CUDA error {status}: there is no map of {shape} with strides {strides}")
    return store.raw[start : start + 128]


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: Tables,
    tiles: torch.Tensor,
    out: torch.Tensor,
    options: ScoreOptions,
    counter: torch.Tensor,
) -> None:
    """Attend for the tokens of `tiles`: see triton_prefill.prefill, whose tiles have as many. Takes what `fits` says.
    Tokens behind those of the last row get zeros.

    counter: [1] int32, 0 between launches; only one of them runs at a time. Raises ValueError without query_starts.
    """
    if tables.query_starts is None:
        raise ValueError("tables of prompts have query_starts")
    heads, head_dim = query.shape[1:]
    page_size, kv_heads = keys.shape[1:3]
    facts = PromptFacts(
        heads, kv_heads, head_dim, page_size, query.dtype, options.scaling, options.sliding_window, options.chunk,
        options.cap, options.sinks is not None,
    )  # fmt: skip
    jobs = len(tiles) * kv_heads
    programs = min(jobs, torch.cuda.get_device_properties(query.device).multi_processor_count)
    maps = [_map(states.data_ptr(), tuple(states.shape), states.stride()) for states in (keys, values)]
    sinks = counter if options.sinks is None else options.sinks  # the kernel reads none
    _kernel(facts).launch(
        (programs, 1),
        [*maps, query, values, tiles, tables.query_starts, tables.page_starts, tables.pages, tables.contexts, sinks,
         out, counter, jobs, *values.stride()[:2], len(keys), len(tables.query_starts) - 1, len(query)],
    )  # fmt: skip
