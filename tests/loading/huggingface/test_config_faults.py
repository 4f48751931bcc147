"""Values of a config that no model can be made with are named, even if transformers does not name them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.load import load_model
from ktqueue.loading.skeleton import build_config, build_skeleton

MOST = (1 << 31) - 1
FACTOR, LENGTH = "a number from 1e-06 to 1e+06", "original_max_position_embeddings"
SIZES = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, LENGTH: 64}
BASE, USABLE = "a number from 1 to 1e+18", f"one that transformers {transformers.__version__} can use"
COUNT = f"a whole number from 1 to {MOST}"


@pytest.mark.parametrize("model_type", ["laguna", "mimo_v2_flash", "gemma4_text"])
@pytest.mark.parametrize(
    ("rope", "name", "limit"),
    [
        ({}, "rope_parameters.full_attention", "an object"),
        (PLAIN, "rope_parameters.full_attention", "an object"),
        ({"full_attention": PLAIN}, "rope_parameters.sliding_attention", "an object"),
        ({"full_attention": PLAIN, "sliding_attention": None}, "rope_parameters.sliding_attention", "an object"),
        ({"full_attention": 3, "sliding_attention": PLAIN}, "rope_parameters.full_attention", "an object"),
        ({"full_attention": {"rope_type": "default"}, "sliding_attention": PLAIN}, "rope_theta", BASE),
        ({"full_attention": {**PLAIN, "rope_type": "odd"}, "sliding_attention": PLAIN}, "rope_type", None),
        ({"full_attention": {**PLAIN, "rope_type": 0}, "sliding_attention": PLAIN}, "rope_type", None),
        (
            {"full_attention": {**PLAIN, "rope_type": {}}, "sliding_attention": PLAIN},
            "rope_parameters.full_attention.rope_type",
            USABLE,
        ),
    ],
)
def test_every_kind_of_layers_needs_angles(
    model_type: str, rope: dict[str, Any], name: str, limit: str | None, changed: Callable[..., Path]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_model(str(changed(model_type, rope_parameters=rope)))
    assert (caught.value.param, caught.value.limit) == (name, limit or USABLE.replace("can use", "knows"))


@pytest.mark.parametrize("model_type", ["laguna", "mimo_v2_flash", "gemma4_text"])
def test_kinds_of_layers_have_default_angles(model_type: str, changed: Callable[..., Path]) -> None:
    load_model(str(changed(model_type, rope_parameters=None)))


@pytest.mark.parametrize(
    ("model_type", "values", "name", "limit"),
    [
        ("gpt2", {"n_head": 0}, "n_head", COUNT),
        ("gpt2", {"n_inner": -1}, "n_inner", USABLE),
        ("bart", {"encoder_attention_heads": None}, "encoder_attention_heads", COUNT),
        ("bart", {"decoder_ffn_dim": -1}, "decoder_ffn_dim", USABLE),
        ("bart", {"activation_function": None}, "activation_function", USABLE),
        ("dots1", {"n_routed_experts": None}, "n_routed_experts", COUNT),
        (
            "dots1",
            {**SIZES, "n_shared_experts": None},
            "n_shared_experts",
            f"a whole number from 0 to {MOST}",
        ),
        ("deepseek_v3", {"first_k_dense_replace": None}, "first_k_dense_replace", USABLE),
        ("deepseek_v3", {"rope_parameters": {**PLAIN, "rope_type": []}}, "rope_parameters.rope_type", USABLE),
        ("step3p5", {"per_layer_config": {"1": {"num_attention_heads": None}}}, "num_attention_heads", COUNT),
        ("step3p5", {"per_layer_config": {"1": 4}}, "per_layer_config", "an object with one for each layer"),
        ("step3p5", {"num_nextn_predict_layers": "some"}, "num_nextn_predict_layers", USABLE),
        ("hunyuan_v1_moe", {"rope_parameters": {**PLAIN, "rope_type": "dynamic", "factor": None}}, "factor", FACTOR),
        (
            "laguna",
            {"rope_parameters": {"full_attention": {**YARN, LENGTH: None}}},
            LENGTH,
            f"a number from 1 to {MOST:g}",
        ),
    ],
)
def test_values_that_no_model_can_be_built_from_are_named(
    model_type: str, values: dict[str, Any], name: str, limit: str
) -> None:
    with pytest.raises(CheckpointError, match=f"^folder: {name} must be ") as caught:
        build_skeleton(build_config({"model_type": model_type, **values}, "folder"), torch.float32, "folder")
    assert (caught.value.param, caught.value.limit) == (name, limit)


@pytest.mark.parametrize("name", ["vocab_size", "model_type", "quantization_config", "bos_token_id", "hidden_act"])
def test_a_long_value_is_shortened(name: str, changed: Callable[..., Path]) -> None:
    folder = changed("qwen3_moe")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {name: "x" * 100_000}))
    with pytest.raises(CheckpointError, match=rf"{name}.* '?xxx") as caught:
        load_model(str(folder))
    assert len(str(caught.value)) < 1_000
