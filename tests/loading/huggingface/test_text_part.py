"""A folder with an encoder of images: its text model is served, and computes what the whole computes for text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from decoder_families import COMMON, LINEAR, MOE, SIGMOID, answers, feed
from latent_families import GROWING
from llama4_sizes import LLAMA4_SIZES
from safetensors.torch import load_file, save_file

from ktqueue.core.errors import CheckpointError
from ktqueue.families.table import family_of_type
from ktqueue.loading.huggingface.checkpoint import text_part
from ktqueue.loading.load import load_model

VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
LLAMA4_VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
QWEN3_VISION = {**VISION, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0]}
TIME_AND_PLACE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
PARTS: dict[str, dict[str, Any]] = {
    "Qwen3_5Moe": {"text_config": {**COMMON, **LINEAR}, "vision_config": VISION},
    "Qwen3_5": {"text_config": {**COMMON, **LINEAR}, "vision_config": VISION},
    "Llama4": {"text_config": {**COMMON, **LLAMA4_SIZES}, "vision_config": {**LLAMA4_VISION, "vision_output_dim": 64}},
    "Qwen3VL": {
        "text_config": {**COMMON, "head_dim": 16, "rope_parameters": TIME_AND_PLACE},
        "vision_config": QWEN3_VISION,
    },
    "Qwen3VLMoe": {
        "text_config": {**COMMON, **MOE, "head_dim": 16, "rope_parameters": TIME_AND_PLACE},
        "vision_config": QWEN3_VISION,
    },
    "Qwen2_5_VL": {"text_config": {**COMMON, "rope_parameters": TIME_AND_PLACE}, "vision_config": QWEN3_VISION},
    "Glm4vMoe": {
        "text_config": {**COMMON, **SIGMOID, "rope_parameters": {**TIME_AND_PLACE, "mrope_section": [1, 1, 2]}},
        "vision_config": VISION,
    },
    "InternVL": {
        "text_config": {**COMMON, **MOE, "model_type": "qwen3_moe", "head_dim": 16},
        "vision_config": LLAMA4_VISION,
    },
    "Mistral3": {  # published as Ministral 3 and Devstral 2
        "text_config": {**COMMON, "model_type": "ministral3", "head_dim": 16, "rope_parameters": {**GROWING}},
        "vision_config": {**LLAMA4_VISION, "model_type": "pixtral"},
    },
}


@pytest.fixture(params=["Qwen3_5Moe"])
def whole(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A tiny Qwen3.5-MoE, or another of PARTS, with its encoder of images, saved in `tmp_path`."""
    make_config: Any = getattr(transformers, f"{request.param}Config")
    torch.manual_seed(3)
    make: Any = getattr(transformers, f"{request.param}ForConditionalGeneration")
    model = make(make_config(**PARTS[request.param])).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "A_log", "dt_bias")):
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(tmp_path)
    return model


def assert_equal(folder: Path, model: Any) -> None:
    loaded = load_model(str(folder))
    text_type = family_of_type(model.config.text_config.model_type).model_type
    assert (loaded.config.model_type, type(loaded.module).__name__) == (text_type, "CpuDecoder")
    found = feed(loaded.module)
    for name, logits in answers(model).items():
        assert logits.std() > 0.1
        assert (found[name] - logits).abs().max() < 3e-4 * logits.abs().max()


@pytest.mark.parametrize("whole", [*PARTS], indirect=True)
def test_the_text_model_of_a_folder_is_served(whole: Any, tmp_path: Path) -> None:
    assert_equal(tmp_path, whole)


@pytest.mark.parametrize("whole", ["Qwen3VLMoe"], indirect=True)
def test_experts_are_read_as_they_are_published(whole: Any, tmp_path: Path) -> None:
    """Transposed. transformers 5 saves them as its modules have them."""
    file = tmp_path / "model.safetensors"
    save_file({name: x.mT.contiguous() if "experts" in name else x for name, x in load_file(file).items()}, file)
    assert_equal(tmp_path, whole)


@pytest.mark.parametrize("whole", ["Qwen2_5_VL"], indirect=True)
def test_a_config_may_have_its_text_model_beside_the_encoder(whole: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    text = {**config.pop("text_config"), "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}}
    del text["rope_parameters"], text["layer_types"]
    path.write_text(json.dumps({**text, **config, "rope_theta": 10_000.0}))
    assert_equal(tmp_path, whole)


def test_other_spellings_of_the_prefix_are_read(whole: Any, tmp_path: Path) -> None:
    """Kimi-K2.5 and older folders. Tensors that predict further tokens are left out."""
    file = tmp_path / "model.safetensors"
    tensors = {
        name.replace("model.language_model.", "language_model.model.").replace("lm_head.", "language_model.lm_head."): x
        for name, x in load_file(file).items()
    }
    tensors["mtp.layers.0.mlp.experts.1.up_proj.weight"] = torch.zeros(2, 2)
    tensors["mtp.norm.weight"] = torch.zeros(2)
    save_file(tensors, file)
    assert_equal(tmp_path, whole)


def test_values_outside_the_text_config_count(whole: Any, tmp_path: Path) -> None:
    config = json.loads((tmp_path / "config.json").read_text())
    found, rename = text_part({**config, "tie_word_embeddings": True, "quantization_config": {"quant_method": "fp8"}})
    assert found["quantization_config"] == {"quant_method": "fp8"} and "vision_config" not in found
    assert found["tie_word_embeddings"] and not config["text_config"].get("tie_word_embeddings", True)
    assert rename("model.visual.blocks.0.attn.qkv.weight") is None
    assert rename("vision_tower.patch.weight") is None


def test_a_text_model_with_more_than_positions_is_refused(whole: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "text_config": {**config["text_config"], "model_type": "no_such"}}))
    with pytest.raises(CheckpointError):
        load_model(str(tmp_path))
