"""A tiny random Qwen3-MoE, and a module's own weights for operators."""

from typing import Any

import pytest
import torch
from model_types import MakeConfig, MakeModel
from own_weights import OwnWeights
from transformers import AttentionInterface, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ktqueue.operators import attention


@pytest.fixture
def tiny_config() -> MakeConfig:
    """tiny_config(**changes): two layers, 4 heads on 2 kv heads, 6 experts top-2."""

    def make(**changes: Any) -> Qwen3MoeConfig:
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
def tiny_model(tiny_config: MakeConfig) -> MakeModel:
    """tiny_model(paged=False, **changes): the same random weights each time; `paged` uses our attention."""

    def make(paged: bool = False, **changes: Any) -> Any:
        AttentionInterface.register(attention.NAME, attention.paged_attention)
        torch.manual_seed(0)
        config = tiny_config(**changes)
        model: Any = Qwen3MoeForCausalLM
        model = model(config).eval()
        model.set_attn_implementation(attention.NAME if paged else "eager")
        for parameter in model.parameters():
            parameter.data.normal_(std=0.15)
        return model

    return make


@pytest.fixture
def given_weights() -> type[OwnWeights]:
    """given_weights(module, quant) -> the module's own weights, for Operator.load."""
    return OwnWeights
