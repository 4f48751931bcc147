"""Folders of Step-3.5 as they are published: names of tensors, one tensor for all experts, lists by layer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_families import COMMON, answers, feed, random_model
from safetensors.torch import load_file, save_file
from step_sizes import STEP_SIZES

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.huggingface.checkpoint import open_folder
from ktqueue.loading.load import load_model

FURTHER = {  # of a layer that predicts further tokens
    "num_nextn_predict_layers": 1,
    "layer_types": [*STEP_SIZES["layer_types"], "sliding_attention"],
    "swiglu_limits": [*STEP_SIZES["swiglu_limits"], 0.0],
    "swiglu_limits_shared": [*STEP_SIZES["swiglu_limits_shared"], 0.0],
    "rope_theta": [1e4, 1e3, 1e4, 1e3],
    "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0],
}


@pytest.fixture
def model() -> Any:
    return random_model("step3p5", {**COMMON, **STEP_SIZES})


@pytest.fixture
def folder(model: Any, tmp_path: Path) -> Path:
    """The text model of a Step-3.7, or with its config alone a Step-3.5."""
    model.save_pretrained(tmp_path)
    published: dict[str, torch.Tensor] = {"vision_model.conv1.weight": torch.zeros(2, 2)}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        layer, _, part = name.partition(".mlp.")
        if part == "experts.gate_up_proj":
            published[f"{layer}.moe.gate_proj.weight"], published[f"{layer}.moe.up_proj.weight"] = tensor.chunk(2, 1)
        elif part == "experts.down_proj":
            published[f"{layer}.moe.down_proj.weight"] = tensor
        else:
            bias = name.replace(".mlp.gate.e_score_correction_bias", ".moe.router_bias")
            named = bias.replace(".mlp.gate.weight", ".moe.gate.weight").replace(".mlp.shared_experts", ".share_expert")
            published[named] = tensor
    published["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
    save_file({name: tensor.contiguous() for name, tensor in published.items()}, tmp_path / "model.safetensors")
    config = {**COMMON, **STEP_SIZES, **FURTHER, "model_type": "step3p5"}
    del config["num_key_value_heads"], config["n_routed_experts"], config["num_experts_per_tok"]
    config |= {"num_attention_groups": 2, "moe_num_experts": 6, "moe_top_k": 2}
    del config["num_sliding_attention_heads"], config["mlp_layer_types"]
    config |= {"attention_other_setting": {"num_attention_heads": 6}, "moe_layers_enum": "1,2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("with_encoder", [False, True])
def test_a_published_folder_computes_what_transformers_does(with_encoder: bool, model: Any, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    if with_encoder:
        config = {"model_type": "step3p7", "text_config": config, "vision_config": {"model_type": "step3p5_vision"}}
        (folder / "config.json").write_text(json.dumps(config))
    else:
        tensors = load_file(folder / "model.safetensors")
        del tensors["vision_model.conv1.weight"]
        save_file(tensors, folder / "model.safetensors")
    loaded = load_model(str(folder))
    assert type(loaded.module).__name__ == "CpuDecoder"
    found = feed(loaded.module)
    for name, logits in answers(model).items():
        assert logits.std() > 0.1
        assert (found[name] - logits).abs().max() < 1e-5 * logits.abs().max()


def test_experts_in_fp8_have_scales_for_each(folder: Path) -> None:
    """Of blocks of 128 by 128: [experts, 1, 1] here."""
    tensors = load_file(folder / "model.safetensors")
    expected = open_folder(folder).decode("model.layers.1.mlp.experts.gate_up_proj", torch.float32)
    for part in ("gate", "up", "down"):
        name = f"model.layers.1.moe.{part}_proj.weight"
        scales = tensors[name].abs().amax((1, 2), keepdim=True) / 448
        tensors |= {name: (tensors[name] / scales).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    found = open_folder(folder).decode("model.layers.1.mlp.experts.gate_up_proj", torch.float32)
    assert (found - expected).abs().amax((1, 2)).lt(expected.abs().amax((1, 2)) / 16).all()
    assert not torch.equal(found, expected)


def test_a_matrix_of_experts_of_other_dimensions_is_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.moe.up_proj.weight"
    save_file({**tensors, name: tensors[name][0]}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}' must be \[experts, rows, columns\], got \(32, 64\)"):
        open_folder(folder)
