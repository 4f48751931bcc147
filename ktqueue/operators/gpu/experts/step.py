"""The routed experts of a model in one step: the GPU computes those in its memory, the CPU computes the others.

Both work at the same time. This module knows where the experts are, not who decides that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ktqueue.operators import native
from ktqueue.operators.gpu.handoff.handoff import Handoff, HandoffBuffers
from ktqueue.operators.gpu.kernels import decoded_experts, expert_warpgroups
from ktqueue.operators.gpu.kernels.expert_int8 import Int8Rows
from ktqueue.operators.gpu.kernels.expert_pairs import ExpertBiases, ExpertPairs, SortedPairs
from ktqueue.operators.gpu.kernels.expert_products import experts, reads_once, rounds_each_pair, rounds_pairs
from ktqueue.operators.gpu.kernels.few_rows_router import few_rows_route, has_few_rows
from ktqueue.operators.gpu.kernels.norm import RmsNorm
from ktqueue.operators.gpu.kernels.panel_layout import ExpertRecord
from ktqueue.operators.gpu.kernels.router import PLAIN, Routing, Scoring, route
from ktqueue.operators.gpu.kernels.some_rows_router import MOST_CHOSEN, ExpertRequests, has_some_rows, some_rows_route
from ktqueue.operators.gpu.kernels.take_rows import send_rows
from ktqueue.operators.gpu.pending_residual import PendingResidual
from ktqueue.operators.gpu.side_stream import SideStream

_ROWS_WITH_SHARED = range(6, 17)
"""Rows of a step for which one launch pays up to the experts, beside a shared one (ADR 0081)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedLayer:
    """The routed experts of one layer.

    packed: the experts in the CPU's memory; record: the format of one expert in GPU memory; exact: activations are
    never rounded to int8, neither on the CPU nor on the GPU.
    """

    packed: native.ExpertLayer
    record: ExpertRecord
    experts: int
    experts_per_token: int
    renormalise: bool
    gate: native.GateFacts
    exact: bool = False
    scoring: Scoring = PLAIN
    biases: ExpertBiases | None = None


@dataclass(frozen=True, slots=True)
class ExpertLocations:
    """Where the experts of one layer are.

    gate_up, down: [experts] int64, offsets of the expert's record for either kernel; -1: the CPU computes it.
    on_gpu, on_cpu: whether any expert may be there. fixed: the offsets are known before the router has chosen;
    otherwise `ExpertResidency.choose` writes them. first: of either kernel, see ExpertPairs.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    on_gpu: bool = True
    on_cpu: bool = True
    fixed: bool = True
    first: int | None = None


class ExpertResidency:
    """Where the experts are during one kind of step. Layers are numbered among those with routed experts.

    Subclasses override what they need. memory: uint8, which the offsets refer to. sends_rows_late: the CPU is sent only
    the tokens whose experts it computes, once the router has chosen; otherwise all, which is sooner.
    """

    memory: torch.Tensor
    sends_rows_late = False

    def locations(self, layer: int) -> ExpertLocations:
        """Where the experts of a layer are."""
        raise NotImplementedError

    def use_counts(self, layer: int) -> torch.Tensor | None:
        """[experts] int32, to which the router adds each use; None: uses are not counted."""
        raise NotImplementedError

    def recent_uses(self, layer: int) -> torch.Tensor | None:
        """[experts] int32 for `ExpertRequests`, if all experts of the layer are in `memory`; None: some are not."""
        return None

    def choose(self, layer: int, ids: torch.Tensor, cpu_ids: torch.Tensor) -> None:
        """Divide the experts that the router has chosen. Only for layers whose locations are not fixed.

        ids: [tokens, experts_per_token] int64. cpu_ids: of that shape, receives the experts that the CPU computes, and
        -1 for the others.
        """

    def wait_for_arrival(self, layer: int) -> None:
        """Let the current stream wait until the layer's experts are in `memory`."""

    def release(self, layer: int) -> None:
        """Note that everything that reads the layer's experts has been launched on the current stream."""

    def layer_done(self, layer: int) -> None:
        """Note that the current stream has the CPU's result of the layer."""


SharedExpert = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""x [tokens, hidden] -> output [tokens, hidden] of an expert that sees every token, and the logit of its gate
[tokens, 1]; None: it has no gate."""

NextLogits = Callable[[torch.Tensor], torch.Tensor]
"""x [tokens, hidden], the input of a layer's router -> probable logits of the next layer's router [tokens, experts]."""


class StepExperts:
    """All routed experts for one step.

    handoff: the way to the CPU's experts, needed if any expert may be there. first: the number of the first layer
    there. predicts: while the CPU computes a layer, the GPU guesses which experts the next layer will need. decoded:
    for a number of tokens, the memory in which a layer's experts are decoded, [weights] in the compute type; None:
    packed experts are multiplied. choices: [layers, tokens or more, experts_per_token] int32, receives the experts of
    each token. beside: where a shared expert is computed while the GPU chooses and computes the others; None: behind
    them. counters: for steps of few rows, int32, all 0 between launches; None: another step runs at the same time.
    warpgroups: the layers whose experts are never decoded, since expert_warpgroups.py multiplies many pairs.
    """

    def __init__(
        self,
        layers: list[RoutedLayer],
        residency: ExpertResidency,
        handoff: Handoff | None,
        *,
        first: int = 0,
        predicts: bool = False,
        decoded: Callable[[int], torch.Tensor | None] | None = None,
        choices: torch.Tensor | None = None,
        beside: SideStream | None = None,
        counters: torch.Tensor | None = None,
        warpgroups: frozenset[int] = frozenset(),
    ) -> None:
        self._layers = layers
        self._choices = choices
        self._residency = residency
        self._handoff = handoff
        self._first = first
        self._predicts = predicts
        self._decoded = decoded
        self._beside = beside
        self._counters = counters
        self._warpgroups = warpgroups

    def cpu_buffers(self, index: int, tokens: int) -> HandoffBuffers | None:
        """The memory of the CPU's half of layer `index`; None: the CPU has none of its experts."""
        if self._handoff is None or not self._residency.locations(index).on_cpu:
            return None
        return self._handoff.buffers(tokens)

    def input_copy(self, buffers: HandoffBuffers | None) -> torch.Tensor | None:
        """Where the kernel that computes a layer's input x [tokens, hidden] must also write it; None: nowhere, since
        `run` sends what the CPU needs. buffers: of `cpu_buffers`."""
        return None if buffers is None or self._residency.sends_rows_late else buffers.x

    def ordered_rows(self, index: int, residual: torch.Tensor) -> torch.Tensor | None:
        """Memory for the input of layer `index`, like the residual [tokens, hidden], in the order of warpgroups; None:
        they do not multiply it. The kernel that computes the input also writes it there."""
        return torch.empty_like(residual) if self._by_warpgroups(index, len(residual)) else None

    def _by_warpgroups(self, index: int, tokens: int) -> bool:
        """Whether warpgroups multiply so many tokens by the layer's experts on the GPU."""
        layer = self._layers[index]
        pays = index in self._warpgroups and expert_warpgroups.pays(tokens * layer.experts_per_token, layer.experts)
        return pays and self._residency.locations(index).on_gpu

    def begin_shared(self, shared: SharedExpert, x: torch.Tensor, buffers: HandoffBuffers | None) -> SharedExpert:
        """Begin the shared expert of x [tokens, hidden] now, if it does not wait for the CPU to begin: see
        `cpu_buffers`. Returns what `run` is given as `shared`; until then the shared expert must not be needed."""
        return shared if self._beside is None or buffers is not None else self._beside.start(shared, x)

    def run(
        self,
        index: int,
        x: torch.Tensor,
        logits: torch.Tensor,
        live_tokens: torch.Tensor | None,
        *,
        buffers: HandoffBuffers | None,
        ordered: torch.Tensor | None,
        shared: SharedExpert | None = None,
        next_logits: NextLogits | None = None,
    ) -> PendingResidual:
        """x [tokens, hidden] and the router's logits [tokens, experts] -> the output of the experts of layer `index`.

        `live_tokens`: see StepContext. `buffers`, `ordered`: from `cpu_buffers` and `ordered_rows`. The latter has x.
        `shared` is computed on the GPU while the CPU works. `next_logits`: given if the next layer has routed experts
        too. The CPU's result is not copied: `added` is the memory that the CPU writes to.
        """
        on_cpu = self._handoff if buffers is not None else None
        for_cpu = None if buffers is None else (buffers.cpu_ids, buffers.weights)
        counts = self._residency.use_counts(index)
        rows = self._rows_to_quantise(index, x)
        quantised = None if rows is None else (x, rows)
        routing = self._route(index, logits, live_tokens, counts=counts, for_cpu=for_cpu, quantised=quantised)
        if self._choices is not None:
            self._choices[index, : len(x)].copy_(routing.ids)
        predicts = self._predicts and next_logits is not None
        sent: torch.Tensor | None = None  # which rows of x
        if on_cpu is not None and buffers is not None:
            if self._residency.sends_rows_late:
                sent = send_rows(x, routing.ids, self._residency.locations(index).gate_up, buffers.x)
            on_cpu.request(self._first + index, len(x), predicts=predicts, all_rows=sent is None)
        partials = self._compute_on_gpu(index, x, routing, rows, ordered=ordered)
        shared_output, shared_gate = (None, None) if shared is None else shared(x)
        if on_cpu is not None and buffers is not None:
            if predicts and next_logits is not None:
                # What the CPU would compute of the next layer, if its router's logits were these.
                unused = torch.empty_like(routing.weights)
                for_cpu = buffers.predicted, unused
                self._route(index + 1, next_logits(x), live_tokens, counts=None, for_cpu=for_cpu)
            on_cpu.wait(self._first + index, len(x))
        self._residency.layer_done(index)
        result = None if buffers is None else buffers.result
        return PendingResidual(result, partials, shared_output, shared_gate, added_rows=sent)

    def adds_to(self, index: int, residual: torch.Tensor, norm: torch.Tensor, router: torch.Tensor) -> bool:
        """Whether `add_to` can compute layer `index` for a residual [tokens, hidden]: few rows, all experts on the GPU.
        norm, router: the weights [hidden] of the norm before the experts, and [experts, hidden]."""
        plain = has_few_rows(residual, router, norm, self._layers[index].scoring)
        return plain and self._rounds_each_pair(index, residual) and self._multiplies_all(index, len(residual))

    def _multiplies_all(self, index: int, tokens: int) -> bool:
        """Whether the GPU has all experts of layer `index`, and multiplies such a step by packed ones."""
        here = self._handoff is None and self._counters is not None and self._residency.locations(index).on_gpu
        return here and (self._decoded is None or self._decoded(tokens) is None)

    def add_to(
        self,
        index: int,
        residual: torch.Tensor,
        norm: RmsNorm,
        router: torch.Tensor,
        bias: torch.Tensor | None,
        live_tokens: torch.Tensor | None,
    ) -> None:
        """Norm the residual [tokens, hidden], and add the output of the experts of layer `index` to it IN PLACE: three
        launches. For steps that `adds_to` allows. router, bias: see few_rows_route."""
        x, rows, routing = few_rows_route(residual, norm, router, bias, **self._choice(index, live_tokens))
        if self._choices is not None:
            self._choices[index, : len(x)].copy_(routing.ids)
        self._compute_on_gpu(index, x, routing, rows, added_to=residual)
        self._residency.layer_done(index)

    def runs_from(
        self, index: int, residual: torch.Tensor, norm: torch.Tensor, router: torch.Tensor, *, has_shared: bool
    ) -> bool:
        """Whether `run_from` should compute layer `index` for a residual [tokens, hidden]: some rows, all experts on
        the GPU. norm, router: as in `adds_to`. has_shared: then fewer numbers of rows gain, since a shared expert
        begins behind the launch."""
        layer, tokens = self._layers[index], len(residual)
        pairs, plain = tokens * layer.experts_per_token, has_some_rows(residual, router, norm, layer.scoring)
        plain = plain and layer.experts_per_token <= MOST_CHOSEN
        if not plain or (has_shared and tokens not in _ROWS_WITH_SHARED) or not self._multiplies_all(index, tokens):
            return False
        return rounds_pairs(layer.record, pairs, layer.experts, residual, exact=layer.exact)

    def run_from(
        self,
        index: int,
        residual: torch.Tensor,
        norm: RmsNorm,
        router: torch.Tensor,
        bias: torch.Tensor | None,
        live_tokens: torch.Tensor | None,
        *,
        shared: SharedExpert | None,
    ) -> PendingResidual:
        """Norm the residual [tokens, hidden] -> the output of the experts of layer `index`, as `run`. For steps that
        `runs_from` allows. router, bias: see few_rows_route."""
        sorts = not self._rounds_each_pair(index, residual)
        offsets = self._residency.locations(index).gate_up if sorts else None
        x, rows, lists, routing = some_rows_route(
            residual, norm, router, bias,
            offsets=offsets, requests=self._requests(index, residual), **self._choice(index, live_tokens),
        )  # fmt: skip
        if shared is not None:
            shared = self.begin_shared(shared, x, None)
        if self._choices is not None:
            self._choices[index, : len(x)].copy_(routing.ids)
        partials = self._compute_on_gpu(index, x, routing, rows, lists)
        shared_output = (None, None) if shared is None else shared(x)
        self._residency.layer_done(index)
        return PendingResidual(None, partials, *shared_output)

    def _requests(self, index: int, x: torch.Tensor) -> ExpertRequests | None:
        """The experts that a step x [tokens, hidden] may request early; None: none, or that does not pay."""
        layer, recent = self._layers[index], self._residency.recent_uses(index)
        pairs = len(x) * layer.experts_per_token
        if recent is None or not reads_once(layer.record, pairs, layer.experts, x, exact=layer.exact):
            return None
        return ExpertRequests(self._residency.memory, layer.record, recent)

    def _choice(self, index: int, live_tokens: torch.Tensor | None) -> dict[str, Any]:
        """How experts of layer `index` are chosen: arguments of few_rows_route and some_rows_route."""
        layer = self._layers[index]
        return {
            "experts_per_token": layer.experts_per_token,
            "counters": self._counters,
            "renormalise": layer.renormalise,
            "scoring": layer.scoring,
            "live_tokens": live_tokens,
            "counts": self._residency.use_counts(index),
        }

    def _route(
        self,
        index: int,
        logits: torch.Tensor,
        live_tokens: torch.Tensor | None,
        *,
        counts: torch.Tensor | None,
        for_cpu: tuple[torch.Tensor, torch.Tensor] | None,
        quantised: tuple[torch.Tensor, Int8Rows] | None = None,
    ) -> Routing:
        """Choose the experts of each token. counts, for_cpu, quantised: see route."""
        layer, locations = self._layers[index], self._residency.locations(index)
        routing = route(
            logits,
            layer.experts_per_token,
            renormalise=layer.renormalise,
            on_gpu=locations.gate_up if locations.on_gpu and locations.fixed else None,
            live_tokens=live_tokens,
            counts=counts,
            for_cpu=for_cpu,
            choice=layer.scoring.choice(logits),
            sigmoid=layer.scoring.sigmoid,
            scale=layer.scoring.scale,
            jitter=layer.scoring.jitter,
            scales=layer.scoring.scales,
            quantised=quantised,
        )
        if for_cpu is not None and not locations.fixed:
            self._residency.choose(index, routing.ids, for_cpu[0])
        return routing

    def _rows_to_quantise(self, index: int, x: torch.Tensor) -> Int8Rows | None:
        """Memory for x [tokens, hidden] in int8, if the router's launch quantises it: with few tokens, and without a
        CPU that waits for the router."""
        few = self._handoff is None and self._rounds_each_pair(index, x)
        return Int8Rows.empty(len(x), x.shape[1], x.device) if few else None

    def _rounds_each_pair(self, index: int, x: torch.Tensor) -> bool:
        """See rounds_each_pair."""
        layer = self._layers[index]
        pairs = len(x) * layer.experts_per_token
        return rounds_each_pair(layer.record, pairs, layer.experts, x.dtype, exact=layer.exact)

    def _compute_on_gpu(
        self,
        index: int,
        x: torch.Tensor,
        routing: Routing,
        rows: Int8Rows | None,
        lists: SortedPairs | None = None,
        *,
        added_to: torch.Tensor | None = None,
        ordered: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """The GPU's half of a layer, float32 or of x's dtype: [tokens, experts_per_token, hidden], or [tokens, 1,
        hidden] if they are added. None: it has none of the experts. rows, lists: see expert_products.experts. added_to,
        ordered: see `add_to` and `run`."""
        layer, residency = self._layers[index], self._residency
        locations = residency.locations(index)
        if not locations.on_gpu:
            return None
        residency.wait_for_arrival(index)
        pairs = ExpertPairs(
            residency.memory, locations.gate_up, routing.ids, layer.record, layer.biases, locations.first
        )
        memory = None if self._decoded is None or index in self._warpgroups else self._decoded(len(x))
        if self._by_warpgroups(index, len(x)):
            partials = expert_warpgroups.experts(pairs, locations.down, x, routing.weights, layer.gate, ordered)
        elif memory is not None:
            partials = decoded_experts.experts(pairs, locations.down, x, routing.weights, layer.gate, memory)
        else:
            partials = experts(
                pairs, locations.down, x, routing.weights, layer.gate,
                exact=layer.exact, rows=rows, lists=lists, added_to=added_to, counters=self._counters,
            )  # fmt: skip
        residency.release(index)
        return partials
