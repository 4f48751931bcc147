"""From the residual of few rows to their experts, in one launch: norm, the router's product, the choice of experts, and
the rounding of their input.

A program has one expert and one token. It norms the row again, which costs less than a launch that norms it for all.
The last program of a token chooses. No host sync: it can be captured in a CUDA graph.
"""

import torch

from ktqueue.operators.gpu.kernels.expert_int8 import Int8Rows, quantise_row, slabs_at_once
from ktqueue.operators.gpu.kernels.linear import FEW_ROWS, few_rows_linear
from ktqueue.operators.gpu.kernels.norm import RmsNorm, add_rms_norm, weighted
from ktqueue.operators.gpu.kernels.operation import (
    check_fits,
    is_last,
    launch_options,
    runs_kernel,
    tl,
    triton,
    wait_for_previous,
)
from ktqueue.operators.gpu.kernels.panel_layout import SLAB
from ktqueue.operators.gpu.kernels.router import SIGMOID_SUM_FLOOR, Routing, Scoring, choose, route

_COLUMNS_OF_A_WARP = 2048
"""Of the residual's row. One warp chooses experts without barriers, and has a row of 2,048 in its registers."""


@triton.jit
def _few_rows_route(
    residual, norm, router, bias, logits, normed, live_tokens, counts, ids_out, weights_out, scales,
    codes, x_scales, sums, counters, epsilon, scale,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr, CHOSEN: tl.constexpr,
    CHOSEN_BLOCK: tl.constexpr, RENORMALISE: tl.constexpr, SIGMOID: tl.constexpr, SUM_FLOOR: tl.constexpr,
    SLAB_COUNT: tl.constexpr, SLABS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Program 0 of a token writes its normed row and rounds it; each other has the logit of an expert."""
    dtype: tl.constexpr = residual.dtype.element_ty
    token = tl.program_id(1)
    expert = tl.program_id(0) - 1
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    factors = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    weights = tl.load(router + tl.maximum(expert, 0) * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(WAITS)  # while weights arrive, which no kernel of a step writes
    x = tl.load(residual + token.to(tl.int64) * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + epsilon)
    row = weighted(x, factors, dtype, norm.dtype.element_ty != tl.float32)
    if expert < 0:
        tl.store(normed + token.to(tl.int64) * HIDDEN + column, row, mask=inside)
        tl.debug_barrier()  # other threads of this program read it
        quantise_row(token, normed, codes, x_scales, sums, HIDDEN, SLAB_COUNT, SLABS)
    else:
        logit = tl.sum(weights * row.to(tl.float32), axis=0)
        if bias is not None:
            logit += tl.load(bias + expert).to(tl.float32)
        tl.store(logits + token * EXPERTS + expert, logit)
        if is_last(counters + token, EXPERTS):
            choose(
                token, logits, None, live_tokens, counts, ids_out, weights_out, None, None, None, scales,
                scale, EXPERTS, 0.0,
                EXPERTS, EXPERT_BLOCK, CHOSEN, CHOSEN_BLOCK, RENORMALISE, SIGMOID, SUM_FLOOR, False,
            )  # fmt: skip


def has_few_rows(residual: torch.Tensor, router: torch.Tensor, norm: torch.Tensor, scoring: Scoring) -> bool:
    """Whether `few_rows_route` takes such a step: 1 to FEW_ROWS tokens of 16 bits, an RMSNorm, and experts that are
    chosen by their logits alone."""
    few = 1 <= len(residual) <= FEW_ROWS and residual.dtype == router.dtype != torch.float32
    return few and scoring.is_by_logits and norm.dim() == 1


def route_rows(
    residual: torch.Tensor,
    norm: RmsNorm,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    experts_per_token: int,
    *,
    renormalise: bool,
    scoring: Scoring,
    live_tokens: torch.Tensor | None,
    counts: torch.Tensor | None,
) -> tuple[torch.Tensor, Int8Rows, Routing]:
    """As `few_rows_route`, one operation after the other. The twin of that, and of `some_rows_route`."""
    x = add_rms_norm(residual, *norm)
    rows = Int8Rows.empty(len(x), x.shape[1], x.device)
    routing = route(
        few_rows_linear(x, router, bias, dtype=torch.float32),
        experts_per_token,
        renormalise=renormalise,
        live_tokens=live_tokens,
        counts=counts,
        sigmoid=scoring.sigmoid,
        scale=scoring.scale,
        scales=scoring.scales,
        quantised=(x, rows),
    )
    return x, rows, routing


def few_rows_route(
    residual: torch.Tensor,
    norm: RmsNorm,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    experts_per_token: int,
    *,
    counters: torch.Tensor,
    renormalise: bool,
    scoring: Scoring,
    live_tokens: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Int8Rows, Routing]:
    """Norm the residual [tokens, hidden] and choose the experts of each token. Returns the normed rows, the same in
    int8, and the choice.

    Takes what `has_few_rows` says. router [experts, hidden], bias [experts] or None, both of the residual's type; they
    and the norm's weights must not be written in the same step: see `dependent_launches`. counters [tokens or more]
    int32, all 0, as the launch leaves them. live_tokens, counts, renormalise: see `route`. The norm is rounded as that
    of add_rms_norm; logits are float32. Raises ValueError for shapes that do not fit.
    """
    (tokens, hidden), experts = residual.shape, len(router)
    fits = has_few_rows(residual, router, norm.weight, scoring) and hidden % SLAB == 0
    fits &= residual.is_contiguous() and router.is_contiguous() and router.shape[1] == hidden
    fits &= norm.weight.shape == (hidden,) and (bias is None or bias.shape == (experts,))
    fits &= counters.dtype == torch.int32 and counters.numel() >= tokens and 0 < experts_per_token <= experts
    check_fits(fits, "few_rows_route", residual=residual, norm=norm.weight, router=router, counters=counters)
    if not runs_kernel(residual):
        return route_rows(
            residual, norm, router, bias, experts_per_token,
            renormalise=renormalise, scoring=scoring, live_tokens=live_tokens, counts=counts,
        )  # fmt: skip
    x, rows = torch.empty_like(residual), Int8Rows.empty(tokens, hidden, residual.device)
    logits = residual.new_empty(tokens, experts, dtype=torch.float32)
    ids = torch.empty(tokens, experts_per_token, dtype=torch.int64, device=residual.device)
    weights = torch.empty(tokens, experts_per_token, dtype=torch.float32, device=residual.device)
    block = triton.next_power_of_2(hidden)
    _few_rows_route[(1 + experts, tokens)](
        residual, norm.weight, router, bias, logits, x, live_tokens, counts, ids, weights, scoring.scales,
        rows.codes, rows.scales, rows.sums, counters, norm.epsilon, scoring.scale,
        HIDDEN=hidden,
        BLOCK=block,
        EXPERTS=experts,
        EXPERT_BLOCK=triton.next_power_of_2(experts),
        CHOSEN=experts_per_token,
        CHOSEN_BLOCK=triton.next_power_of_2(experts_per_token),
        RENORMALISE=renormalise,
        SIGMOID=scoring.sigmoid,
        SUM_FLOOR=SIGMOID_SUM_FLOOR,
        SLAB_COUNT=hidden // SLAB,
        SLABS=slabs_at_once(hidden // SLAB),
        **launch_options(),
        num_warps=min(max(block // _COLUMNS_OF_A_WARP, 1), 16),
    )  # fmt: skip
    return x, rows, Routing(ids, weights)
