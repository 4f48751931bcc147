"""A tiny random Qwen3-MoE, and a module's own weights as an operator is given them."""

import gguf
import numpy as np
import pytest
import torch
from transformers import AttentionInterface, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ktqueue.operators import attention
from ktqueue.operators.packed import ExpertWeights, PackedExperts, PackedMatrix


@pytest.fixture
def tiny_config():
    """tiny_config(**changes): two layers, 4 heads on 2 kv heads, 6 experts top-2."""

    def make(**changes) -> Qwen3MoeConfig:
        sizes = {
            "vocab_size": 96,
            "hidden_size": 64,
            "intermediate_size": 64,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 256,
            "output_router_logits": False,
        }
        return Qwen3MoeConfig(**{**sizes, **changes})

    return make


@pytest.fixture
def tiny_model(tiny_config):
    """tiny_model(paged=False, **changes): the same random weights each time; `paged` takes our attention."""

    def make(paged: bool = False, **changes) -> Qwen3MoeForCausalLM:
        AttentionInterface.register(attention.NAME, attention.paged_attention)
        torch.manual_seed(0)
        config = tiny_config(**changes)
        config._attn_implementation = attention.NAME if paged else "eager"
        model = Qwen3MoeForCausalLM(config).eval()
        for parameter in model.parameters():
            parameter.data.normal_(std=0.15)
        return model

    return make


class GivenWeights:
    """ModuleWeights of a module that has its weights: matrices packed as `quant`, routers and norms as F32."""

    def __init__(self, module: torch.nn.Module, quant: str) -> None:
        self._module = module
        self._state = module.state_dict()
        self._quant = quant
        self.left = set(self._state)

    def has(self, name: str) -> bool:
        return name in self._state

    def matrix(self, name: str) -> PackedMatrix:
        weight = self._take(name)
        quant = "F32" if name.endswith("gate.weight") else self._quant
        return PackedMatrix(quant, *weight.shape, quantise(weight, quant))

    def vector(self, name: str) -> np.ndarray:
        return self._take(name).numpy()

    def experts(self, name: str) -> ExpertWeights:
        prefix = f"{name}." if name else ""
        gate, up = self._take(f"{prefix}gate_up_proj").chunk(2, dim=1)
        return ExpertWeights(*(self._stack(one) for one in (gate, up, self._take(f"{prefix}down_proj"))))

    def _stack(self, weights: torch.Tensor) -> PackedExperts:
        return PackedExperts(self._quant, *weights.shape[1:], [quantise(one, self._quant) for one in weights])

    def _take(self, name: str) -> torch.Tensor:
        self.left.discard(name)
        return self._state[name].detach().float()


def quantise(weight: torch.Tensor, quant: str) -> np.ndarray:
    kind = gguf.GGMLQuantizationType[quant]
    return gguf.quantize(np.ascontiguousarray(weight.numpy()), kind).view(np.uint8).reshape(-1)


@pytest.fixture
def given_weights() -> type[GivenWeights]:
    """given_weights(module, quant) -> the module's own weights as an operator is given them."""
    return GivenWeights
