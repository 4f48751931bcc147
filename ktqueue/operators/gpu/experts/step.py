"""The routed experts of a model in one step: the GPU computes those in its memory, the CPU computes the others.

Both work at the same time. This module knows where the experts are, not who decides that.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ktqueue.operators import native
from ktqueue.operators.gpu.handoff.handoff import Handoff, HandoffBuffers
from ktqueue.operators.gpu.kernels.expert_products import ExpertRecord, experts
from ktqueue.operators.gpu.kernels.norm import add_rms_norm
from ktqueue.operators.gpu.kernels.router import PLAIN, Routing, Scoring, route


@dataclass(frozen=True, slots=True)
class PendingResidual:
    """Results of a sublayer that are not added to the residual yet. The next norm adds them (see add_rms_norm).

    added, shared: [tokens, hidden] and shared_gate: [tokens, 1], of any float type; partials: [tokens, slots, hidden]
    float32.
    """

    added: torch.Tensor | None = None
    partials: torch.Tensor | None = None
    shared: torch.Tensor | None = None
    shared_gate: torch.Tensor | None = None

    def add_to(
        self, residual: torch.Tensor, norm: torch.Tensor, epsilon: float, *, copy: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add the results to the residual [tokens, hidden] in place. Returns the RMSNorm of the sum, also in `copy`."""
        return add_rms_norm(
            residual,
            norm,
            epsilon,
            added=self.added,
            partials=self.partials,
            shared=self.shared,
            shared_gate=self.shared_gate,
            copy=copy,
        )


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
    activation: native.ActivationName
    exact: bool = False
    scoring: Scoring = PLAIN


@dataclass(frozen=True, slots=True)
class ExpertLocations:
    """Where the experts of one layer are.

    gate_up, down: [experts] int64, offsets of the expert's record for either kernel; -1: the CPU computes it.
    on_gpu, on_cpu: whether any expert may be there. fixed: the offsets are known before the router has chosen;
    otherwise `ExpertResidency.choose` writes them.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    on_gpu: bool = True
    on_cpu: bool = True
    fixed: bool = True


class ExpertResidency:
    """Where the experts are during one kind of step. Layers are numbered among those with routed experts.

    Subclasses override what they need. memory: uint8, which the offsets refer to.
    """

    memory: torch.Tensor

    def locations(self, layer: int) -> ExpertLocations:
        """Where the experts of a layer are."""
        raise NotImplementedError

    def use_counts(self, layer: int) -> torch.Tensor | None:
        """[experts] int32, to which the router adds each use; None: uses are not counted."""
        raise NotImplementedError

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

    handoff: the way to the CPU's experts, needed if any expert may be there. predicts: while the CPU computes a layer,
    the GPU guesses which experts the next layer will need.
    """

    def __init__(
        self, layers: list[RoutedLayer], residency: ExpertResidency, handoff: Handoff | None, *, predicts: bool = False
    ) -> None:
        self._layers = layers
        self._residency = residency
        self._handoff = handoff
        self._predicts = predicts

    def cpu_task(self, index: int, tokens: int) -> "CpuTask | None":
        """The CPU's half of layer `index`; None: the CPU has none of its experts.

        The kernel that computes the layer's input x [tokens, hidden] must also write it to the task's buffers.
        """
        if self._handoff is None or not self._residency.locations(index).on_cpu:
            return None
        return CpuTask(self._handoff, index, tokens)

    def run(
        self,
        index: int,
        x: torch.Tensor,
        logits: torch.Tensor,
        live_tokens: torch.Tensor | None,
        *,
        task: "CpuTask | None",
        shared: SharedExpert | None = None,
        next_logits: NextLogits | None = None,
    ) -> PendingResidual:
        """x [tokens, hidden] and the router's logits [tokens, experts] -> the output of the experts of layer `index`.

        `live_tokens`: see StepContext. `task`: from `cpu_task`, with x in its buffers. `shared` is computed on the GPU
        while the CPU works. `next_logits`: given if the next layer has routed experts too. The CPU's result is not
        copied: `added` is the memory that the CPU writes to.
        """
        predicts = self._predicts and next_logits is not None and task is not None
        routing = self._route(
            index,
            logits,
            live_tokens,
            counts=self._residency.use_counts(index),
            copies=None if task is None else (task.buffers.cpu_ids, task.buffers.weights),
        )
        if task is not None:
            task.request(predicts=predicts)
        partials = self._compute_on_gpu(index, x, routing)
        shared_output = (None, None) if shared is None else shared(x)
        if task is not None:
            if predicts and next_logits is not None:
                self._predict(index + 1, next_logits(x), live_tokens, task.buffers.predicted)
            task.wait()
        self._residency.layer_done(index)
        return PendingResidual(None if task is None else task.buffers.result, partials, *shared_output)

    def _route(
        self,
        index: int,
        logits: torch.Tensor,
        live_tokens: torch.Tensor | None,
        *,
        counts: torch.Tensor | None,
        copies: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> Routing:
        """Choose the experts of each token. `copies` receive what the CPU computes: its ids and their weights."""
        layer, locations = self._layers[index], self._residency.locations(index)
        routing = route(
            logits,
            layer.experts_per_token,
            renormalise=layer.renormalise,
            on_gpu=locations.gate_up if locations.on_gpu and locations.fixed else None,
            live_tokens=live_tokens,
            counts=counts,
            copies=copies,
            choice=layer.scoring.choice(logits),
            sigmoid=layer.scoring.sigmoid,
            scale=layer.scoring.scale,
        )
        if copies is not None and not locations.fixed:
            self._residency.choose(index, routing.ids, copies[0])
        return routing

    def _compute_on_gpu(self, index: int, x: torch.Tensor, routing: Routing) -> torch.Tensor | None:
        """The GPU's half of a layer: [tokens, experts_per_token, hidden] float32; None: it has none of the experts."""
        layer, residency = self._layers[index], self._residency
        locations = residency.locations(index)
        if not locations.on_gpu:
            return None
        residency.wait_for_arrival(index)
        partials = experts(
            residency.memory, locations.gate_up, locations.down, routing.ids, x, routing.weights, layer.record,
            layer.activation,
            activations="float" if layer.exact else "auto",
        )  # fmt: skip
        residency.release(index)
        return partials

    def _predict(
        self, index: int, logits: torch.Tensor, live_tokens: torch.Tensor | None, predicted: torch.Tensor
    ) -> None:
        """Write the experts that the CPU would compute of layer `index` to `predicted` [tokens, experts_per_token]
        int64, if its router's logits were `logits` [tokens, experts]."""
        weights = torch.empty(predicted.shape, dtype=torch.float32, device=logits.device)
        self._route(index, logits, live_tokens, counts=None, copies=(predicted, weights))


class CpuTask:
    """The CPU's half of one layer: a task of the hand-off."""

    def __init__(self, handoff: Handoff, layer: int, tokens: int) -> None:
        self._handoff = handoff
        self._layer = layer
        self._tokens = tokens
        self.buffers: HandoffBuffers = handoff.buffers(tokens)

    def request(self, *, predicts: bool) -> None:
        """Enqueue the request; the input is in `buffers`. predicts: `buffers.predicted` is filled in before `wait`."""
        self._handoff.request(self._layer, self._tokens, predicts=predicts)

    def wait(self) -> None:
        """Enqueue a wait for the result in `buffers`."""
        self._handoff.wait(self._layer, self._tokens)
