"""LatentAttention: multi-head latent attention (DeepSeek-V2 and later) over a cache of latents. Knows no file.

A token's keys and values all follow from one short vector, its latent. So the cache holds only this vector and a rotary
key that all heads share: kv_lora_rank + qk_rope_head_dim numbers per token and layer. The matrices that expand a latent
to keys and values are applied to the query and to the result instead ("absorbed"; DeepSeek-V2, arXiv 2405.04434,
section 2.1). Attention then has one key head that all query heads share, and its values are the first kv_lora_rank
columns of its keys.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from ktqueue.operators.attention import attend
from ktqueue.operators.base import KernelOptions, Operator, kernel_options
from ktqueue.operators.gpu.dense import DenseWeights
from ktqueue.operators.indexer import Indexer, attend_to_choice
from ktqueue.operators.latent_shape import (
    Angles,
    LatentShape,
    absorb_query,
    cosines_and_sines,
    expand_values,
    grown,
    has_indexer,
    latent_shape,
    make_key,
    rms_norm,
    split_up_matrix,
)
from ktqueue.operators.linear import CpuLinear
from ktqueue.operators.packed import ModuleWeights
from ktqueue.operators.step import ScoreOptions, StepContext

Linear = Callable[[torch.Tensor], torch.Tensor]
"""A matrix: [tokens, columns] -> [tokens, rows]."""


class LatentAttention(Operator):
    """Called like transformers' attention module. In float32 on the CPU its matrices are packed for the compiled
    kernels; elsewhere they are decoded to the model's dtype. The absorbed matrices are always decoded."""

    capturable = True

    def __init__(
        self,
        layer: int,
        shape: LatentShape,
        linears: dict[str, tuple[int, int]],
        dtype: torch.dtype,
        options: KernelOptions,
        *,
        chooses: bool = False,
        passes_choice: bool = False,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.shape = shape
        self._sizes = linears
        self._dtype = dtype
        self._options = options
        self._chooses = chooses
        self._passes_choice = passes_choice
        self._indexer: Indexer | None = None
        self._linears: dict[str, Linear] = {}
        self._bytes = 0

    @classmethod
    def from_module(cls, module: nn.Module, **options: Any) -> Self:
        """Take the sizes from a latent attention of transformers: see families/table.py. Options for packed matrices:
        `activations`, `isa`. Raises ValueError for any other module."""
        chosen = kernel_options("LatentAttention", options)
        try:
            shape = latent_shape(module)
        except ValueError as error:
            raise ValueError(f"{type(module).__name__} cannot be replaced by LatentAttention: {error}") from error
        linears = {
            name: (child.out_features, child.in_features)
            for name, child in module.named_children()
            if isinstance(child, nn.Linear) and name != "kv_b_proj"
        }
        attention: Any = module
        return cls(
            attention.layer_idx,
            shape,
            linears,
            attention.o_proj.weight.dtype,
            chosen,
            chooses=has_indexer(attention),
            passes_choice=hasattr(attention, "skip_topk"),  # GLM-5's attention also returns the keys that it chose
        )

    def load(self, weights: ModuleWeights) -> None:
        """Load all matrices and norms of the module. Raises ValueError if they do not fit."""
        dense = DenseWeights(weights, self._dtype, self.device)
        self._key_up, self._value_up = split_up_matrix(dense.matrix("kv_b_proj.weight"), self.shape)
        packed_bytes = 0

        packs = self.device == "cpu" and self._dtype == torch.float32

        def packed(name: str, options: KernelOptions) -> Linear:
            nonlocal packed_bytes
            matrix = weights.matrix(f"{name}.weight")
            rows, columns = self._sizes.get(name, (matrix.rows, matrix.columns))
            made = CpuLinear(rows, columns, **options)
            made.load(weights, name)
            packed_bytes += sum(made.device_bytes().values())
            return made

        def linear(name: str) -> Linear:
            return packed(name, self._options) if packs else dense.linear(name)

        def factors(name: str) -> Linear:
            return packed(name, {**self._options, "activations": "float32"})

        self._linears = {name: linear(name) for name in self._sizes}
        if self.shape.indexer and self._chooses:
            self._indexer = Indexer.load(self.shape.indexer, dense, "indexer", linear, factors if packs else None)
        self._latent_norm = dense.vector("kv_a_layernorm.weight")
        self._query_norm = dense.vector("q_a_layernorm.weight") if self.shape.low_rank else None
        self._bytes = packed_bytes + dense.bytes

    def device_bytes(self) -> dict[str, int]:
        """Bytes of packed and decoded weights."""
        return {self.device: self._bytes}

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Angles,
        *,
        step: StepContext,
        position_ids: torch.Tensor | None = None,
        prev_topk_indices: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        """hidden_states [1, tokens, hidden] -> (the same shape, None). Writes the step's latents into the cache.

        prev_topk_indices: the keys that the layer before chose, for a layer without an indexer of its own. Such
        models get the choice of this layer as a third result. Raises RuntimeError before `load`.
        """
        if not self._linears:
            raise RuntimeError("LatentAttention has no weights yet")
        shape, x = self.shape, hidden_states[0]
        cosine, sine = cosines_and_sines(position_embeddings)
        low_rank = self._low_rank(x)
        query = self._query(low_rank)
        if position_ids is not None:
            query = grown(query, position_ids[0], shape)
        query = absorb_query(query, self._key_up, cosine, sine, shape)
        key = make_key(self._linears["kv_a_proj_with_mqa"](x), self._latent_norm, cosine, sine, shape)
        choice = prev_topk_indices
        if self._indexer is not None:
            choice = self._indexer.choose(self.layer, x, low_rank, cosine, sine, step)
        attended = self._attend(query, key, choice, step)
        output = self._linears["o_proj"](expand_values(attended, self._value_up))[None]
        return (output, None, choice) if self._passes_choice else (output, None)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, choice: torch.Tensor | None, step: StepContext
    ) -> torch.Tensor:
        """query [tokens, heads, key], key [tokens, key], choice: see Indexer.choose -> [tokens, heads, latent]."""
        scaling = self.shape.scaling
        if choice is not None and step.attention is not None:
            step.kv.write(self.layer, step.slot_mapping, key[:, None])
            attended = query.new_empty(*query.shape[:2], self.shape.latent)
        else:  # tokens that see more keys than are chosen are computed again, so here a window saves time
            window = 0 if choice is None else choice.shape[1]
            options = ScoreOptions(scaling, window)
            attended = attend(self.layer, query.transpose(0, 1), key[None], None, step, options)
        if choice is not None:
            attend_to_choice(self.layer, query, choice, attended, step, scaling)
        return attended

    def _low_rank(self, x: torch.Tensor) -> torch.Tensor:
        """The normalised low-rank query, [tokens, rank]; x itself if queries are computed by one matrix."""
        if self._query_norm is None:
            return x
        return rms_norm(self._linears["q_a_proj"](x), self._query_norm, self.shape.epsilon)

    def _query(self, low_rank: torch.Tensor) -> torch.Tensor:
        return self._linears["q_proj" if self._query_norm is None else "q_b_proj"](low_rank)
