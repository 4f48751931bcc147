"""How the steps of a GPU attend: the protocols, and which backend makes the plans.

A planner is made once for a model. Eager steps get a plan each (`plan`); captured decode steps share one per row
bucket (`decode_plan`), which is told of each step before its graph is replayed (`update`). All of them read host
arrays only: nothing waits for the device. Knows no model and no engine.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args

import torch

from ktqueue.operators.kv_cache import KVCache, KVLayout
from ktqueue.operators.step import AttentionPlan, StepContext

logger = logging.getLogger(__name__)

BackendName = Literal["auto", "flashinfer", "triton", "torch"]
"""auto: FlashInfer where it is installed and computes the model's types, else our Triton kernels; on CPU torch."""


class DecodePlan(AttentionPlan, Protocol):
    """How one row bucket of a captured decode step attends: `attend` is captured, its buffers never move."""

    def update(self, host: StepContext) -> None:
        """Make the next replay attend for `host`, a decode step (one token a row) of CPU tensors.

        It has exactly as many rows as the bucket: rows that pad it have a length of 1 and a page of their own. Called
        on the stream that replays. Raises ValueError for any other number of rows or more pages than planned for.
        """


class AttentionPlanner(Protocol):
    """Makes the plans of one model on one device."""

    backend: str
    """flashinfer, triton or torch."""

    @property
    def workspace_bytes(self) -> int:
        """Device memory held for all plans: partial results, indices of the decode plans."""

    def plan(self, host: StepContext) -> AttentionPlan:
        """How `host`, a step of CPU tensors (any mix of chunks and decode rows), attends.

        Valid until the next `plan` or `update` of this planner.
        """

    def decode_plan(self, rows: int, max_pages: int) -> DecodePlan:
        """The plan of all captured decode steps of `rows` rows, each of at most `max_pages` pages. Two plans may be
        updated before either attends, one behind the other.

        Before the first `update` it attends to rows of length 1 on page 0.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What all attention of one model has in common. `dtype` is of the queries, `scaling` of the scores."""

    layout: KVLayout
    heads: int
    scaling: float
    windows: tuple[int, ...]  # keys that a token sees at most; 0: all
    device: str
    dtype: torch.dtype


def make_planner(
    layout: KVLayout,
    *,
    heads: int,
    scaling: float,
    windows: Collection[int],
    device: str,
    backend: str = "auto",
    dtype: torch.dtype | None = None,
) -> AttentionPlanner:
    """The planner of a model with `heads` query heads whose layers have the sliding `windows` (0: none).

    `scaling` is of the scores, `dtype` of the queries: that of the cache if not given, bfloat16 for a float8 cache.
    On a GPU the kernels are compiled and run once here. Raises ValueError for a backend that cannot be had, by name
    and reason; "auto" goes on with the next one and logs a warning.
    """
    if backend not in get_args(BackendName):
        raise ValueError(f"attention backend is {backend!r}; known are {', '.join(get_args(BackendName))}")
    if heads % layout.kv_heads:
        raise ValueError(f"{heads} query heads do not share {layout.kv_heads} key/value heads evenly")
    shape = AttentionShape(
        layout=layout,
        heads=heads,
        scaling=scaling,
        windows=tuple(sorted(windows)) or (0,),
        device=device,
        dtype=dtype or (torch.bfloat16 if layout.dtype.itemsize == 1 else layout.dtype),
    )
    on_gpu = torch.device(device).type == "cuda"
    if backend == "torch" or (backend == "auto" and not on_gpu):
        from ktqueue.operators.gpu.attention.torch import TorchPlanner

        return TorchPlanner(layout.page_size)
    if not on_gpu:
        raise ValueError(f"attention backend {backend} is not there for {device}")
    if backend == "flashinfer" or (backend == "auto" and shape.dtype != torch.float32 and layout.latent is None):
        try:
            return _tried(_flashinfer(shape), shape)
        except Exception as error:  # the library, its compiler and its bindings have exceptions of their own
            if backend == "flashinfer":
                raise ValueError(f"attention backend flashinfer cannot be had: {error}") from error
            logger.warning("attention runs by our Triton kernels, for FlashInfer cannot be had: %s", error)
    if layout.latent is not None:
        from ktqueue.operators.gpu.attention.latent import LatentPlanner

        return _tried(LatentPlanner(shape), shape)
    from ktqueue.operators.gpu.attention.triton import TritonPlanner

    return _tried(TritonPlanner(shape), shape)


def _flashinfer(shape: AttentionShape) -> AttentionPlanner:
    """A planner over FlashInfer. Raises ValueError for what it does not compute."""
    from ktqueue.operators.gpu.attention import flashinfer

    if shape.layout.latent is not None:
        raise ValueError("latent attention runs by kernels of ours")
    if shape.layout.head_dim not in flashinfer.HEAD_DIMS:
        raise ValueError(f"its kernels are for heads of {flashinfer.HEAD_DIMS}, not of {shape.layout.head_dim}")
    if shape.dtype not in flashinfer.DTYPES:
        raise ValueError(f"its kernels do not compute {shape.dtype}")
    return flashinfer.FlashInferPlanner(shape)


def _tried(planner: AttentionPlanner, shape: AttentionShape) -> AttentionPlanner:
    """`planner`, all kernels of which were compiled and run: none is compiled later, while a graph is captured."""
    kv = KVCache(replace(shape.layout, layers=1), 3, shape.device)
    step = StepContext(
        query_starts=torch.tensor([0, 2, 3], dtype=torch.int32),
        context_lengths=torch.tensor([2, 1], dtype=torch.int32),
        page_table=torch.tensor([[0, 1], [2, 0]], dtype=torch.int32),
        slot_mapping=torch.zeros(3, dtype=torch.int64),
        kv=kv,
    )
    query = torch.zeros(3, shape.heads, shape.layout.head_dim, dtype=shape.dtype, device=shape.device)
    for plan, tokens in ((planner.plan(step), 3), (planner.decode_plan(2, 1), 2)):
        for window in shape.windows:
            plan.attend(0, query[:tokens], kv, scaling=shape.scaling, sliding_window=window)
    torch.cuda.synchronize(shape.device)
    return planner
