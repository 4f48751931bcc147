"""One layer of the GPU's decoder: attention, then a dense or a routed MLP.

The output of a sublayer is not added to the residual at once: the kernel of the next norm adds it. Knows no file.
"""

import torch
from torch import nn

from ktqueue.operators import reference
from ktqueue.operators.decoder_facts import DecoderFacts
from ktqueue.operators.gpu.attention.by_clusters import Projection
from ktqueue.operators.gpu.attention.by_heads import HeadsPlan
from ktqueue.operators.gpu.attention.triton import ClusterDecodePlan
from ktqueue.operators.gpu.dense import DecodedLinear, DenseLinear, DenseWeights
from ktqueue.operators.gpu.experts.step import SharedExpert, StepExperts
from ktqueue.operators.gpu.kernels.activation import ACTIVATIONS, gated
from ktqueue.operators.gpu.kernels.linear import few_rows_gated, few_rows_linear
from ktqueue.operators.gpu.kernels.linear_attention import StateRows, linear_attention
from ktqueue.operators.gpu.kernels.norm import RmsNorm, add_rms_norm
from ktqueue.operators.gpu.kernels.rope import Rotary, qk_norm_rope_append
from ktqueue.operators.gpu.latent_layer import LatentSelfAttention, attention_plan
from ktqueue.operators.gpu.pending_residual import PendingResidual
from ktqueue.operators.indexer import KeyChoice
from ktqueue.operators.layer_facts import LayerFacts
from ktqueue.operators.linear_attention import LinearAttentionShape
from ktqueue.operators.native import GateFacts
from ktqueue.operators.step import ScoreOptions, StepContext


class SelfAttention:
    """Norm, one product for q, k and v, paged attention, o."""

    def __init__(self, index: int, layer: LayerFacts, facts: DecoderFacts, weights: DenseWeights) -> None:
        self._index = index
        self._facts = facts
        centred = facts.centred
        self._norm = weights.norm(f"{layer.name}.input_layernorm", centred=centred)
        module = f"{layer.name}.self_attn"
        self._heads = layer.heads
        names = [f"{module}.{part}_proj" for part in ("q", "k", "v") if part != "v" or not layer.value_is_key]
        if facts.gate:
            names.append(f"{module}.{facts.gate}")
        self._qkv = self._with_gate(weights, names) if facts.gated else weights.linear(*names)
        self._o = weights.linear(f"{module}.o_proj")
        sinks = weights.vector(f"{module}.sinks").float() if layer.sinks else None
        self._scores = ScoreOptions(facts.scaling, layer.sliding_window, sinks, facts.score_cap, layer.chunk)
        norms = facts.qk_norm
        self._q_norm = weights.norm(f"{module}.{norms[0]}", centred=centred) if norms else None
        self._k_norm = weights.norm(f"{module}.{norms[1]}", centred=centred) if norms else None
        if layer.unit_norms:
            self._q_norm = self._k_norm = weights.ones(layer.head_dim)
        self._grows = layer.growth != 0
        self._v_norm = weights.ones(layer.head_dim) if layer.value_norm else None
        self._kv_heads, self._head_dim = layer.kv_heads, layer.head_dim
        self._rotary_pairs = layer.rotary_pairs
        self._rotary_table = layer.rotary_table
        norm_shapes = {None if norm is None else norm.shape for norm in (self._q_norm, self._k_norm)}
        self._is_plain = (  # one launch may make queries, keys and values and attend: see by_clusters.py
            norm_shapes in ({None}, {(layer.head_dim,)})
            and 2 * layer.rotary_pairs == layer.head_dim
            and not (facts.clip or facts.norm_after_rotary or layer.value_norm or layer.value_is_key or self._grows)
        )
        self._gate = torch.empty(0)  # of the step's tokens, [tokens, heads * head_dim] or [tokens, heads]

    def _with_gate(self, weights: DenseWeights, names: list[str]) -> DenseLinear:
        """One product for query, key, value and the output's gate, in this order."""
        (query, gate), halves = weights.gated_query(names[0], self._heads)
        biases = [weights.vector(f"{name}.bias") for name in names[1:] if halves]
        bias = torch.cat([halves[0], *biases, halves[1]]) if halves else None
        return weights.product([query, *(weights.stored(f"{name}.weight") for name in names[1:]), gate], bias)

    def query(
        self,
        residual: torch.Tensor,
        pending: PendingResidual,
        positions: torch.Tensor,
        rotary: Rotary,
        step: StepContext,
    ) -> torch.Tensor:
        """Add `pending` to the residual [tokens, hidden] and write the step's keys and values to the cache.

        Returns the query [tokens, heads, head_dim], or what `attend` returns if one launch computes all.
        """
        facts, kv = self._facts, step.kv
        if pending.is_empty and self._norm.dim() == 1:
            qkv = self._qkv(residual, norm=RmsNorm(self._norm, facts.epsilon))
        else:
            qkv = self._qkv(pending.add_to(residual, self._norm, facts.epsilon))
        if facts.gated or facts.gate:
            width = self._heads * (1 if facts.head_gate else self._head_dim)
            qkv, self._gate = qkv[:, :-width], qkv[:, -width:]
        if (plan := self._cluster_plan(step)) is not None:
            tables = (rotary.cosine[self._rotary_table], rotary.sine[self._rotary_table])
            norms = self._q_norm, self._k_norm, facts.epsilon
            projection = Projection(qkv, *norms, *tables, positions, step.slot_mapping)
            return plan.attend_to(self._index, projection, self._heads, kv, self._scores)
        query = qk_norm_rope_append(
            qkv,
            heads=self._heads,
            kv_heads=self._kv_heads,
            q_norm=self._q_norm,
            k_norm=self._k_norm,
            epsilon=facts.epsilon,
            cosine=rotary.cosine[self._rotary_table, :, : self._rotary_pairs],
            sine=rotary.sine[self._rotary_table, :, : self._rotary_pairs],
            norm_after_rotary=facts.norm_after_rotary and self._q_norm is not None,
            positions=positions,
            slot_mapping=step.slot_mapping,
            keys=kv.keys[self._index],
            values=kv.values[self._index],
            clip=facts.clip,
            v_norm=self._v_norm,
            scale=kv.layout.scale(self._index),
        )
        return query.mul_(rotary.growth[positions, None, None]) if self._grows else query

    def _cluster_plan(self, step: StepContext) -> ClusterDecodePlan | None:
        """What attends to the product for q, k and v in one launch, and writes to the cache. None: it takes several."""
        plan = attention_plan(step)
        if isinstance(plan, HeadsPlan):
            plan = plan.of_layer(self._index)
        return plan if self._is_plain and isinstance(plan, ClusterDecodePlan) else None

    def attend(self, query: torch.Tensor, step: StepContext) -> torch.Tensor:
        """The attention output of each token, [tokens, heads * columns of a value]."""
        attended = query
        if self._cluster_plan(step) is None:
            attended = attention_plan(step).attend(self._index, query, step.kv, self._scores)
        if self._facts.value_dim:
            attended = attended[..., : self._facts.value_dim]
        if self._facts.value_scale != 1:
            attended = attended * self._facts.value_scale
        if not (self._facts.gated or self._facts.gate):
            return attended.flatten(1)
        gate, self._gate = self._gate, torch.empty(0)  # it would take memory until the next step
        gate = nn.functional.softplus(gate) if self._facts.softplus_gate else gate.sigmoid()
        return (attended.view(*gate.shape, -1) * gate[..., None]).flatten(1)

    def project(self, attended: torch.Tensor, added_to: torch.Tensor | None = None) -> torch.Tensor:
        """The output [tokens, hidden], which belongs to the residual. added_to: the residual, to add it IN PLACE."""
        return self._o(attended, added_to=added_to)


class LinearSelfAttention:
    """Norm, one product for all inputs, linear attention, o. index: of the layer among those with such attention."""

    def __init__(
        self, index: int, layer: LayerFacts, facts: DecoderFacts, shape: LinearAttentionShape, weights: DenseWeights
    ) -> None:
        self._index = index
        self._shape = shape
        self._epsilon = facts.epsilon
        self._norm = weights.norm(f"{layer.name}.input_layernorm", centred=facts.centred)
        read = weights.linear_attention(f"{layer.name}.linear_attn", shape)
        self._projection = weights.product([read.qkv, read.gate, read.decay, read.rate])
        self._vectors = {
            name: weights.numbers(getattr(read, name))
            for name in ("convolution", "decay_rates", "decay_biases", "norm")
        }
        self._o = weights.linear(f"{layer.name}.linear_attn.out_proj")

    def query(
        self,
        residual: torch.Tensor,
        pending: PendingResidual,
        positions: torch.Tensor,
        rotary: Rotary,
        step: StepContext,
    ) -> torch.Tensor:
        """Add `pending` to the residual [tokens, hidden], and read and write the states of the step's rows.

        Returns the attention output of each token, [tokens, values].
        """
        return linear_attention(
            self._projection(pending.add_to(residual, self._norm, self._epsilon)),
            self._shape,
            **self._vectors,
            epsilon=self._epsilon,
            recent=step.kv.recent[self._index],
            states=step.kv.states[self._index],
            rows=StateRows(step.query_starts, step.context_lengths, step.state_sources, step.state_targets),
        )

    def attend(self, query: torch.Tensor, step: StepContext) -> torch.Tensor:
        """The attention output of each token is complete: every token changes the state, also those not scored."""
        return query

    def project(self, attended: torch.Tensor, added_to: torch.Tensor | None = None) -> torch.Tensor:
        """The output [tokens, hidden], which belongs to the residual. added_to: the residual, to add it IN PLACE."""
        return self._o(attended, added_to=added_to)


class DenseMlp:
    """A gated MLP, with one product for gate and up."""

    def __init__(self, module: str, gate: GateFacts, weights: DenseWeights) -> None:
        self._gate = gate
        self._gate_up = weights.linear(f"{module}.gate_proj", f"{module}.up_proj")
        self._down = weights.linear(f"{module}.down_proj")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        gate_up, activation = self._gate_up, self._gate.activation
        if activation not in ACTIVATIONS:
            gate, up = gate_up(x).chunk(2, dim=-1)
            return self._down(reference.activate(activation, gate, up, self._gate.alpha, self._gate.limit))
        if isinstance(gate_up, DecodedLinear) and gate_up.bias is None:
            return self._down(few_rows_gated(activation, x, gate_up.weight))
        return self._down(gated(activation, gate_up(x)))


class DecoderLayer:
    """Attention and MLP of one layer.

    index: of this layer among those with the same kind of attention. routed: the index of this layer among those with
    routed experts; None: the MLP is dense. choice: shared by all layers.
    """

    def __init__(
        self,
        index: int,
        layer: LayerFacts,
        facts: DecoderFacts,
        weights: DenseWeights,
        routed: int | None,
        choice: KeyChoice,
    ) -> None:
        self.attention: SelfAttention | LatentSelfAttention | LinearSelfAttention
        if layer.linear is not None:
            self.attention = LinearSelfAttention(index, layer, facts, layer.linear, weights)
        elif facts.latent:
            self.attention = LatentSelfAttention(index, layer, facts, facts.latent, weights, choice)
        else:
            self.attention = SelfAttention(index, layer, facts, weights)
        self._epsilon = facts.epsilon
        names = (layer.attention_out_norm, layer.mlp_out_norm, layer.shared_out_norm, layer.experts_out_norm)
        self._attended_norm, self._out_norm, self._shared_out_norm, self._experts_out_norm = (
            weights.norm(f"{layer.name}.{name}", centred=facts.centred) if name else None for name in names
        )
        self._norm = weights.norm(f"{layer.name}.{layer.experts_norm or layer.mlp_norm}", centred=facts.centred)
        self._out_scale = weights.number(f"{layer.name}.{layer.out_scale}") if layer.out_scale else 1.0
        self._routed = routed
        mlp = f"{layer.name}.{layer.mlp}"
        self._mlp: DenseMlp | None = None
        self._shared: tuple[DenseMlp, DenseLinear | None] | None = None
        if routed is None:
            self._mlp = DenseMlp(mlp, layer.gate, weights)
            return
        assert layer.router is not None
        router = f"{layer.name}.{layer.router.name}"
        self._router = weights.matrix(f"{router}.weight")
        self._router_bias = weights.optional_vector(f"{router}.bias")
        self._router_norm = weights.router_norm(layer) if layer.router.norm else None
        further = *names, layer.experts_norm, layer.out_scale, layer.shared, layer.router.norm
        self._only_adds = not any(further)  # what attention and experts compute to the residual
        others = layer.attention_out_norm, layer.mlp_out_norm, layer.experts_out_norm, layer.experts_norm
        self._norms_once = not any((*others, layer.out_scale, layer.router.norm))  # between attention and experts
        self._shared_norm: torch.Tensor | None = None
        if layer.experts_norm:
            self._shared_norm = weights.norm(f"{layer.name}.{layer.mlp_norm}", centred=facts.centred)
        self._next: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None  # see predict_next_experts
        if layer.shared:
            shared = f"{layer.name}.{layer.shared}"
            gate = weights.linear(f"{shared}_gate") if layer.shared_gate else None
            self._shared = DenseMlp(shared, layer.gate, weights), gate

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
        if self._adds_at_once(residual, experts):
            assert self._routed is not None
            self.attention.project(attended, residual)
            norm = RmsNorm(self._norm, self._epsilon)
            experts.add_to(self._routed, residual, norm, self._router, self._router_bias, live)
            return PendingResidual()
        if self._routes_at_once(residual, experts):
            assert self._routed is not None
            self.attention.project(attended, residual)
            norm = RmsNorm(self._norm, self._epsilon)
            shared_expert = (lambda x: self._shared_expert(x, residual)) if self._shared else None
            return experts.run_from(
                self._routed, residual, norm, self._router, self._router_bias, live, shared=shared_expert
            )
        projected = PendingResidual(self.attention.project(attended), norm=self._attended_norm)
        if self._mlp is not None:
            x = projected.add_to(residual, self._norm, self._epsilon)
            return PendingResidual(added=self._mlp(x), norm=self._out_norm, scale=self._out_scale)
        assert self._routed is not None
        buffers = experts.cpu_buffers(self._routed, len(residual))
        ordered = experts.ordered_rows(self._routed, residual)
        copy = experts.input_copy(buffers)
        x = projected.add_to(residual, self._norm, self._epsilon, copy=copy, ordered=ordered)
        shared: SharedExpert | None = None
        if self._shared:
            shared = lambda x: self._shared_expert(x, residual)  # noqa: E731
            if self._shared_norm is None:  # else it writes to the residual, too
                shared = experts.begin_shared(shared, x, buffers)
        router_x = x if self._router_norm is None else self._normed(residual, self._router_norm)
        pending = experts.run(
            self._routed,
            x,
            few_rows_linear(router_x, self._router, self._router_bias, dtype=torch.float32),
            live,
            buffers=buffers,
            ordered=ordered,
            shared=shared,
            next_logits=self._next_logits if self._next else None,
        )
        return pending._replace(norm=self._out_norm, experts_norm=self._experts_out_norm, scale=self._out_scale)

    def _adds_at_once(self, residual: torch.Tensor, experts: StepExperts) -> bool:
        """Whether attention and experts add to the residual [tokens, hidden] themselves, and nothing stays pending."""
        if self._routed is None or not self._only_adds:
            return False
        return experts.adds_to(self._routed, residual, self._norm, self._router)

    def _routes_at_once(self, residual: torch.Tensor, experts: StepExperts) -> bool:
        """Whether one launch comes from the residual [tokens, hidden], with attention added, to the experts."""
        if self._routed is None or not self._norms_once:
            return False
        has_shared = self._shared is not None
        return experts.runs_from(self._routed, residual, self._norm, self._router, has_shared=has_shared)

    def predict_next_experts(self, next_layer: "DecoderLayer") -> None:
        """Guess the experts of `next_layer` in each step. Both layers have routed experts."""
        next_norm = next_layer._norm if next_layer._router_norm is None else next_layer._router_norm
        (norm, *shift), (next_norm, *next_shift) = (
            weights.float().view(-1, self._router.shape[1]) for weights in (self._norm, next_norm)
        )
        scale = torch.where(norm == 0, 0, next_norm / norm)
        bias = next_layer._router_bias
        if shift:  # of a LayerNorm: what remains of both biases is the same for every token
            offset = next_layer._router.float() @ (next_shift[0] - shift[0] * scale)
            bias = offset.to(self._router.dtype) if bias is None else bias + offset.to(bias.dtype)
        self._next = scale.to(self._router.dtype), next_layer._router, bias

    def _next_logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden], the input of this layer's experts -> the next router's logits [tokens, experts] float32,
        as they would be if this layer's experts added nothing to the residual."""
        assert self._next is not None
        scale, router, bias = self._next
        return few_rows_linear(x * scale, router, bias, dtype=torch.float32)

    def _shared_expert(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [tokens, hidden], the input of the routed experts -> see SharedExpert."""
        assert self._shared is not None
        mlp, gate = self._shared
        if self._shared_norm is not None:
            x = self._normed(residual, self._shared_norm)
        out = mlp(x)
        if self._shared_out_norm is not None:
            out = self._normed(out, self._shared_out_norm)
        return out, None if gate is None else gate(x)

    def _normed(self, x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        return add_rms_norm(x, norm, self._epsilon)
