"""load_model: the loaded model computes what transformers computes, for every layout of a model."""

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from ktqueue.core.errors import CheckpointError, RuleError
from ktqueue.loading.load import load_model
from ktqueue.loading.rules import DEFAULT_RULES
from ktqueue.operators.decoder_facts import DecoderFacts, facts_of

IDS = list(range(3, 43))
KEEP = "- match: {class: 'ForCausalLM$'}\n  replace: {op: default}\n"
PARTS = """
- match: {name: '\\.experts$'}
  replace: {op: CpuExperts, activations: float32}
- match: {class: '^Linear$'}
  replace: {op: CpuLinear, activations: float32}
"""
EXACT = str(DEFAULT_RULES.with_name("exact.yaml"))  # CpuDecoder, activations float32


@pytest.mark.parametrize(
    "model_type",
    [
        *("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe", "dots1", "minimax_m2", "gpt_oss", "mimo_v2_flash"),
        *("hunyuan_v1_moe", "ernie4_5_moe", "granitemoe", "exaone_moe", "gemma2", "gemma3_text", "llama4_text"),
        *("phi3", "phimoe", "afmoe", "solar_open", "hy_v3", "gemma4_text", "bailing_moe_v2", "laguna", "step3p5"),
    ],
)
@pytest.mark.parametrize("source", ["folder", "gguf"])
def test_logits_equal_transformers(
    model_type: str,
    source: str,
    make_model: Callable[..., Path],
    make_source: Callable[..., Path],
    assert_equals_transformers: Callable[..., None],
) -> None:
    model = load_model(str(make_source(source, model_type)))
    assert_equals_transformers(model, make_model(model_type))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("source", ["folder", "gguf"])
def test_logits_of_dense_models_equal_transformers(
    model_type: str,
    source: str,
    tied: bool,
    make_model: Callable[..., Path],
    make_source: Callable[..., Path],
    assert_equals_transformers: Callable[..., None],
    tmp_path: Path,
) -> None:
    path = make_source(source, model_type, tie_word_embeddings=tied)
    rules = tmp_path / "none.yaml"  # for a model without experts the default rule has no effect
    rules.write_text("- match: {name: '^model$'}\n  replace: {op: default}\n")
    model = load_model(str(path), rules=str(rules))
    assert model.card_facts.architecture == type(model.module).__name__
    assert model.card_facts.quantization == "F32"
    assert_equals_transformers(model, make_model(model_type, tie_word_embeddings=tied))


def test_a_module_that_holds_weights_and_computes_a_buffer_keeps_its_weights(
    make_model: Callable[..., Path], assert_equals_transformers: Callable[..., None]
) -> None:
    """Gemma's embeddings have a scale. transformers' initialiser computes it, and would also initialise weights."""
    folder = make_model("gemma")
    assert_equals_transformers(load_model(str(folder)), folder)


def test_a_small_gemma_4_runs_by_its_modules(
    make_model: Callable[..., Path], assert_equals_transformers: Callable[..., None]
) -> None:
    kinds = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    sizes = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 384}
    folder = make_model("gemma4_text", **sizes, **kinds, enable_moe_block=False)
    with pytest.raises(RuleError, match=r"it has embeddings for each layer .rules/modules.yaml does without it"):
        load_model(str(folder))
    assert_equals_transformers(load_model(str(folder), rules="modules"), folder)


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("diffllama", "layer 0 attends 2 times per step"),
        ("xglm", "layer 0 attends 0 times per step"),
        ("openai-gpt", "layer 0 attends 0 times per step"),  # its buffers include integer positions
    ],
)
def test_layers_that_do_not_attend_exactly_once_are_refused(
    model_type: str, words: str, make_model: Callable[..., Path]
) -> None:
    """They run, but the cache keeps one of two attentions of a layer, and nothing of one outside the interface."""
    with pytest.raises(CheckpointError, match=f"cannot be run: {words} .*, but must attend once"):
        load_model(str(make_model(model_type)))


def test_a_model_that_counts_positions_itself_is_refused(make_model: Callable[..., Path]) -> None:
    """Bart takes a token's place in the step as its position, whatever the step says.

    Results would be wrong from the second step on, and for a second sequence in the same step.
    """
    with pytest.raises(CheckpointError, match=r"BartForCausalLM cannot be run: .* depend on its row in the"):
        load_model(str(make_model("bart")))


@pytest.mark.parametrize("model_type", ["exaone4", "ministral", "smollm3", "gemma3n_text", "granitemoehybrid"])
def test_models_may_have_layers_of_several_kinds(
    model_type: str, make_model: Callable[..., Path], assert_equals_transformers: Callable[..., None]
) -> None:
    """Some configs do not describe each layer.

    Full layers of Exaone 4 claim a window, and sliding layers of SmolLM3 claim none, as their configs say. The last
    layers of Gemma 3n share keys. Some models of Granite 4 keep no other state, although their class can.
    """
    folder = make_model(model_type)
    model = load_model(str(folder))
    assert model.attention.windows == ({0} if model_type == "granitemoehybrid" else {0, 7})
    assert_equals_transformers(model, folder)


def test_a_mistral_with_layers_of_several_kinds_is_a_ministral(
    make_model: Callable[..., Path], assert_equals_transformers: Callable[..., None], tmp_path: Path
) -> None:
    """As in transformers."""
    folder = make_model("ministral")
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "mistral"}))
    assert_equals_transformers(load_model(str(copy)), folder)


RENAMED = ("granitemoe", "phimoe", "ernie4_5_moe", "exaone_moe", "hy_v3", "gpt_neox", "glm4_moe_lite", "solar_open")


@pytest.mark.parametrize("model_type", [*RENAMED, "mistral4", "axk1"])
def test_files_whose_names_are_not_those_of_modules(
    model_type: str, make_model: Callable[..., Path], assert_equals_transformers: Callable[..., None]
) -> None:
    """As on the hub. transformers also writes the names of the hub."""
    folder = make_model(model_type)
    assert_equals_transformers(load_model(str(folder), rules=EXACT), folder)


def test_parameters_that_are_single_numbers(
    make_model: Callable[..., Path], assert_equals_transformers: Callable[..., None]
) -> None:
    """Apertus trains the parameters of its activation."""
    folder = make_model("apertus")
    assert_equals_transformers(load_model(str(folder), rules=EXACT), folder)


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("bert", "no tensor belongs to a layer named layers.N or h.N, .*; model_type is bert"),
        ("stablelm", "StableLmAttention did not receive the step: the model does not pass it on"),
    ],
)
def test_models_that_are_built_in_other_ways(model_type: str, words: str, make_model: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_model(str(make_model(model_type)))


def test_a_model_whose_layers_have_a_short_name(
    make_model: Callable[..., Path], assert_equals_transformers: Callable[..., None]
) -> None:
    """GPT-2's tensors are called `transformer.h.0`."""
    folder = make_model("gpt2", num_key_value_heads=4)
    assert_equals_transformers(load_model(str(folder)), folder)


def test_a_model_needs_no_flag_of_the_attention_interface(
    make_model: Callable[..., Path], assert_equals_transformers: Callable[..., None]
) -> None:
    folder = make_model("biogpt", num_key_value_heads=4)
    assert_equals_transformers(load_model(str(folder)), folder)


@pytest.mark.parametrize("layout", ["sharded", "fused", "tied", "bf16"])
def test_every_layout_equals_transformers(
    layout: str, make_model: Callable[..., Path], assert_equals_transformers: Callable[..., None], tmp_path: Path
) -> None:
    layouts: dict[str, dict[str, Any]] = {"sharded": {"shard": "100KB"}, "tied": {"tie_word_embeddings": True}}
    folder = make_model(**layouts.get(layout, {}))
    if layout == "sharded":
        assert len(list(folder.glob("model-*.safetensors"))) > 2
    if layout == "tied":  # as published by some: the tied tensor is stored twice
        weights = safetensors.torch.load_file(folder / "model.safetensors")
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
        folder = tmp_path
    if layout in ("fused", "bf16"):
        dtype = torch.bfloat16 if layout == "bf16" else torch.float32
        weights = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()
        assert "model.layers.0.mlp.experts.gate_up_proj" in weights
        safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
        folder = tmp_path
    model = load_model(str(folder), rules="exact")  # on AMX, activations are rounded for BF16 weights
    assert_equals_transformers(model, folder)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("model_type", "experts"),  # a class has formats with blocks and without
    [
        *(("qwen3_moe", quant) for quant in ("f16", "bf16", "q8_0", "q4_0", "mxfp4")),
        *itertools.product(["qwen2_moe", "mixtral", "olmoe"], ["bf16", "q4_0"]),
    ],
)
def test_operators_equal_transformers_on_decoded_weights(
    experts: str,
    model_type: str,
    whole: bool,
    make_gguf: Callable[..., Path],
    run_logits: Callable[..., torch.Tensor],
    rule_file: Callable[[str], str],
) -> None:
    path = make_gguf(experts, "q8_0" if experts.startswith("q") else experts, model_type=model_type)
    model = load_model(str(path), rules=EXACT if whole else rule_file(PARTS))
    twin = load_model(str(path), rules=rule_file(KEEP))
    kinds = {type(module).__name__ for module in model.module.modules()}
    assert "CpuDecoder" in kinds if whole else {"CpuExperts", "CpuLinear"} <= kinds
    assert not any(type(module).__name__.startswith("Cpu") for module in twin.module.modules())
    assert model.card_facts.quantization == experts.upper()
    expected = run_logits(twin.module, twin.kv_layout(16), IDS)
    found = run_logits(model.module, model.kv_layout(16), IDS)
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("replaced", ["lm_head", "model.layers.0", None])
def test_tied_embeddings_may_be_replaced_by_any_rules(
    replaced: str | None,
    make_gguf: Callable[..., Path],
    run_logits: Callable[..., torch.Tensor],
    rule_file: Callable[[str], str],
) -> None:
    path = make_gguf("q8_0", "q8_0", tie_word_embeddings=True)
    text = f"- match: {{name: '^{replaced}', class: '^Linear$'}}\n  replace: {{op: CpuLinear, activations: float32}}\n"
    model = load_model(str(path), rules=rule_file(text) if replaced else EXACT)
    twin = load_model(str(path), rules=rule_file(KEEP))
    expected = run_logits(twin.module, twin.kv_layout(16), IDS)
    assert (run_logits(model.module, model.kv_layout(16), IDS) - expected).abs().max() < 2e-5 * expected.abs().max()
    if replaced == "model.layers.0":
        assert model.module.lm_head.weight is model.module.model.embed_tokens.weight  # type: ignore[union-attr]


def test_an_operator_must_take_all_weights(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(module: torch.nn.Module) -> DecoderFacts:
        return dataclasses.replace(facts_of(module), qk_norm=())

    monkeypatch.setattr("ktqueue.operators.decoder.facts_of", forgetful)
    words = r"not taken by CpuDecoder: model.layers.0.self_attn.k_norm.weight, model.*"
    with pytest.raises(CheckpointError, match=words):
        load_model(str(tiny_gguf))


def test_quantised_file_is_near_the_original(
    make_gguf: Callable[..., Path],
    tiny: Path,
    reference_logits: Callable[..., torch.Tensor],
    run_logits: Callable[..., torch.Tensor],
) -> None:
    expected = reference_logits(tiny, IDS)
    model = load_model(str(make_gguf("q8_0", "q8_0")), rules=EXACT)
    error = run_logits(model.module, model.kv_layout(16), IDS) - expected
    # Of a token's logits. The mean would depend on the few tokens whose routers nearly tie and choose another expert.
    assert (error.norm(dim=-1) / expected.norm(dim=-1)).median() < 0.03


def test_bfloat16_is_near_float32(
    tiny: Path, reference_logits: Callable[..., torch.Tensor], run_logits: Callable[..., torch.Tensor]
) -> None:
    model = load_model(str(tiny), dtype=torch.bfloat16)
    assert {p.dtype for p in model.module.parameters()} == {torch.bfloat16}
    expected = reference_logits(tiny, IDS)
    got = run_logits(model.module, model.kv_layout(16), IDS).float()
    assert (got - expected).norm() / expected.norm() < 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", ["exaone_moe", "hy_v3", "ernie4_5_moe", "deepseek_v3"])
def test_a_model_may_keep_tensors_in_float32(
    model_type: str, dtype: torch.dtype, make_model: Callable[..., Path]
) -> None:
    """Routers correct their scores by small amounts."""
    folder = make_model(model_type)
    kept = {}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()
    ours = load_model(str(folder), dtype=dtype).module.state_dict()
    for name in ours.keys() & theirs.keys():
        assert ours[name].dtype == theirs[name].dtype, name
        if ours[name].dtype == torch.float32:
            kept[name] = ours[name]
            torch.testing.assert_close(ours[name], theirs[name], atol=0, rtol=0)
    assert any("correction_bias" in name for name in kept)


def test_nothing_is_left_on_meta_and_progress_counts_bytes(tiny_gguf: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    model = load_model(str(tiny_gguf), progress=lambda done, total, name: seen.append((done, total, name)))
    tensors = [*model.module.parameters(), *model.module.buffers()]
    assert tensors and not any(tensor.is_meta for tensor in tensors)
    done = [entry[0] for entry in seen]
    assert done == sorted(done) and done[0] == 0 and done[-1] == seen[-1][1] > 0
    assert not model.module.training
    assert model.config.output_router_logits is False


def test_the_demo_model_loads() -> None:
    model = load_model("demo")
    facts = model.card_facts
    assert (facts.architecture, facts.quantization, facts.vocab_size) == ("Qwen3MoeForCausalLM", "Q4_0", 8192)
    layout = model.kv_layout(16)
    assert (layout.layers, layout.kv_heads, layout.head_dim, layout.page_size) == (8, 2, 64, 16)


@pytest.mark.parametrize("fault", ["missing", "surplus", "shape"])
def test_tensors_that_do_not_fit_are_named(fault: str, tiny: Path, tmp_path: Path) -> None:
    weights = safetensors.torch.load_file(tiny / "model.safetensors")
    name = "model.layers.1.self_attn.q_norm.weight"
    expected = {
        "missing": f"missing: {name}",
        "surplus": "surplus: model.layers.1.self_attn.odd.weight",
        "shape": f"of the wrong shape: {name} (stored [16], needed [32])",
    }[fault]
    if fault == "missing":
        del weights[name]
    elif fault == "surplus":
        weights["model.layers.1.self_attn.odd.weight"] = torch.zeros(4)
    else:
        weights[name] = weights[name][:16].clone()
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    with pytest.raises(CheckpointError) as caught:
        load_model(str(tmp_path))
    assert expected in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "no_such"}, "model_type 'no_such' is unknown"),
        ({"model_type": None}, "model_type None is unknown"),
        ({"model_type": "idefics3"}, "a model of type idefics3 is not a causal language model"),
        ({"model_type": "recurrent_gemma"}, "a recurrent_gemma keeps more than keys and values"),
        ({"model_type": "qwen3_next"}, "a qwen3_next of which no layer has keys and values is not supported"),
        ({"model_type": "mamba"}, "Mamba is not supported: it has layers that keep a state"),
        ({"model_type": "gptj"}, "a gptj uses its own kind of attention"),
        ({"kv_lora_rank": 16}, "latent attention"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config"),
        ({"hidden_act": 3}, "config is not valid"),
        ({"num_hidden_layers": 4_000}, "num_hidden_layers is 4000, but there are tensors of 2 layers"),
        ({"num_hidden_layers": 1_000_000}, "num_hidden_layers must be a whole number from 1 to 4096, got 1000000"),
    ],
)
def test_unusable_configs_are_refused(change: dict[str, object], words: str, tiny: Path, tmp_path: Path) -> None:
    config = json.loads((tiny / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=words):
        load_model(str(tmp_path))


def test_a_model_that_the_decoder_refuses_runs_by_its_modules(
    make_model: Callable[..., Path], assert_equals_transformers: Callable[..., None]
) -> None:
    folder = make_model("llama", head_dim=12)
    with pytest.raises(RuleError, match=r"heads have 12 dimensions, .* \(rules/modules.yaml does without it\)"):
        load_model(str(folder))
    model = load_model(str(folder), rules=str(DEFAULT_RULES.with_name("modules.yaml")))
    assert {type(module).__name__ for module in model.module.modules()} >= {"LlamaForCausalLM", "CpuLinear"}
    assert_equals_transformers(model, folder)
