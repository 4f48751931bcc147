"""Which attention backend plans the steps of a model: FlashInfer first, our Triton kernels second, torch on a CPU.

On an H200, FlashInfer is faster for many keys from 16 rows on and for float8 caches, Triton for short decode steps. So
beside FlashInfer, captured steps of few rows have our kernels, unless the cache is float8, and so have steps that read
prompts. Ours also serve what FlashInfer lacks: float32, latents, other head sizes. The figures are in
docs/architecture.md.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TypeVar, get_args

import torch

from ktqueue.core.settings.engine import BackendName
from ktqueue.operators.gpu.attention import by_clusters, flashinfer
from ktqueue.operators.gpu.attention.base import AttentionPlanner, AttentionShape
from ktqueue.operators.gpu.attention.by_heads import HeadsPlanner
from ktqueue.operators.gpu.attention.by_steps import StepsPlanner
from ktqueue.operators.gpu.attention.latent import LatentPlanner
from ktqueue.operators.gpu.attention.torch import TorchPlanner
from ktqueue.operators.gpu.attention.triton import TritonPlanner
from ktqueue.operators.gpu.device import has_large_shared_memory, is_gpu
from ktqueue.operators.kv_cache import KVCache, KVLayout
from ktqueue.operators.step import AttentionPlan, ScoreOptions, StepContext

logger = logging.getLogger(__name__)
Planner = TypeVar("Planner", bound=AttentionPlanner)

_STEPS = (([2, 1], 2), ([2], 2), ([1] * 5, 1), ([1], 4096))
"""Tokens of each row, and its keys, of eager steps that need all kernels: chunks beside a row and alone, few rows and
more, many splits."""


def make_planner(
    layout: KVLayout,
    *,
    heads: int,
    scaling: float,
    windows: Collection[int],
    device: str,
    backend: str = "auto",
    dtype: torch.dtype | None = None,
    sinks: Collection[bool] = (),
    cap: float = 0.0,
    chunk: int = 0,
    layer_heads: Sequence[int] = (),
) -> AttentionPlanner:
    """Make the planner of a model with `heads` query heads whose layers have the sliding `windows` (0: none). If layers
    differ in their heads, `windows` and `sinks` say something of each layer, and each kind of heads has its own
    backend. Query heads that differ are `layer_heads`.

    `scaling` multiplies the scores. sinks: whether the softmax of each head has a further score. cap: see ScoreOptions.
    chunk: of the layers that have chunks; 0: none has. `dtype` is that of the queries; None: that of the cache, or
    bfloat16 for a float8 cache. On a GPU, all kernels are compiled and run once
    here. Raises ValueError with the reason for a backend that is not available; "auto" logs a warning and takes the
    next one.
    """
    if backend not in get_args(BackendName):
        raise ValueError(f"attention backend is {backend!r}; known are {', '.join(get_args(BackendName))}")
    if layout.by_layer or len({*layer_heads}) > 1:
        by_layer = [*zip(layout.heads, layer_heads or [heads] * layout.layers, strict=True)]
        different = list(dict.fromkeys(by_layer))
        kinds = [different.index(layer) for layer in by_layer]
        planners = []
        for kind, (alike, own_heads) in enumerate(different):
            own = [window for window, found in zip(windows, kinds, strict=True) if found == kind]
            own_sinks = [has for has, found in zip(sinks, kinds, strict=bool(sinks)) if found == kind]
            one = make_planner(
                layout.alike(alike),
                heads=own_heads,
                scaling=scaling,
                windows=own,
                device=device,
                backend=backend,
                dtype=dtype,
                sinks=own_sinks,
                cap=cap,
                chunk=chunk,
            )
            planners.append(one)
        return HeadsPlanner(planners, kinds)
    if heads % layout.kv_heads:
        raise ValueError(f"{heads} query heads do not share {layout.kv_heads} key/value heads evenly")
    shape = AttentionShape(
        layout=layout,
        heads=heads,
        scaling=scaling,
        windows=tuple(sorted({*windows})) or (0,),
        device=device,
        dtype=dtype or (torch.bfloat16 if layout.dtype.itemsize == 1 else layout.dtype),
        sinks=any(sinks),
        cap=cap,
        chunk=chunk,
    )
    on_gpu = is_gpu(device)
    if backend == "torch" or (backend == "auto" and not on_gpu):
        return TorchPlanner(layout.page_size)
    if not on_gpu:
        raise ValueError(f"attention backend {backend} needs a GPU, the device is {device}")
    supported = shape.dtype != torch.float32 and layout.latent is None and not shape.sinks and not chunk
    if backend == "flashinfer" or (backend == "auto" and supported):
        try:
            others = _warmed_up(_flashinfer(shape), shape)
            if backend == "flashinfer" or shape.layout.dtype.itemsize == 1:
                return others
            ours = _warmed_up(TritonPlanner(shape), shape)
            prompts = has_large_shared_memory(device)
            return StepsPlanner(ours, others, prompts=prompts, one_launch=by_clusters.fits(shape))
        except Exception as error:  # the library, its compiler and its bindings have their own exceptions
            if backend == "flashinfer":
                raise ValueError(f"attention backend flashinfer is not available: {error}") from error
            logger.warning("FlashInfer is not available, attention uses our Triton kernels: %s", error)
    return _warmed_up(TritonPlanner(shape) if layout.latent is None else LatentPlanner(shape), shape)


def _flashinfer(shape: AttentionShape) -> flashinfer.FlashInferPlanner:
    """Make a FlashInfer planner. Raises ValueError for what FlashInfer does not support."""
    if shape.layout.latent is not None:
        raise ValueError("latent attention needs our own kernels")
    if shape.sinks:
        raise ValueError("its kernels have no sinks")
    if shape.chunk:
        raise ValueError("its kernels have no chunks")
    if shape.layout.head_dim not in flashinfer.HEAD_DIMS:
        raise ValueError(f"its kernels support heads of {flashinfer.HEAD_DIMS}, not {shape.layout.head_dim}")
    if shape.dtype not in flashinfer.DTYPES:
        raise ValueError(f"its kernels do not support {shape.dtype}")
    return flashinfer.FlashInferPlanner(shape)


def _warmed_up(planner: Planner, shape: AttentionShape) -> Planner:
    """Compile and run all kernels of `planner` once, so that none is compiled while a graph is captured."""
    kv = KVCache(replace(shape.layout, layers=1), 1, shape.device)
    query = torch.zeros(5, shape.heads, shape.layout.head_dim, dtype=shape.dtype, device=shape.device)
    sinks = torch.zeros(shape.heads, device=shape.device) if shape.sinks else None
    windows = [*((window, 0) for window in shape.windows), *([(0, shape.chunk)] if shape.chunk else [])]

    def attend(plan: AttentionPlan, tokens: int) -> None:
        for window, chunk in windows:
            plan.attend(0, query[:tokens], kv, ScoreOptions(shape.scaling, window, sinks, shape.cap, chunk))

    for chunks, keys in _STEPS:
        pages = -(-keys // shape.layout.page_size)
        step = StepContext(
            query_starts=torch.tensor([0, *chunks], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            context_lengths=torch.full((len(chunks),), keys, dtype=torch.int32),
            page_table=torch.zeros(len(chunks), pages, dtype=torch.int32),  # all rows are on page 0
            slot_mapping=torch.zeros(sum(chunks), dtype=torch.int64),
            kv=kv,
        )
        attend(planner.plan(step), sum(chunks))
    attend(planner.decode_plan(2, 1), 2)
    torch.cuda.synchronize(shape.device)
    return planner
