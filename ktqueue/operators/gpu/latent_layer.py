"""Latent attention of one layer of the GPU's decoder: see latent_attention.py, layer.py. Knows no file."""

import torch

from ktqueue.operators.decoder_facts import DecoderFacts, LayerFacts
from ktqueue.operators.gpu.dense import DenseWeights
from ktqueue.operators.gpu.experts.step import PendingResidual
from ktqueue.operators.gpu.kernels.rope import Rotary
from ktqueue.operators.latent_shape import LatentShape, absorb, absorbed, make_key, rms_norm, values_of
from ktqueue.operators.step import StepContext


class LatentLayer:
    """Norm, the first products of queries and latents in one, absorbed attention over latents, o."""

    def __init__(
        self, index: int, layer: LayerFacts, facts: DecoderFacts, shape: LatentShape, weights: DenseWeights
    ) -> None:
        self._index = index
        self._shape = shape
        self._epsilon = facts.epsilon
        self._norm = weights.vector(f"{layer.name}.input_layernorm.weight")
        own = f"{layer.name}.self_attn"
        first = "q_a_proj" if shape.low_rank else "q_proj"
        self._down = weights.linear(f"{own}.{first}", f"{own}.kv_a_proj_with_mqa")
        self._query_up = weights.linear(f"{own}.q_b_proj") if shape.low_rank else None
        self._query_norm = weights.vector(f"{own}.q_a_layernorm.weight") if shape.low_rank else None
        self._latent_norm = weights.vector(f"{own}.kv_a_layernorm.weight")
        self._key_up, self._value_up = absorbed(weights.matrix(f"{own}.kv_b_proj.weight"), shape)
        self._o = weights.linear(f"{own}.o_proj")

    def query(
        self,
        residual: torch.Tensor,
        pending: PendingResidual,
        positions: torch.Tensor,
        rotary: Rotary,
        step: StepContext,
    ) -> torch.Tensor:
        """Add `pending` to the residual [tokens, hidden] and write the step's latents to the cache.

        Returns the query [tokens, heads, latent + rotary].
        """
        shape = self._shape
        cosine, sine = rotary.cosine[positions], rotary.sine[positions]
        down = self._down(pending.add_to(residual, self._norm, self._epsilon))
        query, key = torch.split(down, [down.shape[-1] - shape.key, shape.key], -1)
        step.kv.write(self._index, step.slot_mapping, make_key(key, self._latent_norm, cosine, sine, shape)[:, None])
        if self._query_up is not None and self._query_norm is not None:
            query = self._query_up(rms_norm(query, self._query_norm, shape.epsilon))
        return absorb(query, self._key_up, cosine, sine, shape)

    def attend(self, query: torch.Tensor, step: StepContext) -> torch.Tensor:
        """[tokens, heads, latent]: what each token sees, before `project`."""
        if step.attention is None:
            raise ValueError("GpuDecoder attends by step.attention, which is not given")
        return step.attention.attend(self._index, query, step.kv, scaling=self._shape.scaling)

    def project(self, attended: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden], to be added to the residual."""
        return self._o(values_of(attended, self._value_up))
