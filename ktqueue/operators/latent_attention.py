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
from ktqueue.operators.latent_shape import (
    Angles,
    LatentShape,
    absorb_query,
    cosines_and_sines,
    expand_values,
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
        passes_choice: bool = False,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.shape = shape
        self._sizes = linears
        self._dtype = dtype
        self._options = options
        self._passes_choice = passes_choice
        self._linears: dict[str, Linear] = {}
        self._bytes = 0

    @classmethod
    def from_module(cls, module: nn.Module, **options: Any) -> Self:
        """Take the sizes from an attention of transformers that model_classes.py lists. Options for packed matrices:
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
        # GLM-5's attention also returns the keys that it chose, for the next layer.
        passes_choice = hasattr(attention, "skip_topk")
        dtype = attention.o_proj.weight.dtype
        return cls(attention.layer_idx, shape, linears, dtype, chosen, passes_choice=passes_choice)

    def load(self, weights: ModuleWeights) -> None:
        """Load all matrices and norms of the module. Raises ValueError if they do not fit."""
        dense = DenseWeights(weights, self._dtype, self.device)
        self._key_up, self._value_up = split_up_matrix(dense.matrix("kv_b_proj.weight"), self.shape)
        packed_bytes = 0
        for name, (rows, columns) in self._sizes.items():
            if self.device == "cpu" and self._dtype == torch.float32:
                packed = CpuLinear(rows, columns, **self._options)
                packed.load(weights, name)
                packed_bytes += sum(packed.device_bytes().values())
                self._linears[name] = packed
            else:
                self._linears[name] = dense.linear(name)
        self._latent_norm = dense.vector("kv_a_layernorm.weight")
        self._query_norm = dense.vector("q_a_layernorm.weight") if self.shape.low_rank else None
        self._bytes = packed_bytes + dense.bytes

    def device_bytes(self) -> dict[str, int]:
        """Bytes of packed and decoded weights."""
        return {self.device: self._bytes}

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Angles, *, step: StepContext, **_: Any
    ) -> tuple[torch.Tensor | None, ...]:
        """hidden_states [1, tokens, hidden] -> (the same shape, None). Writes the step's latents into the cache.

        Raises RuntimeError before `load`.
        """
        if not self._linears:
            raise RuntimeError("LatentAttention has no weights yet")
        shape, x = self.shape, hidden_states[0]
        cosine, sine = cosines_and_sines(position_embeddings)
        query = absorb_query(self._query(x), self._key_up, cosine, sine, shape)
        key = make_key(self._linears["kv_a_proj_with_mqa"](x), self._latent_norm, cosine, sine, shape)
        attended = attend(self.layer, query.transpose(0, 1), key[None], None, step, ScoreOptions(shape.scaling))
        output = self._linears["o_proj"](expand_values(attended, self._value_up))[None]
        return (output, None, None) if self._passes_choice else (output, None)

    def _query(self, x: torch.Tensor) -> torch.Tensor:
        if self._query_norm is None:
            return self._linears["q_proj"](x)
        first = self._linears["q_a_proj"](x)
        return self._linears["q_b_proj"](rms_norm(first, self._query_norm, self.shape.epsilon))
