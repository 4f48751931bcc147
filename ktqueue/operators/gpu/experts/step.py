"""The routed experts of a model in one step: those that are in GPU memory on the GPU, all others on the CPU meanwhile.

Knows where experts are, not who decides that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ktqueue.operators import native
from ktqueue.operators.gpu.experts.scoring import PLAIN, Scoring
from ktqueue.operators.gpu.handoff.handoff import Handoff, HandoffBuffers
from ktqueue.operators.gpu.kernels.expert_products import ExpertRecord, experts
from ktqueue.operators.gpu.kernels.fused import add_rms_norm, route
from ktqueue.operators.gpu.turns import Turns


@dataclass(frozen=True, slots=True)
class Deferred:
    """What the residual still lacks, as add_rms_norm takes it: `added`, `shared` [tokens, hidden] and `shared_gate`
    [tokens, 1] of any float type, `partials` [tokens, slots, hidden] float32."""

    added: torch.Tensor | None = None
    partials: torch.Tensor | None = None
    shared: torch.Tensor | None = None
    shared_gate: torch.Tensor | None = None

    def add_to(
        self, residual: torch.Tensor, norm: torch.Tensor, epsilon: float, *, copy: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add it to the residual [tokens, hidden] in place; the RMSNorm of that, which goes to `copy` too."""
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
    """The routed experts of one layer. `packed`: as the CPU has them; `record`: one of them as the GPU has it; `exact`:
    activations are never rounded to int8, as the rules may ask of either."""

    packed: native.ExpertLayer
    record: ExpertRecord
    experts: int
    experts_per_token: int
    renormalise: bool
    activation: native.ActivationName
    exact: bool = False
    scoring: Scoring = PLAIN


@dataclass(frozen=True, slots=True)
class Places:
    """Where the experts of one layer are. gate_up, down: [experts] int64, offset into the pool of the expert's record
    for either kernel; -1: the CPU computes it. `on_gpu`, `on_cpu`: whether any may be there. `chosen`: they are known
    before the router's choice; else `ExpertPlaces.choose` fills them in."""

    gate_up: torch.Tensor
    down: torch.Tensor
    on_gpu: bool = True
    on_cpu: bool = True
    chosen: bool = True


SharedExpert = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""x [tokens, hidden] -> what an expert that sees every token makes of it, [tokens, hidden], and its gate's logit
[tokens, 1]; None: it has no gate."""

Foreseen = Callable[[torch.Tensor], torch.Tensor]
"""x [tokens, hidden] as a layer's router gets it -> what the next layer's will probably say, [tokens, experts]."""


class ExpertPlaces(Protocol):
    """Where the experts are for the steps of one kind. Layers are numbered among those with routed experts."""

    memory: torch.Tensor
    """uint8, that the offsets count in."""

    def places(self, layer: int) -> Places:
        """Where the experts of a layer are."""

    def counts(self, layer: int) -> torch.Tensor | None:
        """[experts] int32, to which uses are to be added; None: nobody wants to know."""

    def choose(self, layer: int, ids: torch.Tensor, cpu_ids: torch.Tensor) -> None:
        """ids [tokens, experts_per_token] int64 are what the layer's router has chosen. Where that was not known: say
        where its experts are, and leave in `cpu_ids`, of that shape, what the CPU computes, -1 for others."""

    def arrive(self, layer: int) -> None:
        """Let the current stream wait until the layer's experts are in `memory`."""

    def leave(self, layer: int) -> None:
        """All that reads the layer's experts has been launched on the current stream."""

    def settle(self, layer: int) -> None:
        """The current stream has what the CPU made of the layer."""


class StepExperts:
    """All routed experts for one step, or for one of the parts of a step that take turns. `handoff`: to the CPU's;
    needed if any may be there. `slot`: of the hand-off; each part has its own.

    defers: a layer does not wait for what its hand-off defers; the next one's result has it. The last layer defers
    nothing, so that no step leaves anything behind. Then all layers have experts on the CPU, or none has.
    predicts: while the CPU computes a layer, the GPU guesses which experts of the next one it will need.
    """

    def __init__(
        self,
        layers: list[RoutedLayer],
        where: ExpertPlaces,
        handoff: Handoff | None,
        *,
        slot: int = 0,
        defers: bool = False,
        predicts: bool = False,
    ) -> None:
        self._layers = layers
        self._where = where
        self._handoff = handoff
        self._own_slot = slot
        self._defers = defers
        self._predicts = predicts

    def buffers(self, index: int, tokens: int) -> HandoffBuffers | None:
        """What the CPU reads of layer `index` and writes; None: it has nothing to do. Whoever computes the layer's x
        [tokens, hidden] has to write it there too."""
        if self._handoff is None or not self._where.places(index).on_cpu:
            return None
        return self._handoff.buffers(tokens, slot=self._slot(index))

    def _slot(self, index: int) -> int:
        """While the GPU fills one, the CPU may still read the other."""
        return index % 2 if self._defers else self._own_slot

    def run(
        self,
        index: int,
        x: torch.Tensor,
        logits: torch.Tensor,
        live_tokens: torch.Tensor | None,
        shared: SharedExpert | None,
        buffers: HandoffBuffers | None,
        foreseen: Foreseen | None = None,
    ) -> Turns[Deferred]:
        """x [tokens, hidden], the router's logits [tokens, experts] -> what layer `index` adds to the residual.

        Yields before the stream waits for the CPU.
        `shared` is computed on the GPU while the CPU works. `live_tokens`: as in StepContext. `buffers`: the layer's,
        which have x already. `foreseen`: where the next layer has routed experts too. What is `added` in the end is the
        CPU's own result there: no kernel of ours moves rows.
        """
        layer, where = self._layers[index], self._where
        ahead = foreseen if self._predicts and buffers is not None else None
        places = where.places(index)
        routing = route(
            logits,
            layer.experts_per_token,
            renormalise=layer.renormalise,
            on_gpu=places.gate_up if places.on_gpu and places.chosen else None,
            live_tokens=live_tokens,
            counts=where.counts(index),
            copies=(buffers.cpu_ids, buffers.weights) if buffers is not None else None,
            choice=layer.scoring.choice(logits),
            sigmoid=layer.scoring.sigmoid,
            scale=layer.scoring.scale,
        )
        if buffers is not None and self._handoff is not None:
            if not places.chosen:
                where.choose(index, routing.ids, buffers.cpu_ids)
            self._handoff.request(
                index,
                len(x),
                slot=self._slot(index),
                defers=self._defers and index + 1 < len(self._layers),
                adds=self._defers and index > 0,
                predicts=ahead is not None,
            )
        partials = None
        if places.on_gpu:
            where.arrive(index)
            partials = experts(
                where.memory, places.gate_up, places.down, routing.ids, x, routing.weights, layer.record,
                layer.activation,
                activations="float" if layer.exact else "auto",
            )  # fmt: skip
            where.leave(index)
        beside = shared(x) if shared else (None, None)
        if ahead is not None and buffers is not None:  # behind all that the CPU's result is added to
            self._predict(index + 1, ahead(x), live_tokens, buffers.predicted)
        if buffers is not None and self._handoff is not None:
            yield
            self._handoff.settle(index, len(x), slot=self._slot(index))
        where.settle(index)
        return Deferred(buffers.result if buffers is not None else None, partials, *beside)

    def _predict(
        self, index: int, logits: torch.Tensor, live_tokens: torch.Tensor | None, predicted: torch.Tensor
    ) -> None:
        """Leave in `predicted` [tokens, experts_per_token] int64 what the CPU computes of layer `index`, if its router
        says logits [tokens, experts]."""
        layer, where = self._layers[index], self._where
        places = where.places(index)
        weights = torch.empty(predicted.shape, dtype=torch.float32, device=logits.device)
        routing = route(
            logits,
            layer.experts_per_token,
            renormalise=False,
            on_gpu=places.gate_up if places.on_gpu and places.chosen else None,
            live_tokens=live_tokens,
            copies=(predicted, weights),
            choice=layer.scoring.choice(logits),
            sigmoid=layer.scoring.sigmoid,
        )
        if not places.chosen:
            where.choose(index, routing.ids, predicted)
