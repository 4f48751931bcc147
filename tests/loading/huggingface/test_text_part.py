"""A folder with an encoder of images: its text model is served, and computes what the whole computes for text.

A folder without a head: its model is served if the head is tied.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoint_files import write_folder
from decoder_families import COMMON, LINEAR, MOE, SIGMOID, answers, feed
from latent_families import GROWING
from llama4_sizes import LLAMA4_SIZES
from safetensors.torch import load_file, save_file

from ktqueue.core.errors import CheckpointError
from ktqueue.families.table import family_of_type
from ktqueue.loading.huggingface.text_part import text_part
from ktqueue.loading.load import load_model

WEIGHTS = "model.safetensors"
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
    file = tmp_path / WEIGHTS
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


@pytest.mark.parametrize("spelling", ["language_model.model.", "language_model."])
def test_other_spellings_of_the_prefix_are_read(spelling: str, whole: Any, tmp_path: Path) -> None:
    """Kimi-K2.5 and older folders; models without their head. Tensors that predict further tokens are left out."""
    file = tmp_path / WEIGHTS
    tensors = {
        name.replace("model.language_model.", spelling).replace("lm_head.", "language_model.lm_head."): x
        for name, x in load_file(file).items()
    }
    tensors["mtp.layers.0.mlp.experts.1.up_proj.weight"] = torch.zeros(2, 2)
    tensors["mtp.norm.weight"] = torch.zeros(2)
    save_file(tensors, file)
    assert_equal(tmp_path, whole)


@pytest.mark.parametrize("spelling", ["language_model.model.", "language_model."])
def test_a_text_model_may_keep_the_names_that_it_had_in_the_whole(spelling: str, whole: Any, tmp_path: Path) -> None:
    file, config = tmp_path / WEIGHTS, tmp_path / "config.json"
    tensors = {name: x for name, x in load_file(file).items() if "visual" not in name}
    save_file({name.replace("model.language_model.", spelling): x for name, x in tensors.items()}, file)
    config.write_text(json.dumps(json.loads(config.read_text())["text_config"]))
    assert_equal(tmp_path, whole)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "minimax_m2", "llama4_text", "gpt2", "gpt_neox"])
def test_a_model_saved_without_its_head_is_read(
    family: str, make_model: Callable[..., Path], tmp_path: Path, assert_equals_transformers: Callable[..., None]
) -> None:
    folder = write_folder(tmp_path / "base", source := make_model(family, tie_word_embeddings=True), {})
    tensors = load_file(source / WEIGHTS)
    save_file({name.partition(".")[2]: x for name, x in tensors.items() if "lm_head" not in name}, folder / WEIGHTS)
    assert_equals_transformers(load_model(str(folder)), source)


def test_a_head_that_is_missing_is_named(make_model: Callable[..., Path], tmp_path: Path) -> None:
    tensors = load_file(make_model("llama") / WEIGHTS)
    base = {name.removeprefix("model."): x for name, x in tensors.items() if name != "lm_head.weight"}
    folder = write_folder(tmp_path / "base", make_model("llama"), base)
    with pytest.raises(CheckpointError) as caught:
        load_model(str(folder))
    assert str(caught.value) == f"{folder} does not fit its model: missing: lm_head.weight"


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2"])
def test_tensors_are_named_as_in_the_files(family: str, make_model: Callable[..., Path], tmp_path: Path) -> None:
    tensors = load_file(make_model(family, tie_word_embeddings=True) / WEIGHTS)
    base = {name.partition(".")[2]: x for name, x in tensors.items() if "lm_head" not in name}
    norm = next(name for name in base if name in ("norm.weight", "ln_f.weight"))
    matrix = next(name for name in base if name.endswith(("q_proj.weight", "c_attn.weight")))
    base["layers.0.more"] = base.pop(norm)
    base[matrix] = (rows := base[matrix])[:-1]
    folder = write_folder(tmp_path / "base", make_model(family, tie_word_embeddings=True), base)
    with pytest.raises(CheckpointError) as caught:
        load_model(str(folder))
    problem = f"{matrix} (stored {[len(rows) - 1, rows.shape[1]]}, needed {[*rows.shape]})"
    expected = f"missing: {norm}; surplus: layers.0.more; of the wrong shape: {problem}"
    assert str(caught.value) == f"{folder} does not fit its model: {expected}"


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
