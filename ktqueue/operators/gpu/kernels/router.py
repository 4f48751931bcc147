"""The router: from its logits to each token's experts and their weights, in one launch.

The kernel also tells the CPU which experts it computes, and counts how often each is used. No host sync: it can be
captured in a CUDA graph.
"""

from dataclasses import dataclass

import torch

from ktqueue.operators.gpu.kernels.expert_int8 import Int8Rows, quantise_row, slabs_at_once
from ktqueue.operators.gpu.kernels.operation import (
    check_fits,
    launch_options,
    runs_kernel,
    tl,
    triton,
    wait_for_previous,
)
from ktqueue.operators.gpu.kernels.panel_layout import SLAB

SIGMOID_SUM_FLOOR = 1e-20
"""Added to a sum of sigmoids before dividing by it (transformers' DeepseekV3MoE), because all of them may be 0."""
_CHOSEN = tl.constexpr(-(2**31))  # below the order of -infinity


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of each token: `ids` [tokens, experts_per_token] int64, -1 for padding tokens; `weights` float32 of
    that shape."""

    ids: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a router scores experts, beyond the highest softmax: DeepSeek's routers.

    `sigmoid`: an expert's score is the sigmoid of its logit; otherwise it is the softmax over all. `bias` [experts]
    float32 is added to the scores only to choose. `scale` multiplies the final weights. Only experts of the best
    `groups_used` of `groups` groups are chosen. The score of a group is that of its best expert, or with sigmoids the
    sum of its best two. `jitter`: see csrc/model/router.h; with it, two experts are chosen by their logits.
    `scales` [experts] float32: further factors of the final weights.
    """

    sigmoid: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_used: int = 1
    bias: torch.Tensor | None = None
    jitter: float = 0.0
    scales: torch.Tensor | None = None

    @property
    def is_by_logits(self) -> bool:
        """Whether experts are chosen by their logits alone."""
        return self.bias is None and self.groups_used >= self.groups and self.jitter == 0

    def choice(self, logits: torch.Tensor) -> torch.Tensor | None:
        """logits [tokens, experts] -> the scores by which experts are chosen, same shape. None: the logits themselves.

        Plain torch on any device; can be captured in a CUDA graph.
        """
        grouped = self.groups_used < self.groups
        if not grouped and self.bias is None:
            return None
        scores = logits.float()
        if self.sigmoid:
            scores = scores.sigmoid()
        elif self.bias is not None:
            scores = scores.softmax(-1)
        if self.bias is not None:
            scores = scores + self.bias
        if not grouped:
            return scores
        by_group = scores.view(len(scores), self.groups, -1)
        best = by_group.topk(2, -1).values.sum(-1) if self.sigmoid else by_group.amax(-1)
        used = best.topk(self.groups_used, -1).indices
        unused = torch.ones_like(best, dtype=torch.bool).scatter_(1, used, False)
        return by_group.masked_fill(unused[:, :, None], float("-inf")).flatten(1)


PLAIN = Scoring()
"""The highest softmax."""


@triton.jit
def _sortable(bits):
    """Map the bits of a float32 to an int32 of the same order. It is its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _share(x, best, jitter, inside):
    """The softmax of the logit `best` over those `inside` that are within 2 * jitter of it: see csrc/model/router.h."""
    far = (best - x) / tl.maximum(tl.abs(x), best) > 2 * jitter
    return 1.0 / tl.sum(tl.where(inside & (far == 0), tl.exp(x - best), 0.0), axis=0)


@triton.jit
def choose(
    token, logits, on_gpu, live_tokens, counts, ids_out, weights_out, cpu_ids, cpu_weights, choice, scales,
    scale, stride, jitter,
    EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr, CHOSEN: tl.constexpr, CHOSEN_BLOCK: tl.constexpr,
    RENORMALISE: tl.constexpr, SIGMOID: tl.constexpr, SUM_FLOOR: tl.constexpr,
    JITTER: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one token: see `route`."""
    expert = tl.arange(0, EXPERT_BLOCK)
    slot = tl.arange(0, CHOSEN_BLOCK)
    infinity: tl.constexpr = float("inf")
    x = tl.load(logits + token.to(tl.int64) * stride + expert, mask=expert < EXPERTS, other=-infinity).to(tl.float32)
    largest = tl.max(x, axis=0)
    unsound = (tl.max(((x != x) | (x == infinity)).to(tl.int32), axis=0) > 0) | (largest == -infinity)
    scores = x
    if choice is not None:
        scores = tl.load(choice + token.to(tl.int64) * EXPERTS + expert, mask=expert < EXPERTS, other=-infinity)
    scores = tl.where(scores == 0.0, 0.0, scores)  # -0 equals 0, but their bits differ

    # Scores are ordered as int32, which a warp compares in one instruction. That is exact: they are float32, and equal
    # ones have equal bits now. Among them the lowest id wins, so the padding of the block comes after every expert. A
    # NaN comes first or last by its sign, but a row of logits with one is unsound.
    order = _sortable(scores.to(tl.int32, bitcast=True))
    ids = tl.zeros([CHOSEN_BLOCK], tl.int64)
    keys = tl.zeros([CHOSEN_BLOCK], tl.int32)
    for i in tl.static_range(CHOSEN):
        highest = tl.max(order, axis=0)
        first = tl.min(tl.where(order == highest, expert, EXPERT_BLOCK), axis=0)
        ids = tl.where(slot == i, first.to(tl.int64), ids)
        keys = tl.where(slot == i, highest, keys)
        order = tl.where(expert == first, _CHOSEN, order)

    chosen = _sortable(keys).to(tl.float32, bitcast=True)  # logits of the chosen experts
    place = slot
    if choice is not None:
        chosen = tl.load(logits + token.to(tl.int64) * stride + ids, mask=slot < CHOSEN, other=0.0).to(tl.float32)
        equal_first = (chosen[None, :] == chosen[:, None]) & (ids[None, :] < ids[:, None])
        before = ((chosen[None, :] > chosen[:, None]) | equal_first) & (slot < CHOSEN)[None, :]
        place = tl.where(unsound, slot, tl.sum(before.to(tl.int32), axis=1))
    if JITTER:
        second = tl.sum(tl.where(slot == 1, chosen, 0.0), axis=0)
        first_id = tl.sum(tl.where(slot == 0, ids, 0), axis=0)
        of_first = _share(x, largest, jitter, expert < EXPERTS)
        of_second = _share(x, second, jitter, (expert < EXPERTS) & (expert != first_id))
        weights = tl.where(slot == 0, of_first, of_second)
    elif SIGMOID:
        weights = tl.where(slot < CHOSEN, tl.sigmoid(chosen), 0.0)
        if RENORMALISE:
            weights = weights / (tl.sum(weights, axis=0) + SUM_FLOOR)
    else:
        weights = tl.where(slot < CHOSEN, tl.exp(chosen - largest), 0.0)
        weights = weights / tl.sum(weights if RENORMALISE else tl.exp(x - largest), axis=0)
    weights *= scale
    ids = tl.where(unsound, slot.to(tl.int64), ids)  # a NaN among the scores makes the ids meaningless
    weights = tl.where(unsound, float("nan"), weights)
    if scales is not None:
        weights *= tl.load(scales + ids, mask=slot < CHOSEN, other=0.0)

    inside = slot < CHOSEN
    counted = inside
    if live_tokens is not None:
        live = token < tl.load(live_tokens)
        ids = tl.where(live, ids, -1)
        weights = tl.where(live, weights, 0.0)
        counted = inside & live
    element = token.to(tl.int64) * CHOSEN + place
    tl.store(ids_out + element, ids, mask=inside)
    tl.store(weights_out + element, weights, mask=inside)
    if counts is not None:
        tl.atomic_add(counts + ids, 1, mask=counted, sem="relaxed")
    if cpu_ids is not None:
        if on_gpu is not None:
            ids = tl.where(tl.load(on_gpu + ids, mask=counted, other=-1) >= 0, -1, ids)
        tl.store(cpu_ids + element, ids, mask=inside)
        tl.store(cpu_weights + element, weights, mask=inside)


@triton.jit
def _route(
    logits, on_gpu, live_tokens, counts, ids_out, weights_out, cpu_ids, cpu_weights, choice, scales,
    scale, stride, jitter,
    EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr, CHOSEN: tl.constexpr, CHOSEN_BLOCK: tl.constexpr,
    RENORMALISE: tl.constexpr, SIGMOID: tl.constexpr, SUM_FLOOR: tl.constexpr,
    JITTER: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    wait_for_previous(WAITS)
    choose(
        tl.program_id(0), logits, on_gpu, live_tokens, counts, ids_out, weights_out, cpu_ids, cpu_weights, choice,
        scales, scale, stride, jitter,
        EXPERTS, EXPERT_BLOCK, CHOSEN, CHOSEN_BLOCK, RENORMALISE, SIGMOID, SUM_FLOOR, JITTER,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _route_and_quantise(
    logits, on_gpu, live_tokens, counts, ids_out, weights_out, cpu_ids, cpu_weights, choice, scales,
    scale, stride, jitter,
    x, codes, x_scales, sums, tokens, x_stride,
    EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr, CHOSEN: tl.constexpr, CHOSEN_BLOCK: tl.constexpr,
    RENORMALISE: tl.constexpr, SIGMOID: tl.constexpr, SUM_FLOOR: tl.constexpr,
    JITTER: tl.constexpr, WAITS: tl.constexpr, SLAB_COUNT: tl.constexpr, SLABS: tl.constexpr,
):  # fmt: skip
    """Programs 0 .. tokens - 1 route a token, the others quantise its row of x."""
    wait_for_previous(WAITS)
    program = tl.program_id(0)
    if program < tokens:
        choose(
            program, logits, on_gpu, live_tokens, counts, ids_out, weights_out, cpu_ids, cpu_weights, choice, scales,
            scale, stride, jitter,
            EXPERTS, EXPERT_BLOCK, CHOSEN, CHOSEN_BLOCK, RENORMALISE, SIGMOID, SUM_FLOOR, JITTER,
        )  # fmt: skip
    else:
        quantise_row(program - tokens, x, codes, x_scales, sums, x_stride, SLAB_COUNT, SLABS)


def route(
    logits: torch.Tensor,
    experts_per_token: int,
    *,
    renormalise: bool,
    on_gpu: torch.Tensor | None = None,
    live_tokens: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    for_cpu: tuple[torch.Tensor, torch.Tensor] | None = None,
    choice: torch.Tensor | None = None,
    sigmoid: bool = False,
    scale: float = 1.0,
    jitter: float = 0.0,
    scales: torch.Tensor | None = None,
    quantised: tuple[torch.Tensor, Int8Rows] | None = None,
) -> Routing:
    """Choose the experts of each token: softmax over all experts, of which the highest stay, highest first.

    logits [tokens, experts], any float dtype, rows may be strided; the softmax is float32. Among equal logits the
    lowest id comes first. choice [tokens, experts] float32: experts are chosen by it instead of the logits, and still
    ordered by their weights, highest first. sigmoid: weights are sigmoids of the logits, not the softmax. scale: all
    weights are multiplied by it at the end, and each by the expert's of `scales` [experts] float32. jitter: see
    Scoring; the other ways to weigh are then unused. renormalise: weights add up to 1 (Mixtral, norm_topk_prob), or
    stay 0 if all sigmoids are 0; otherwise weights are those of the softmax.
    live_tokens [1] int32: tokens from there on are padding and get ids -1 and weights 0. counts [experts] int32: the
    uses by all other tokens are added. for_cpu: where the CPU reads the ids, -1 where the GPU has the expert, and the
    weights; of the shapes and dtypes of a Routing, may be pinned host memory. on_gpu [experts] int64: >= 0 where the
    GPU has the expert. quantised: x [tokens, hidden] of any float type, whose rows may be strided, and where it is
    written in int8 by the same launch.
    A row with NaN or +infinity, or of -infinity alone, gets ids 0, 1, ... and weights of NaN.
    Raises ValueError for shapes that do not fit.
    """
    tokens, experts = logits.shape
    shape = (tokens, experts_per_token)
    fits = 0 < experts_per_token <= experts and logits.stride(1) == 1
    fits &= on_gpu is None or (on_gpu.shape == (experts,) and on_gpu.dtype == torch.int64)
    fits &= live_tokens is None or (live_tokens.numel() == 1 and live_tokens.dtype == torch.int32)
    fits &= counts is None or (counts.shape == (experts,) and counts.dtype == torch.int32)
    fits &= jitter == 0 or (experts_per_token == 2 and choice is None)
    fits &= scales is None or (scales.shape == (experts,) and scales.dtype == torch.float32)
    fits &= choice is None or (choice.shape == logits.shape and choice.dtype == torch.float32)
    fits &= for_cpu is None or [(x.shape, x.dtype) for x in for_cpu] == [(shape, torch.int64), (shape, torch.float32)]
    check_fits(
        fits, f"route to {experts_per_token}", logits=logits, on_gpu=on_gpu, live_tokens=live_tokens, counts=counts
    )
    if runs_kernel(logits):
        ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
        weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
        block = triton.next_power_of_2(experts)
        if tokens:
            kernel, programs = _route, tokens
            rows: tuple[torch.Tensor | int, ...] = ()
            options: dict[str, int] = {}
            if quantised is not None:
                kernel, programs, (x, target) = _route_and_quantise, 2 * tokens, quantised
                rows = x, target.codes, target.scales, target.sums, tokens, x.stride(0)
                slabs = x.shape[1] // SLAB
                options = {"SLAB_COUNT": slabs, "SLABS": slabs_at_once(slabs)}
            kernel[(programs,)](
                logits, on_gpu, live_tokens, counts, ids, weights, *(for_cpu or (None, None)), choice, scales,
                scale, logits.stride(0), jitter, *rows,
                EXPERTS=experts,
                EXPERT_BLOCK=block,
                CHOSEN=experts_per_token,
                CHOSEN_BLOCK=triton.next_power_of_2(experts_per_token),
                RENORMALISE=renormalise,
                SIGMOID=sigmoid,
                SUM_FLOOR=SIGMOID_SUM_FLOOR,
                JITTER=jitter != 0,
                **launch_options(),
                **options,
                num_warps=1 if block <= 256 else 4,
            )  # fmt: skip
        return Routing(ids, weights)
    order = torch.sort((logits if choice is None else choice).float(), dim=-1, descending=True, stable=True)
    ids = order.indices[:, :experts_per_token].contiguous()
    if choice is not None:
        ids = ids.sort(-1).values
        ids = ids.gather(1, torch.sort(logits.float().gather(1, ids), dim=-1, descending=True, stable=True).indices)
    scores = logits.float().sigmoid() if sigmoid else logits.float().softmax(-1)
    weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + (SIGMOID_SUM_FLOOR if sigmoid else 0.0))
    weights = weights * scale if jitter == 0 else _shares(logits.float(), ids, jitter)
    if scales is not None:
        weights = weights * scales[ids]
    unsound = logits.amax(-1, keepdim=True).isfinite().logical_not()  # amax passes NaN on
    ids = torch.where(unsound, torch.arange(experts_per_token, device=ids.device), ids)
    weights = weights.masked_fill(unsound, float("nan"))
    if live_tokens is not None:
        padding = torch.arange(tokens, device=ids.device)[:, None] >= live_tokens
        ids, weights = ids.masked_fill(padding, -1), weights.masked_fill(padding, 0)
    if counts is not None:
        counts += torch.bincount(ids[ids >= 0], minlength=experts)
    if for_cpu is not None:
        for_cpu[0].copy_(ids if on_gpu is None else torch.where(on_gpu[ids] >= 0, -1, ids))
        for_cpu[1].copy_(weights)
    if quantised is not None:
        rounded = Int8Rows.quantise(quantised[0])
        for part in ("codes", "scales", "sums"):
            getattr(quantised[1], part).copy_(getattr(rounded, part))
    return Routing(ids, weights)


def _shares(logits: torch.Tensor, ids: torch.Tensor, jitter: float) -> torch.Tensor:
    """The weights of the two chosen experts of a router with jitter: see csrc/model/router.h."""
    shares = []
    for best in logits.gather(1, ids).split(1, dim=1):
        far = (best - logits) / logits.abs().maximum(best) > 2 * jitter
        shares.append((logits - best).exp().masked_fill(far, 0.0).sum(-1).reciprocal())
        logits = logits.scatter(1, ids[:, :1], -torch.inf)
    return torch.stack(shares, dim=-1)
