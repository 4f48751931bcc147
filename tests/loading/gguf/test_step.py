"""GGUF files of Step-3.5, as llama.cpp's converter writes them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.step3p7.modeling_step3p7 import Step3p7RotaryEmbedding

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.checkpoint import Checkpoint, CheckpointTensor
from ktqueue.loading.gguf.checkpoint import build_checkpoint
from ktqueue.loading.gguf.rope import FACTORS_TENSOR
from ktqueue.loading.skeleton import build_config

Parts = tuple[dict[str, Any], dict[str, CheckpointTensor]]
LLAMA3 = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.fixture
def parts(parts_of: Callable[..., Parts]) -> Parts:
    return parts_of("step3p5")


def built(parts: Parts, **changes: Any) -> Checkpoint:
    metadata, tensors = parts
    return build_checkpoint("file", {**metadata, **changes}, dict(tensors))


def vector(values: torch.Tensor) -> CheckpointTensor:
    return CheckpointTensor(FACTORS_TENSOR, "F32", tuple(values.shape), values.numpy().view(np.uint8))


def test_heads_and_limits_are_listed_by_layer(parts: Parts) -> None:
    further: dict[str, Any] = {
        "step35.block_count": 3,
        "step35.nextn_predict_layers": 1,
    }  # lists go on behind the model's layers
    further |= {
        f"step35.{key}": [*parts[0][f"step35.{key}"], 0.0] for key in ("swiglu_clamp_exp", "swiglu_clamp_shexp")
    }
    metadata, tensors = parts
    tensors = {**tensors, "blk.2.nextn.eh_proj.weight": tensors["blk.1.attn_q.weight"]}
    config = built((metadata, tensors), **further).config()
    assert (config["num_attention_heads"], config["num_sliding_attention_heads"]) == (4, 6)
    assert config["layer_types"] == ["full_attention", "sliding_attention"]
    assert config["mlp_layer_types"] == ["dense", "sparse"]
    assert config["swiglu_limits_shared"] == pytest.approx([0.4, 0.5])
    full, local = (config["rope_parameters"][kind] for kind in config["layer_types"])
    assert (full["partial_rotary_factor"], local["partial_rotary_factor"]) == (0.5, 1.0)
    assert (full["rope_theta"], local["rope_theta"]) == (1e4, 1e3)


def test_rotary_factors_are_those_of_layers_without_a_window(parts: Parts) -> None:
    """The converter fills their tensor with ones, up to half a head."""
    plain = built(parts).config()
    full = plain["rope_parameters"]["full_attention"]
    ropes = {**plain["rope_parameters"], "full_attention": {**full, **LLAMA3, "rope_type": "llama3"}}
    expected = Step3p7RotaryEmbedding(build_config({**plain, "vocab_size": 384, "rope_parameters": ropes}, "file"))
    frequencies = Step3p7RotaryEmbedding(build_config(plain, "file")).full_attention_inv_freq
    factors = torch.ones(8)
    factors[:4] = frequencies / expected.full_attention_inv_freq
    assert factors.max() == 2
    metadata, tensors = parts
    found = Step3p7RotaryEmbedding(
        build_config(built((metadata, {**tensors, FACTORS_TENSOR: vector(factors)})).config(), "file")
    )
    assert torch.allclose(found.full_attention_inv_freq, expected.full_attention_inv_freq, rtol=1e-6)
    assert torch.equal(found.sliding_attention_inv_freq, expected.sliding_attention_inv_freq)
    assert found.full_attention_attention_scaling == 1
    with pytest.raises(CheckpointError, match=f"tensor '{FACTORS_TENSOR}' must hold 4 positive numbers"):
        built((metadata, {**tensors, FACTORS_TENSOR: vector(-factors)}))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.head_count", [4], "has numbers for 1 of 2 layers"),
        ("attention.head_count_kv", [2, 1], r"must be the same in all layers, got \[1, 2\]"),
        ("attention.sliding_window_pattern", [True], "must be true or false for each of 2 layers"),
        ("swiglu_clamp_exp", [0.0, -1.0], "must have a number from 0 for each of 2 layers"),
        ("expert_weights_norm", False, "must be True, got False"),
    ],
)
def test_other_metadata_is_refused(key: str, value: Any, message: str, parts: Parts) -> None:
    with pytest.raises(CheckpointError, match=rf"metadata key step35\.{key} {message}"):
        built(parts, **{f"step35.{key}": value})
