"""LatentAttention: multi-head latent attention (DeepSeek-V2 and later) over a cache of latents. Knows no file.

A token's keys and values are all made from one short vector, its latent, so the cache holds that vector and a rotary
key that all heads share, and nothing else: kv_lora_rank + qk_rope_head_dim numbers a token and layer. The matrices that
would make keys and values of it are applied to the query and to the result instead ("absorbed"; DeepSeek-V2,
arXiv 2405.04434, section 2.1), which turns attention into one key head that all query heads share. Its values are the
first kv_lora_rank columns of its keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional

from ktqueue.operators.attention import attend
from ktqueue.operators.base import Operator, register
from ktqueue.operators.gpu.dense import DenseWeights
from ktqueue.operators.linear import CpuLinear
from ktqueue.operators.options import KernelOptions, kernel_options
from ktqueue.operators.packed import ModuleWeights
from ktqueue.operators.step import StepContext

Linear = Callable[[torch.Tensor], torch.Tensor]
"""[tokens, columns] -> [tokens, rows]."""
_NORMS = ("q_a_layernorm", "kv_a_layernorm")


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Of one layer's attention, in numbers. `plain`, `rotary`, `value`: of each head, of a query's or key's part
    without and with a position, and of a value. `latent`: of a token's latent. `interleaved`: rotary pairs lie side by
    side, not half the columns apart. `low_rank`: queries are made in two products with a norm between."""

    layer: int
    heads: int
    plain: int
    rotary: int
    value: int
    latent: int
    scaling: float
    interleaved: bool
    low_rank: bool


@register("LatentAttention")
class LatentAttention(Operator):
    """Called as transformers' attention module. In float32 on the CPU its matrices are packed for the compiled kernels,
    elsewhere they are decoded to the model's type; the absorbed ones always are."""

    def __init__(
        self,
        shape: LatentShape,
        linears: dict[str, tuple[int, int]],
        epsilons: dict[str, float],
        dtype: torch.dtype,
        options: KernelOptions,
    ) -> None:
        super().__init__()
        self.shape = shape
        self._sizes = linears
        self._epsilons = epsilons
        self._dtype = dtype
        self._options = options
        self._linears: dict[str, Linear] = {}
        self._norms: dict[str, torch.Tensor] = {}
        self._bytes = 0

    @classmethod
    def from_module(cls, module: nn.Module, **options: Any) -> Self:
        """Sizes from a DeepseekV2Attention or DeepseekV3Attention of transformers. Options, of packed matrices:
        `activations`, `isa`. Raises ValueError for any other module."""
        chosen = kernel_options("LatentAttention", options)
        one: Any = module
        if not hasattr(module, "kv_a_proj_with_mqa"):
            raise ValueError(f"{type(module).__name__} cannot be replaced by LatentAttention: it makes no latents")
        shape = LatentShape(
            layer=one.layer_idx,
            heads=one.num_heads,
            plain=one.qk_nope_head_dim,
            rotary=one.qk_rope_head_dim,
            value=one.v_head_dim,
            latent=one.kv_lora_rank,
            scaling=one.scaling,
            interleaved=getattr(one.config, "rope_interleave", True),
            low_rank=one.q_lora_rank is not None,
        )
        children = dict(module.named_children())
        linears = {
            name: (child.out_features, child.in_features)
            for name, child in children.items()
            if isinstance(child, nn.Linear)
        }
        epsilons = {name: float(one.get_submodule(name).variance_epsilon) for name in _NORMS if name in children}
        return cls(shape, linears, epsilons, one.o_proj.weight.dtype, chosen)

    def load(self, weights: ModuleWeights) -> None:
        """Take all matrices and norms of the module. Raises ValueError if they do not fit."""
        shape, sizes = self.shape, dict(self._sizes)
        dense = DenseWeights(weights, self._dtype, self.device)
        up = dense.matrix("kv_b_proj.weight")
        if up.shape != sizes.pop("kv_b_proj"):
            raise ValueError(f"kv_b_proj.weight must be {list(self._sizes['kv_b_proj'])}, got {list(up.shape)}")
        each = up.view(shape.heads, shape.plain + shape.value, shape.latent)
        keys, values = torch.split(each, [shape.plain, shape.value], 1)
        self._key_up = keys  # [heads, plain, latent]
        self._value_up = values.transpose(1, 2)  # [heads, latent, value]
        packed_bytes = 0
        for name, (rows, columns) in sizes.items():
            if self.device == "cpu" and self._dtype == torch.float32:
                packed = CpuLinear(rows, columns, **self._options)
                packed.load(weights, name)
                packed_bytes += sum(packed.device_bytes().values())
                self._linears[name] = packed
            else:
                self._linears[name] = dense.linear(name)
        self._norms = {name: dense.vector(f"{name}.weight") for name in self._epsilons}
        self._bytes = packed_bytes + dense.bytes

    def device_bytes(self) -> dict[str, int]:
        """Bytes of packed and decoded weights."""
        return {self.device: self._bytes}

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *,
        step: StepContext,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [1, tokens, hidden] -> (the same shape, None), writing the step's latents into the cache.

        `position_embeddings`: a complex tensor [1, tokens, rotary / 2], or cosines and sines of the angles in the first
        rotary / 2 columns of [1, tokens, rotary] each. Raises RuntimeError before `load`.
        """
        if not self._linears:
            raise RuntimeError("LatentAttention has no weights yet")
        shape, x = self.shape, hidden_states[0]
        cosine, sine = self._angles(position_embeddings)  # [tokens, rotary / 2]
        query = self._query(x).view(len(x), shape.heads, shape.plain + shape.rotary)
        plain, turning = torch.split(query, [shape.plain, shape.rotary], -1)
        down = self._linears["kv_a_proj_with_mqa"](x)
        latent, key = torch.split(down, [shape.latent, shape.rotary], -1)
        key = torch.cat([self._norm("kv_a_layernorm", latent), self._turn(key, cosine, sine)], -1)
        absorbed = torch.bmm(plain.transpose(0, 1), self._key_up).transpose(0, 1)  # [tokens, heads, latent]
        query = torch.cat([absorbed, self._turn(turning, cosine[:, None], sine[:, None])], -1)
        attended = attend(shape.layer, query.transpose(0, 1), key[None], None, step, scaling=shape.scaling)
        values = torch.bmm(attended.transpose(0, 1), self._value_up)  # [heads, tokens, value]
        return self._linears["o_proj"](values.transpose(0, 1).flatten(1))[None], None

    def _query(self, x: torch.Tensor) -> torch.Tensor:
        if not self.shape.low_rank:
            return self._linears["q_proj"](x)
        return self._linears["q_b_proj"](self._norm("q_a_layernorm", self._linears["q_a_proj"](x)))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The root mean square norm of that name, computed in float32 as transformers does."""
        return self._norms[name] * functional.rms_norm(x.float(), x.shape[-1:], None, self._epsilons[name]).to(x.dtype)

    def _angles(self, given: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(given, torch.Tensor):
            return given[0].real, given[0].imag
        half = self.shape.rotary // 2
        return given[0][0, :, :half], given[1][0, :, :half]

    def _turn(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """x [..., rotary] turned by its position. Pairs come out half the columns apart, in queries and keys alike, so
        that their products are the same whichever way they lay."""
        first, second = (x[..., 0::2], x[..., 1::2]) if self.shape.interleaved else x.chunk(2, -1)
        turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)
        return turned.to(x.dtype)
