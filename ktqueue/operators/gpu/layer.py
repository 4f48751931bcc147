"""One layer of the GPU's decoder: attention, then a dense or a routed MLP.

What a sublayer adds to the residual is not added at once: the next norm does it in its own kernel. Knows no file.
"""

import torch

from ktqueue.operators.decoder_facts import DecoderFacts, LayerFacts
from ktqueue.operators.gpu.dense import DenseWeights, Linear
from ktqueue.operators.gpu.experts.step import PendingResidual, StepExperts
from ktqueue.operators.gpu.kernels.activation import gated
from ktqueue.operators.gpu.kernels.linear import few_rows_linear
from ktqueue.operators.gpu.kernels.rope import Rotary, qk_norm_rope_append
from ktqueue.operators.gpu.latent_layer import LatentLayer
from ktqueue.operators.native import ActivationName
from ktqueue.operators.step import StepContext


class Attention:
    """Norm, q, k and v in one product, paged attention, o."""

    def __init__(self, index: int, layer: LayerFacts, facts: DecoderFacts, weights: DenseWeights) -> None:
        self._index = index
        self._facts = facts
        self._window = layer.sliding_window
        self._norm = weights.vector(f"{layer.name}.input_layernorm.weight")
        own = f"{layer.name}.self_attn"
        self._qkv = weights.linear(f"{own}.q_proj", f"{own}.k_proj", f"{own}.v_proj")
        self._o = weights.linear(f"{own}.o_proj")
        self._q_norm = weights.vector(f"{own}.q_norm.weight") if facts.qk_norm else None
        self._k_norm = weights.vector(f"{own}.k_norm.weight") if facts.qk_norm else None

    def query(
        self,
        residual: torch.Tensor,
        pending: PendingResidual,
        positions: torch.Tensor,
        rotary: Rotary,
        step: StepContext,
    ) -> torch.Tensor:
        """Add `pending` to the residual [tokens, hidden] and write the step's keys and values to the cache.

        Returns the query [tokens, heads, head_dim].
        """
        facts, kv = self._facts, step.kv
        x = pending.add_to(residual, self._norm, facts.epsilon)
        return qk_norm_rope_append(
            self._qkv(x),
            heads=facts.heads,
            kv_heads=facts.kv_heads,
            q_norm=self._q_norm,
            k_norm=self._k_norm,
            epsilon=facts.epsilon,
            cosine=rotary.cosine,
            sine=rotary.sine,
            positions=positions,
            slot_mapping=step.slot_mapping,
            keys=kv.keys[self._index],
            values=kv.values[self._index],
            clip=facts.clip,
        )

    def attend(self, query: torch.Tensor, step: StepContext) -> torch.Tensor:
        """[tokens, heads * head_dim]: what each token sees, before `project`."""
        if step.attention is None:
            raise ValueError("GpuDecoder attends by step.attention, which is not given")
        attended = step.attention.attend(
            self._index, query, step.kv, scaling=self._facts.scaling, sliding_window=self._window
        )
        return attended.flatten(1)

    def project(self, attended: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden], to be added to the residual."""
        return self._o(attended)


class DenseMlp:
    """A gated MLP, gate and up in one product."""

    def __init__(self, module: str, activation: ActivationName, weights: DenseWeights) -> None:
        self._activation: ActivationName = activation
        self._gate_up = weights.linear(f"{module}.gate_proj", f"{module}.up_proj")
        self._down = weights.linear(f"{module}.down_proj")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        return self._down(gated(self._activation, self._gate_up(x)))


class DecoderLayer:
    """`routed`: which of the model's layers with routed experts this is; None: the MLP is dense."""

    def __init__(
        self, index: int, layer: LayerFacts, facts: DecoderFacts, weights: DenseWeights, routed: int | None
    ) -> None:
        self.attention: Attention | LatentLayer = (
            LatentLayer(index, layer, facts, facts.latent, weights)
            if facts.latent
            else Attention(index, layer, facts, weights)
        )
        self._epsilon = facts.epsilon
        self._norm = weights.vector(f"{layer.name}.post_attention_layernorm.weight")
        self._routed = routed
        mlp = f"{layer.name}.mlp"
        self._mlp: DenseMlp | None = None
        self._shared: tuple[DenseMlp, Linear | None] | None = None
        if routed is None:
            self._mlp = DenseMlp(mlp, layer.activation, weights)
            return
        self._router = weights.matrix(f"{mlp}.gate.weight")
        self._next: tuple[torch.Tensor, torch.Tensor] | None = None  # see predict_next_experts
        if layer.shared_expert:
            shared = DenseMlp(f"{mlp}.shared_expert", layer.activation, weights)
            self._shared = shared, weights.linear(f"{mlp}.shared_expert_gate")
        elif layer.shared_experts:
            self._shared = DenseMlp(f"{mlp}.shared_experts", layer.activation, weights), None

    @property
    def routes(self) -> bool:
        """Whether the layer has routed experts."""
        return self._routed is not None

    def mlp(
        self, residual: torch.Tensor, attended: torch.Tensor, experts: StepExperts, live: torch.Tensor | None
    ) -> PendingResidual:
        """Add the projection of `attended` to the residual [tokens, hidden]. Returns the output of the MLP, pending.

        `live`: StepContext.live_tokens.
        """
        projected = PendingResidual(self.attention.project(attended))
        if self._mlp is not None:
            return PendingResidual(added=self._mlp(projected.add_to(residual, self._norm, self._epsilon)))
        assert self._routed is not None
        task = experts.cpu_task(self._routed, len(residual))
        x = projected.add_to(residual, self._norm, self._epsilon, copy=None if task is None else task.buffers.x)
        return experts.run(
            self._routed,
            x,
            few_rows_linear(x, self._router, dtype=torch.float32),
            live,
            task=task,
            shared=self._shared_expert if self._shared else None,
            next_logits=self._next_logits if self._next else None,
        )

    def predict_next_experts(self, next_layer: "DecoderLayer") -> None:
        """Guess the experts of `next_layer` in each step. Both layers have routed experts."""
        norm = self._norm.float()
        scale = torch.where(norm == 0, 0, next_layer._norm.float() / norm)
        self._next = scale.to(self._norm.dtype), next_layer._router

    def _next_logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden], the input of this layer's router -> the next router's logits [tokens, experts] float32,
        as they would be if this layer's experts added nothing to the residual."""
        assert self._next is not None
        scale, router = self._next
        return few_rows_linear(x * scale, router, dtype=torch.float32)

    def _shared_expert(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert self._shared is not None
        mlp, gate = self._shared
        return mlp(x), None if gate is None else gate(x)
