"""How the steps of a GPU attend: the protocols, and which backend makes the plans.

A planner is made once for a model. Eager steps get a plan each (`plan`); captured decode steps share one per row
bucket (`decode_plan`), which is told of each step before its graph is replayed (`update`). All of them read host
arrays only: nothing waits for the device. Knows no model and no engine.
"""

import logging
from collections.abc import Collection
from typing import Literal, Protocol, get_args

import torch

from ktqueue.operators.kv_cache import KVLayout
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
        """The plan of all captured decode steps of `rows` rows, each of at most `max_pages` pages.

        Before the first `update` it attends to rows of length 1 on page 0.
        """


def make_planner(
    layout: KVLayout,
    *,
    heads: int,
    scaling: float,
    windows: Collection[int],
    device: str,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> AttentionPlanner:
    """The planner of a model with `heads` query heads whose layers have the sliding `windows` (0: none).

    `scaling` is of the scores, `dtype` of the queries: that of the cache if not given, bfloat16 for a float8 cache.
    On a CPU every backend but torch is refused. Raises ValueError for a backend that cannot be had, by name and
    reason; "auto" goes on with the next one and logs a warning.
    """
    if backend not in get_args(BackendName):
        raise ValueError(f"attention backend is {backend!r}; known are {', '.join(get_args(BackendName))}")
    if heads % layout.kv_heads:
        raise ValueError(f"{heads} query heads do not share {layout.kv_heads} key/value heads evenly")
    on_cpu = torch.device(device).type == "cpu"
    if backend == "torch" or (on_cpu and backend == "auto"):
        from ktqueue.operators.gpu.torch_attention import TorchPlanner

        return TorchPlanner(layout.page_size)
    raise ValueError(f"attention backend {backend} is not there for {device}")
