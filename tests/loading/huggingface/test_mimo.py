"""Folders of MiMo-V2-Flash as they are published."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_families import COMMON, answers, feed, random_model
from mimo_sizes import MIMO_SIZES
from safetensors.torch import load_file, save_file

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.huggingface.checkpoint import open_folder
from ktqueue.loading.load import load_model

PUBLISHED: dict[str, Any] = {
    "hybrid_layer_pattern": [1, 0, 1],
    "moe_layer_freq": [0, 1, 1],
    "layernorm_epsilon": 1e-5,
    "rope_theta": 10_000,
    "swa_rope_theta": 1_000,
    "partial_rotary_factor": 0.334,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 24,
    "swa_v_head_dim": 16,
    "sliding_window_size": 8,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_shared_experts": None,
    "n_group": None,
    "topk_group": None,
    "routed_scaling_factor": None,
    "attention_chunk_size": 128,
}


@pytest.fixture
def model() -> Any:
    return random_model("mimo_v2_flash", {**COMMON, **MIMO_SIZES})


@pytest.fixture
def folder(model: Any, tmp_path: Path) -> Path:
    """Keys and names of tensors are the published ones."""
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("layer_types", "mlp_layer_types", "rms_norm_eps", "rope_parameters"):
        del config[name]
    (tmp_path / "config.json").write_text(json.dumps({**config, **PUBLISHED}))
    tensors = load_file(tmp_path / "model.safetensors")
    assert "model.layers.0.self_attn.attention_sink_bias" in tensors
    tensors["model.mtp.layers.0.self_attn.q_proj.weight"] = torch.zeros(96, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_a_published_folder_computes_what_transformers_does(model: Any, folder: Path) -> None:
    loaded = load_model(str(folder))
    assert type(loaded.module).__name__ == "CpuDecoder"
    found = feed(loaded.module)
    for name, logits in answers(model).items():
        assert logits.std() > 0.1
        assert (found[name] - logits).abs().max() < 1e-5 * logits.abs().max()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"swa_num_key_value_heads": 1},
            "swa_num_key_value_heads must be twice num_key_value_heads, 2, got 1",
        ),
        ({"swa_v_head_dim": 24}, "swa_v_head_dim must be v_head_dim, 16, got 24"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias must be False, got True"),
        ({"attention_projection_layout": "fused_qkv"}, "attention_projection_layout must be 'split', got 'fused_qkv'"),
        ({"hybrid_layer_pattern": [0, 2, 1]}, "hybrid_layer_pattern must be 0 or 1 for each layer, got [0, 2, 1]"),
    ],
)
def test_what_transformers_layers_lack_is_refused(changes: dict[str, Any], message: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError) as caught:
        open_folder(folder)
    assert str(caught.value) == f"{folder}: {message}"
