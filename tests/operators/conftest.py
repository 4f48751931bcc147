"""A tiny random Qwen3-MoE, and packed experts made of a module's own weights."""

import gguf
import numpy as np
import pytest
import torch
from transformers import AttentionInterface, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ktqueue.operators import attention
from ktqueue.operators.packed import ExpertWeights, PackedExperts


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


@pytest.fixture
def pack_module():
    """pack_module(experts module, quant="F32") -> ExpertWeights of its own weights."""

    def pack(module, quant: str = "F32") -> ExpertWeights:
        gate, up = module.gate_up_proj.detach().chunk(2, dim=1)
        kind = gguf.GGMLQuantizationType[quant]

        def matrices(weights: torch.Tensor) -> PackedExperts:
            data = [
                gguf.quantize(np.ascontiguousarray(one), kind).view(np.uint8).reshape(-1) for one in weights.numpy()
            ]
            return PackedExperts(quant, *weights.shape[1:], data)

        return ExpertWeights(matrices(gate), matrices(up), matrices(module.down_proj.detach()))

    return pack
