"""Attention over latents in the GPU's decoder: its matrices, and which kernel follows which. Knows no file."""

import torch

from ktqueue.operators.decoder_facts import DecoderFacts
from ktqueue.operators.gpu.attention.latent import LatentPlan, expansion_of
from ktqueue.operators.gpu.attention.latent_inputs import latent_query_append
from ktqueue.operators.gpu.dense import DenseWeights
from ktqueue.operators.gpu.kernels.rope import Rotary
from ktqueue.operators.gpu.pending_residual import PendingResidual
from ktqueue.operators.indexer import Indexer, KeyChoice, attend_to_choice
from ktqueue.operators.latent_shape import (
    LatentShape,
    expand_values,
    grown,
    rms_norm,
    split_up_matrix,
)
from ktqueue.operators.layer_facts import LayerFacts
from ktqueue.operators.step import AttentionPlan, ScoreOptions, StepContext


class LatentSelfAttention:
    """Norm, one product for queries and latents, absorbed attention over cached latents, o. See latent_shape.py."""

    def __init__(
        self,
        index: int,
        layer: LayerFacts,
        facts: DecoderFacts,
        shape: LatentShape,
        weights: DenseWeights,
        choice: KeyChoice,
    ) -> None:
        self._index = index
        self._shape = shape
        self._choice = choice
        self._scores = ScoreOptions(shape.scaling)
        self._epsilon = facts.epsilon
        self._norm = weights.vector(f"{layer.name}.input_layernorm.weight")
        module = f"{layer.name}.self_attn"
        first = "q_a_proj" if shape.low_rank else "q_proj"
        self._down = weights.linear(f"{module}.{first}", f"{module}.kv_a_proj_with_mqa")
        self._query_up = weights.linear(f"{module}.q_b_proj") if shape.low_rank else None
        self._query_norm = weights.vector(f"{module}.q_a_layernorm.weight") if shape.low_rank else None
        self._latent_norm = weights.vector(f"{module}.kv_a_layernorm.weight")
        up = weights.matrix(f"{module}.kv_b_proj.weight")
        self._key_up, self._value_up = split_up_matrix(up, shape)
        self._up = up.view(shape.heads, shape.plain + shape.value, shape.latent)
        self._o = weights.linear(f"{module}.o_proj")
        self._indexer: Indexer | None = None
        if shape.indexer and layer.chooses:
            self._indexer = Indexer.load(shape.indexer, weights, f"{module}.indexer", weights.linear)

    def query(
        self,
        residual: torch.Tensor,
        pending: PendingResidual,
        positions: torch.Tensor,
        rotary: Rotary,
        step: StepContext,
    ) -> torch.Tensor:
        """Add `pending` to the residual [tokens, hidden] and write the step's latents to the cache.

        Returns the query [tokens, heads, latent + rotary], or [tokens, heads, plain + rotary] if latents of some rows
        of the step are expanded.
        """
        shape = self._shape
        x = pending.add_to(residual, self._norm, self._epsilon)
        down = self._down(x)
        query, key = torch.split(down, [down.shape[-1] - shape.key, shape.key], -1)
        if self._query_up is not None and self._query_norm is not None:
            low_rank = rms_norm(query, self._query_norm, shape.epsilon)
            query = self._query_up(low_rank)
            if self._indexer is not None:
                cosine, sine = rotary.cosine[0, positions], rotary.sine[0, positions]
                self._choice.positions = self._indexer.choose(self._index, x, low_rank, cosine, sine, step)
        query = grown(query, positions, shape)
        expands = self._choice.positions is None and expansion_of(attention_plan(step)) is not None
        return latent_query_append(
            query,
            key,
            shape,
            norm=self._latent_norm,
            key_up=None if expands else self._key_up,
            cosine=rotary.cosine[0],
            sine=rotary.sine[0],
            positions=positions,
            slot_mapping=step.slot_mapping,
            cache=step.kv.keys[self._index],
            scale=step.kv.layout.scale(self._index).key,
        )

    def attend(self, query: torch.Tensor, step: StepContext) -> torch.Tensor:
        """The attention output of each token, [tokens, heads * value]."""
        plan = attention_plan(step)
        if self._choice.positions is not None:
            chosen = query.new_empty(*query.shape[:2], self._shape.latent)
            attend_to_choice(self._index, query, self._choice.positions, chosen, step, self._shape.scaling)
            return expand_values(chosen, self._value_up)
        expansion = expansion_of(plan)
        if expansion is None and isinstance(plan, LatentPlan):
            return plan.values(self._index, query, self._value_up, step.kv, self._scores)
        if expansion is None:
            return expand_values(plan.attend(self._index, query, step.kv, self._scores), self._value_up)
        return expansion.values(self._index, query, self._up, step.kv, self._scores)

    def project(self, attended: torch.Tensor, added_to: torch.Tensor | None = None) -> torch.Tensor:
        """The output [tokens, hidden], which belongs to the residual. added_to: the residual, to add it IN PLACE."""
        return self._o(attended, added_to=added_to)


def attention_plan(step: StepContext) -> AttentionPlan:
    """The plan of a step that must have one."""
    if step.attention is None:
        raise ValueError("a step of GpuDecoder needs `attention`")
    return step.attention
