"""Checks of configs at load: impossible numbers are refused by name, limit and value."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.gguf.families import family_of_metadata
from ktqueue.loading.gguf.metadata import config_from_metadata, metadata_from_config
from ktqueue.loading.load import load_model, prepare
from ktqueue.loading.rules import DEFAULT_RULES
from ktqueue.loading.skeleton import build_config

MODULES = str(DEFAULT_RULES.with_name("modules.yaml"))
MOST = (1 << 31) - 1
FACTOR = "a number from 1e-06 to 1e+06"
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LENGTH = "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("model_type", "name", "value", "limit"),
    [
        *(
            ("mixtral", name, value, f"a whole number from 1 to {MOST}")
            for name, value in (
                ("max_position_embeddings", 0),
                ("max_position_embeddings", -1),
                ("max_position_embeddings", 1 << 31),
                ("hidden_size", -64),
                ("vocab_size", 0),
                ("num_attention_heads", 0),
                ("num_key_value_heads", -2),
                ("head_dim", 1.5),
                ("hidden_size", "big"),
            )
        ),
        ("qwen2_moe", "decoder_sparse_step", 0, f"a whole number from 1 to {MOST}"),
        ("deepseek_v3", "q_lora_rank", -1, f"a whole number from 1 to {MOST}"),
        ("deepseek_v3", "num_key_value_heads", -1, f"a whole number from 1 to {MOST}"),
        ("deepseek_v2", "v_head_dim", True, f"a whole number from 1 to {MOST}"),
        ("deepseek_v2", "n_shared_experts", -1, f"a whole number from 0 to {MOST}"),
        ("qwen3_moe", "num_local_experts", -1, f"a whole number from 0 to {MOST}"),
        ("qwen3_moe", "moe_intermediate_size", -1, f"a whole number from 0 to {MOST}"),
        ("mixtral", "intermediate_size", -1, f"a whole number from 0 to {MOST}"),
        *(("mixtral", "rms_norm_eps", value, "a number from 1e-30 to 1") for value in (0.0, -100.0, 1e-300, 1e300)),
        ("olmoe", "clip_qkv", 0.0, FACTOR),
        ("gemma2", "attn_logit_softcapping", -1.0, FACTOR),
        ("gemma2", "final_logit_softcapping", 1e300, FACTOR),
        ("deepseek_v3", "routed_scaling_factor", 1e38, FACTOR),
        ("granite", "logits_scaling", 1e-40, FACTOR),
        ("glm4_moe", "partial_rotary_factor", 1.5, "a number from 0 to 1"),
        ("mixtral", "num_key_value_heads", 3, None),
        ("qwen3_moe", "num_experts_per_tok", 9, "from 1 to 8, the number of experts"),
        ("qwen3_moe", "num_experts_per_tok", 0, "from 1 to 8, the number of experts"),
        ("mixtral", "num_experts_per_tok", -1, "from 1 to 4, the number of experts"),
        ("deepseek_v3", "num_experts_per_tok", None, "from 1 to 8, the number of experts"),
        ("mixtral", "sliding_window", -1, "at least 1"),
        ("llama4_text", "attention_chunk_size", 0, f"a whole number from 1 to {MOST}"),
        ("llama4_text", "attention_chunk_size", None, "at least 1"),
        ("mixtral", "num_hidden_layers", 0, "a whole number from 1 to 4096"),
        ("llama4_text", "num_hidden_layers", 10**9, "a whole number from 1 to 4096"),
        ("mixtral", "num_labels", 10**9, "a whole number from 1 to 65536"),
        ("llama4_text", "floor_scale", 0, f"a whole number from 1 to {MOST}"),
        ("mixtral", "sliding_window", 0, "at least 1"),
    ],
)
def test_impossible_numbers_are_refused(
    model_type: str, name: str, value: Any, limit: str | None, changed: Callable[..., Path]
) -> None:
    folder = changed(model_type, **{name: value})
    if limit is None:  # the error names the other number
        name, value, limit = "num_attention_heads", 4, f"a multiple of {name}, {value}"
    with pytest.raises(CheckpointError) as caught:
        load_model(str(folder))
    assert str(caught.value) == f"{folder}: {name} must be {limit}, got {value!r}"
    assert (caught.value.param, caught.value.limit) == (name, limit)
    assert caught.value.value == ("None" if value is None else value)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3_moe", {"dtype": "auto"}),
        ("qwen3_moe", {"dtype": "auto", "torch_dtype": "auto"}),
        ("qwen3_moe", {"dtype": "float7", "rope_theta": None, "rope_scaling": None}),
        ("qwen3_moe", {"torch_dtype": None, "eos_token_id": [382, 381], "architectures": None}),
        ("qwen2_moe", {"head_dim": None}),
        ("deepseek_v3", {"head_dim": None}),
        ("gemma4_text", {"rope_scaling": None}),
        ("laguna", {"rope_scaling": {}}),
        ("ministral3", {"n_group": None, "eos_token_id": None}),
    ],
)
def test_keys_that_state_nothing_change_nothing(
    model_type: str,
    changes: dict[str, Any],
    changed: Callable[..., Path],
    make_model: Callable[..., Path],
    assert_equals_transformers: Callable[..., None],
) -> None:
    assert_equals_transformers(load_model(str(changed(model_type, **changes))), make_model(model_type))


@pytest.mark.parametrize(
    ("model_type", "changes", "problem"),
    [
        ("llama", {"rope_parameters": None, "rope_theta": None}, "rope_theta must be a number from 1 to 1e+18"),
        ("olmoe", {"rope_parameters": {**PLAIN, "rope_theta": None}}, "rope_theta must be a number from 1 to 1e+18"),
        ("qwen2_moe", {"num_key_value_heads": None}, f"num_key_value_heads must be a whole number from 1 to {MOST}"),
        ("afmoe", {"head_dim": None}, f"head_dim must be a whole number from 1 to {MOST}"),
        ("dots1", {"n_group": None}, "n_group must be a divisor of n_routed_experts, 8"),
        ("deepseek_v3", {"topk_group": None}, "topk_group must be from 1 to n_group, 4"),
        ("gemma2", {"head_dim": None}, "the config is not valid: Field 'head_dim' expected int"),
    ],
)
def test_nulls_are_refused_where_a_model_needs_a_number(
    model_type: str, changes: dict[str, Any], problem: str, changed: Callable[..., Path]
) -> None:
    folder = changed(model_type, **changes)
    with pytest.raises(CheckpointError) as caught:
        load_model(str(folder))
    assert str(caught.value).startswith(f"{folder}: {problem}, got None")


@pytest.mark.parametrize("model_type", ["glm4_moe", "bailing_moe_v2", "solar_open", "dots1", "exaone_moe"])
def test_groups_that_do_not_fit_are_refused(model_type: str, changed: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=r"n_group must be a divisor of (n_routed|num)_experts, 8, got 3"):
        load_model(str(changed(model_type, n_group=3)))


@pytest.mark.parametrize(
    ("values", "name", "value"),
    [
        ({"rope_theta": 0}, "rope_theta", 0),
        ({"rope_theta": 1e-300}, "rope_theta", 1e-300),
        ({"rope_theta": 1e300}, "rope_theta", 1e300),
        ({"rope_theta": {"__float__": "NaN"}}, "rope_theta", {"__float__": "NaN"}),
        ({"rope_parameters": {**YARN, "factor": 1e-300}}, "factor", 1e-300),
        ({"rope_parameters": {**PLAIN, "alpha": -1.0}}, "alpha", -1.0),
        ({"rope_theta": "much"}, "rope_theta", "much"),
        ({"rope_scaling": {"type": "linear", "factor": -2.0}}, "factor", -2.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, "rope_theta", -1.0),
        ({"rope_parameters": {**YARN, "factor": 0}}, "factor", 0),
        ({"rope_parameters": {**YARN, "attention_factor": 0}}, "attention_factor", 0),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1, 0], "long_factor": [1]}}, "short_factor", 0),
        ({"rope_parameters": {**YARN, "original_max_position_embeddings": 0}}, "original_max_position_embeddings", 0),
        ({"rope_parameters": {**YARN, "beta_slow": 0}}, "beta_slow", 0),
        ({"rope_parameters": {**YARN, "beta_fast": -1}}, "beta_fast", -1),
        ({"rope_parameters": {"full_attention": {**YARN, "factor": -1}}}, "factor", -1),
    ],
)
def test_impossible_rotary_parameters_are_refused(
    values: dict[str, Any], name: str, value: Any, changed: Callable[..., Path]
) -> None:
    folder = changed("mixtral", **{"rope_parameters": None, **values})
    with pytest.raises(CheckpointError) as caught:
        load_model(str(folder))
    limit = {"rope_theta": "a number from 1 to 1e+18", LENGTH: f"a number from 1 to {MOST:g}"}.get(name, FACTOR)
    assert str(caught.value) == f"{folder}: {name} must be {limit}, got {value!r}"


@pytest.mark.parametrize(
    ("name", "value", "values"),
    [
        ("hidden_act", "odd", {"hidden_act": "odd"}),
        ("rope_type", "odd", {"rope_parameters": {**YARN, "rope_type": "odd"}}),
        ("type", "odd", {"rope_parameters": None, "rope_scaling": {"type": "odd", "factor": 2.0}}),
        ("rope_type", 2, {"rope_parameters": {**YARN, "rope_type": 2}}),
    ],
)
def test_names_that_transformers_does_not_know_are_refused(
    name: str, value: Any, values: dict[str, Any], changed: Callable[..., Path]
) -> None:
    folder = changed("mixtral", **values)
    with pytest.raises(CheckpointError) as caught:
        load_model(str(folder))
    limit = f"one that transformers {transformers.__version__} knows"
    assert str(caught.value) == f"{folder}: {name} must be {limit}, got {value!r}"
    assert (caught.value.param, caught.value.limit, caught.value.value) == (name, limit, str(value))


def test_every_number_of_a_list_is_checked() -> None:
    """Some families have a width for each layer."""
    with pytest.raises(CheckpointError, match=r"intermediate_size must be a whole number from 0 to .*, got -1"):
        build_config({"model_type": "gemma3n", "intermediate_size": [16, -1]}, "folder")


@pytest.mark.parametrize("window", [0, -3])
def test_impossible_windows_are_refused(window: int, make_model: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=f"sliding_window must be at least 1, got {window}"):
        load_model(str(make_model("qwen2_moe", use_sliding_window=True, sliding_window=window)))


def test_a_window_that_no_layer_uses_may_be_anything(changed: Callable[..., Path]) -> None:
    """Qwen2-MoE's config has 0 for no window."""
    model = load_model(str(changed("qwen2_moe", sliding_window=-1)))
    assert model.config.sliding_window == 0


@pytest.mark.parametrize(
    ("model_type", "surplus"),
    [
        ("llama", {"sliding_window": 3}),
        ("llama", {"sliding_window": -3}),
        ("olmoe", {"sliding_window": "x"}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["full_attention"] * 2}),
        ("deepseek_v2", {"sliding_window": 3}),
        ("deepseek_v2", {"rope_interleave": False}),
        ("deepseek_v2", {"head_dim": 64}),
        pytest.param(
            *("gpt_bigcode", {"num_key_value_heads": 2}),
            marks=pytest.mark.filterwarnings(
                "ignore:`torch.jit.script:DeprecationWarning"
            ),  # a warning of transformers
        ),
        ("gpt2", {"num_key_value_heads": 2}),
    ],
)
def test_keys_that_the_model_does_not_use_change_nothing(
    model_type: str,
    surplus: dict[str, Any],
    make_model: Callable[..., Path],
    changed: Callable[..., Path],
    assert_equals_transformers: Callable[..., None],
) -> None:
    """A config keeps all keys of its file, but transformers' models use only those that their config classes define."""
    plain = {name: surplus[name] for name in surplus if name in ("use_sliding_window",)}
    expected = make_model(model_type, **plain, **({"sliding_window": 3} if plain else {}))
    model = load_model(str(changed(model_type, **surplus)))
    assert model.attention.windows == ({3} if plain else {0})
    assert_equals_transformers(model, expected)


def test_a_key_of_the_file_has_precedence_over_a_derived_value() -> None:
    """The config of ModernBERT's decoder has no such field, and derives the window from another number."""
    values = {"model_type": "modernbert-decoder", "local_attention": 12}
    assert build_config(values, "folder").sliding_window == 6
    config = transformers.CONFIG_MAPPING["modernbert-decoder"].from_dict({**values, "sliding_window": 3})
    assert build_config({**values, "sliding_window": 3}, "folder").sliding_window == config.sliding_window == 3


def test_rotary_pairs_that_are_half_a_head_apart(
    make_model: Callable[..., Path], assert_equals_transformers: Callable[..., None]
) -> None:
    """DeepSeek-V3's config has a key for this."""
    folder = make_model("deepseek_v3", rope_interleave=False)
    assert_equals_transformers(load_model(str(folder)), folder)


@pytest.mark.parametrize(
    ("model_type", "sizes", "words"),
    [
        ("llama", {"head_dim": 7}, "head_dim must be the width of rotary embeddings, which is 8 .*, got 7"),
        ("mixtral", {"hidden_size": 60}, "head_dim must be the width of rotary .* 16 for head_dim None, got 15"),
        ("deepseek_v2", {"qk_rope_head_dim": 7}, "qk_rope_head_dim must be the width of rotary .* is 8 .*, got 7"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim must be the width of rotary .* is 8 .*, got 7"),
        (
            "qwen3",
            {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}},
            "head_dim must be the width of rotary .*, which is 16 for head_dim 32, got 32",
        ),
        ("olmoe", {"head_dim": 8}, "head_dim must be the width of norms, which is 16 for head_dim 8, got 8"),
        (
            "laguna",
            {"num_attention_heads_per_layer": [4, 5]},
            "num_attention_heads_per_layer must be multiples of num_key_value_heads, 2, got 5",
        ),
    ],
)
def test_heads_that_transformers_cannot_compute_are_refused(
    model_type: str, sizes: dict[str, Any], words: str, make_model: Callable[..., Path]
) -> None:
    """The tensors fit each other, so without this check only a step would fail."""
    with pytest.raises(CheckpointError, match=words):
        load_model(str(make_model(model_type, **sizes)), rules=MODULES)


@pytest.mark.parametrize("width", [4, 16, 192])
def test_the_rotary_width_of_deepseek_v3_must_fit(width: int, changed: Callable[..., Path]) -> None:
    """transformers' rotary embeddings have the width head_dim, but the heads have qk_rope_head_dim."""
    with pytest.raises(CheckpointError, match=rf"qk_rope_head_dim .* is {width} for head_dim {width}, got 8"):
        load_model(str(changed("deepseek_v3", head_dim=width)))


def test_a_file_with_partial_rotary_embeddings_is_refused(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    family = family_of_metadata({"general.architecture": "qwen3moe", "qwen3moe.expert_count": 8}, "file")
    metadata = metadata_from_config(family, config, "file")
    key = "qwen3moe.rope.dimension_count"
    assert config_from_metadata(family, metadata, "file")["head_dim"] == metadata[key] == 32
    with pytest.raises(CheckpointError, match=f"{key} must be the width of a head, 32, got 16"):
        config_from_metadata(family, {**metadata, key: 16}, "file")


@pytest.mark.parametrize(
    ("model_type", "name", "value", "limit"),
    [
        ("llama", "is_causal", False, "True"),
        ("qwen3_moe", "is_causal", None, "True"),
        ("gemma", "use_bidirectional_attention", True, "False"),
    ],
)
def test_models_with_bidirectional_attention_are_refused(
    model_type: str, name: str, value: object, limit: str, changed: Callable[..., Path]
) -> None:
    """Models that compute embeddings of texts are an example. transformers applies the first key to any model."""
    with pytest.raises(CheckpointError, match=f"{name} must be {limit}, for attention to be causal, got {value}"):
        load_model(str(changed(model_type, **{name: value})))


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_an_indexer_chooses_the_keys_of_long_sequences(
    model_type: str,
    make_model: Callable[..., Path],
    assert_equals_transformers: Callable[..., None],
    run_logits: Callable[..., torch.Tensor],
) -> None:
    """Each of 40 tokens attends to 12 others, by modules too. The compiled decoder computes it alike in every chunk."""
    folder = make_model(model_type)
    assert_equals_transformers(load_model(str(folder), rules=MODULES), folder)
    model = load_model(str(folder), rules="exact")
    assert_equals_transformers(model, folder)
    layout, ids = model.kv_layout(16), [*range(3, 43)]
    assert torch.equal(run_logits(model.module, layout, ids, chunk=7), run_logits(model.module, layout, ids))


@pytest.mark.parametrize(
    ("model_type", "values", "message"),
    [
        ("glm_moe_dsa", {"index_head_dim": 4}, "index_head_dim must be at least qk_rope_head_dim, 64, got 4"),
        (
            "glm_moe_dsa",
            {"index_topk_pattern": "S" * 78},
            "indexer_types must be full in the first layer, got 'shared'",
        ),
        ("mistral4", {"n_group": 2}, "n_group must be 1, got 2"),
        ("mistral4", {"rope_parameters": PLAIN}, "llama_4_scaling_beta must be a number from 0, got None"),
    ],
)
def test_latent_attention_that_does_not_fit_is_refused(model_type: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        build_config({"model_type": model_type, **values}, "a model")


def longrope(original: int, *short: float) -> dict[str, Any]:
    factors = {"short_factor": [*short], "long_factor": [4.0] * 8}
    return {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": original, **factors}


def test_longrope_needs_a_divisor_for_each_pair(changed: Callable[..., Path]) -> None:
    folder = changed("qwen3", rope_parameters=longrope(16, *[1.0] * 15) | {"long_factor": [4.0] * 16})
    with pytest.raises(CheckpointError, match=r"short_factor must be a list of 16 numbers, got \[1\.0, 1\.0"):
        load_model(str(folder))


@pytest.mark.parametrize("model_type", ["phi3", "phimoe"])
def test_su_is_read_as_longrope(model_type: str, changed: Callable[..., Path]) -> None:
    rope = longrope(16, *[1.0] * 8) | {"short_mscale": 1.0, "long_mscale": 1.0}
    new = load_model(str(changed(model_type, rope_parameters=rope)))
    old = load_model(
        str(changed(model_type, rope_parameters=None, rope_scaling=rope | {"rope_type": "su", "type": "su"}))
    )
    assert old.kv_layout(16).original_length == new.kv_layout(16).original_length == 16


def test_longrope_is_served_to_its_full_length(make_model: Callable[..., Path]) -> None:
    for short, original in ((1.0, 16), (4.0, 0)):  # of equal lists, one serves all lengths
        model = load_model(str(make_model("phi3", rope_parameters=longrope(16, *[short] * 8))))
        assert model.card_facts.max_position_embeddings == 256
        assert model.kv_layout(16).original_length == original


@pytest.mark.parametrize(
    ("model_type", "rope", "message"),
    [
        (
            "gemma3_text",
            {"full_attention": longrope(16, *[1.0] * 8), "sliding_attention": longrope(32, *[1.0] * 8)},
            "its layers have different original_max_position_embeddings: \\[16, 32\\]",
        ),
        ("qwen3", {**longrope(16, *[1.0] * 8), "llama_4_scaling_beta": 0.5}, "longrope and queries that grow"),
    ],
)
def test_positions_that_cannot_say_which_list_is_used_are_refused(
    model_type: str, rope: dict[str, Any], message: str, make_model: Callable[..., Path]
) -> None:
    folder = make_model(model_type, head_dim=16, rope_parameters=rope)
    with pytest.raises(CheckpointError, match=message):
        prepare(str(folder), rules=None, device="cpu", dtype=torch.float32)
