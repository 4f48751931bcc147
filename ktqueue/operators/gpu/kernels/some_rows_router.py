"""From the residual of some rows to their experts, in one launch: norm, the router's product, the choice of experts,
the rounding of their input, and the order of pairs by expert. few_rows_router.py is for fewer rows.

A cluster of programs has 16 rows: each norms them in its registers and has the logits of some experts. They give each
other the logits through shared memory. No host sync: it can be captured in a CUDA graph. The kernel is CUDA C++, since
Triton has no clusters. It is compiled at first use.
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from ktqueue.operators.gpu.device import is_gpu, launches_dependents, program_bytes
from ktqueue.operators.gpu.kernels.cuda_kernel import CudaKernel
from ktqueue.operators.gpu.kernels.expert_int8 import Int8Rows
from ktqueue.operators.gpu.kernels.expert_pairs import SortedPairs
from ktqueue.operators.gpu.kernels.few_rows_router import route_rows
from ktqueue.operators.gpu.kernels.norm import RmsNorm
from ktqueue.operators.gpu.kernels.operation import check_fits, launch_options
from ktqueue.operators.gpu.kernels.panel_layout import SLAB, ExpertRecord, panel_count
from ktqueue.operators.gpu.kernels.router import SIGMOID_SUM_FLOOR, Routing, Scoring

SOURCE = Path(__file__).with_suffix(".cu")
NAME = "route_some_rows"
SOME_ROWS = 64
_TILE_ROWS = 16
_WARPS = 16  # as in the source
_MOST_CHUNKS = 8
"""Slabs of 16 rows that a warp holds in its registers."""
_MOST_PROGRAMS = 8
"""Of a cluster, on every GPU that has them."""
MOST_CHOSEN = 16
"""Experts of a token."""
_LARGEST_PROGRAM = 227 << 10
"""Shared memory of a program on Hopper."""
_REQUEST_CLUSTERS = 8
_MOST_REQUESTED = 25 << 20
"""Bytes of experts. An H200 reads as many in 7 us, and its cache holds 50 MiB."""


class ExpertRequests(NamedTuple):
    """Experts that a launch requests from memory before it knows which ones its rows choose: those of the last step.

    Little is read from memory until then, and the next product finds some of what it needs in the L2 cache. pool,
    record: as of ExpertPairs; gate and up are of one format. recent: [experts] int32, how many rows of the last step
    chose each, which the launch replaces by this step's.
    """

    pool: torch.Tensor
    record: ExpertRecord
    recent: torch.Tensor

    @property
    def lines(self) -> tuple[int, int]:
        """The panels of gate and up, and the bytes of one."""
        return 2 * panel_count(self.record.intermediate), self.record.gate_panel_bytes


class RouterFacts(NamedTuple):
    """What the kernel is compiled for. tiles: of 16 rows. lines, requested: of requests, and their bytes in all. The
    rest: see `some_rows_route`."""

    experts: int
    hidden: int
    chosen: int
    tiles: int
    renormalise: bool
    epsilon: float
    scale: float = 1.0
    sigmoid: bool = False
    has_scales: bool = False
    has_bias: bool = False
    float_norm: bool = False
    sorts: bool = False
    has_live: bool = False
    counts_uses: bool = False
    lines: tuple[int, int] = (0, 0)
    requested: int = 0


def programs_of(experts: int) -> int:
    """Programs of a cluster: each has a multiple of eight experts. 0: they cannot be divided so."""
    return next((number for number in range(_MOST_PROGRAMS, 0, -1) if experts % (8 * number) == 0), 0)


def shared_bytes(experts: int, hidden: int) -> int:
    """Shared memory for the router's rows of a program, and for the sums of its warps."""
    width, chunks = experts // programs_of(experts), -(-hidden // SLAB // _WARPS)
    return _WARPS * (2 * width * chunks * SLAB + 4 * _TILE_ROWS * (width + 8))


def _own_bytes(experts: int) -> int:
    """Shared memory for what the kernel declares, at most, and for the GPU itself."""
    return (1 << 10) + 4 * (_WARPS * _TILE_ROWS + SOME_ROWS * MOST_CHOSEN + (_TILE_ROWS + 3) * experts + 32)


@cache
def _requested_bytes(device: torch.device) -> int:
    """A little more than half of a smaller cache."""
    return int(min(_MOST_REQUESTED, torch.cuda.get_device_properties(device).L2_cache_size * 9 // 16))


def has_some_rows(residual: torch.Tensor, router: torch.Tensor, norm: torch.Tensor, scoring: Scoring) -> bool:
    """Whether `some_rows_route` takes such a step: up to SOME_ROWS tokens of bfloat16, an RMSNorm, experts that are
    chosen by their logits alone, and sizes that fit into registers and shared memory."""
    experts, hidden = router.shape
    small = hidden % SLAB == 0 and hidden <= _MOST_CHUNKS * _WARPS * SLAB and experts <= 32 * _WARPS
    small = small and programs_of(experts) > 0
    most = program_bytes(residual.device) if is_gpu(residual.device) else _LARGEST_PROGRAM
    small = small and shared_bytes(experts, hidden) + _own_bytes(experts) <= most
    types = residual.dtype == router.dtype == torch.bfloat16 and norm.dtype in (torch.bfloat16, torch.float32)
    device = not is_gpu(residual.device) or launches_dependents(residual.device)  # such GPUs have clusters
    return scoring.is_by_logits and small and types and norm.dim() == 1 and device and 1 <= len(residual) <= SOME_ROWS


def some_rows_route(
    residual: torch.Tensor,
    norm: RmsNorm,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    experts_per_token: int,
    *,
    counters: torch.Tensor,
    renormalise: bool,
    scoring: Scoring,
    offsets: torch.Tensor | None,
    live_tokens: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    requests: ExpertRequests | None = None,
) -> tuple[torch.Tensor, Int8Rows, SortedPairs | None, Routing]:
    """Norm the residual [tokens, hidden] and choose the experts of each token. Returns the normed rows, the same in
    int8, the pairs by expert, and the choice.

    Takes what `has_some_rows` says, and up to 16 experts of a token. offsets [experts] int64: those of ExpertPairs;
    None: pairs are not sorted. requests: only with offsets. The rest: see `few_rows_route`. counters: one. Raises
    ValueError for shapes that do not fit.
    """
    (tokens, hidden), experts = residual.shape, len(router)
    fits = has_some_rows(residual, router, norm.weight, scoring) and residual.is_contiguous()
    fits &= router.is_contiguous() and router.shape[1] == hidden and norm.weight.shape == (hidden,)
    fits &= bias is None or (bias.shape == (experts,) and bias.dtype == residual.dtype)
    fits &= requests is None or (offsets is not None and requests.recent.shape == (experts,))
    fits &= counters.dtype == torch.int32 and 0 < experts_per_token <= min(experts, MOST_CHOSEN)
    check_fits(fits, "some_rows_route", residual=residual, norm=norm.weight, router=router, counters=counters)
    device, pairs = residual.device, tokens * experts_per_token
    if not is_gpu(device):
        x, rows, routing = route_rows(
            residual, norm, router, bias, experts_per_token,
            renormalise=renormalise, scoring=scoring, live_tokens=live_tokens, counts=counts,
        )  # fmt: skip
        sorted_pairs = None if offsets is None else SortedPairs.of(routing.ids, offsets)
        if requests is not None and sorted_pairs is not None:
            requests.recent.copy_(sorted_pairs.counts)
        return x, rows, sorted_pairs, routing
    x, rows = torch.empty_like(residual), Int8Rows.empty(tokens, hidden, device)
    routing = Routing(
        torch.empty(tokens, experts_per_token, dtype=torch.int64, device=device),
        torch.empty(tokens, experts_per_token, dtype=torch.float32, device=device),
    )
    lists = SortedPairs(*(torch.empty(n, dtype=torch.int32, device=device) for n in (pairs, experts, experts)))
    tiles = -(-tokens // _TILE_ROWS)
    facts = RouterFacts(
        experts, hidden, experts_per_token, tiles, renormalise, norm.epsilon, scoring.scale, scoring.sigmoid,
        scoring.scales is not None, bias is not None, norm.weight.dtype == torch.float32, offsets is not None,
        live_tokens is not None, counts is not None,
    )  # fmt: skip
    clusters = tiles
    if requests is not None:
        clusters += _REQUEST_CLUSTERS
        facts = facts._replace(lines=requests.lines, requested=_requested_bytes(device))
    none = counters  # stands for tensors that the kernel does not read
    _kernel(facts).launch(
        (programs_of(experts), clusters),
        [
            residual, norm.weight, router, none if bias is None else bias,
            none if scoring.scales is None else scoring.scales, x, rows.codes, rows.scales, rows.sums, routing.ids,
            routing.weights, none if offsets is None else offsets, *lists,
            none if live_tokens is None else live_tokens, none if counts is None else counts, counters,
            *((none, none) if requests is None else (requests.pool, requests.recent)), tokens,
        ],
        early=launch_options()["WAITS"],
    )  # fmt: skip
    return x, rows, None if offsets is None else lists, routing


def constants(facts: RouterFacts) -> dict[str, str | int]:
    """The constants of the kernel's source, by name."""
    return {
        "EXPERTS": facts.experts,
        "HIDDEN": facts.hidden,
        "CHOSEN": facts.chosen,
        "TILES": facts.tiles,
        "PROGRAMS": programs_of(facts.experts),
        "RENORMALISE": int(facts.renormalise),
        "EPSILON": f"float({facts.epsilon!r})",
        "SCALE": f"float({facts.scale!r})",
        "SIGMOID": int(facts.sigmoid),
        "SUM_FLOOR": f"float({SIGMOID_SUM_FLOOR!r})",
        "HAS_SCALES": int(facts.has_scales),
        "BIASED": int(facts.has_bias),
        "FLOAT_NORM": int(facts.float_norm),
        "SORTS": int(facts.sorts),
        "HAS_LIVE": int(facts.has_live),
        "COUNTS_USES": int(facts.counts_uses),
        "LINES": facts.lines[0],
        "LINE_BYTES": facts.lines[1],
        "REQUESTED": facts.requested,
    }


@cache
def _kernel(facts: RouterFacts) -> CudaKernel:
    options = [f"-D{name}={value}" for name, value in constants(facts).items()]
    return CudaKernel(SOURCE, options, NAME, 32 * _WARPS, shared_bytes(facts.experts, facts.hidden))
