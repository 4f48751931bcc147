"""What is known of a model before its weights are read: which weights its own code reads, and whether it can run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ktqueue.core.errors import CheckpointError, RuleError
from ktqueue.loading.load import kv_layout, load_model
from ktqueue.loading.model_report import report_model
from ktqueue.loading.plan import make_plan
from ktqueue.loading.rehearsal import dummy_values, rehearse, rehearse_without_weights
from ktqueue.loading.rules import DEFAULT_RULES, load_rules
from ktqueue.loading.skeleton import build_config, build_skeleton
from ktqueue.operators.kv_cache import KVLayout
from ktqueue.operators.registry import OPERATORS
from ktqueue.operators.step import DecoderOutput, ScoreOptions, StepContext

KEEP = "- match: {class: 'ForCausalLM$'}\n  replace: {op: default}\n"


def test_a_module_whose_weights_are_read_is_not_replaced(
    make_model: Callable[..., Path], assert_equals_transformers: Callable[..., None]
) -> None:
    """HunYuan's router reads the type of its matrix."""
    folder = make_model("hunyuan_v1_moe")
    modules = str(DEFAULT_RULES.with_name("modules.yaml"))
    rows = {row.name: row.operator for row in report_model(str(folder), rules=modules).rows}
    assert rows["model.layers.*.mlp.gate.wg"] == "default"
    assert rows["lm_head"] == rows["model.layers.*.mlp.shared_mlp.up_proj"] == "CpuLinear"
    model = load_model(str(folder), rules=modules)
    kinds = {name: type(module).__name__ for name, module in model.module.named_modules()}
    assert kinds["model.layers.1.mlp.gate.wg"] == "Linear"
    assert kinds["model.layers.1.mlp.experts"] == "CpuExperts"
    assert_equals_transformers(model, folder)


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("diffllama", "layer 0 attends 2 times per step"),
        ("doge", "DogeAttention has a mask of its own"),
        ("bart", "depend on its row in the step"),
        ("mbart", "depend on its row in the step"),
        ("whisper", "ValueError: 2 rows of logits were requested, got 3"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_model_that_cannot_run_is_refused_before_weights_are_read(
    model_type: str, words: str, device: str, make_model: Callable[..., Path]
) -> None:
    folder = str(make_model(model_type))
    report = report_model(folder, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    assert report.rows and report.refusal is not None and words in report.refusal
    read: list[int] = []
    with pytest.raises(CheckpointError, match=words):
        load_model(folder, progress=lambda done, *_: read.append(done))
    assert not read


def test_an_operator_that_cannot_replace_a_module_is_reported_with_the_plan(tiny: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("- match: {class: 'RMSNorm$'}\n  replace: {op: CpuLinear}\n")
    report = report_model(str(tiny), rules=str(rules))
    assert {row.operator for row in report.rows if "norm" in row.name} == {"CpuLinear"}
    with pytest.raises(RuleError) as caught:
        load_model(str(tiny), rules=str(rules))
    assert report.refusal == caught.value.message


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen2_moe", "deepseek_v3", "gemma3n_text", "gpt2", "exaone4"])
def test_models_that_can_run_are_not_refused(model_type: str, make_model: Callable[..., Path]) -> None:
    folder = str(make_model(model_type))
    for device, dtype in (("cpu", torch.float32), ("cpu", torch.bfloat16), ("cuda", torch.float16)):
        assert report_model(folder, device=device, dtype=dtype).refusal is None
    assert report_model(folder, rules=str(DEFAULT_RULES.with_name("modules.yaml"))).refusal is None


class Noisy(nn.Module):
    """Multiplies the last of three rows by 1.0025, as if rounding to int8 had made more of another rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([1.0, 1.0, 1.0025]))

    def forward(self, *, step: StepContext, **_: Any) -> DecoderOutput:
        states = torch.arange(1.0, 9.0).expand(3, 1, 8) * self.factor[:, None, None]
        assert step.attention is not None
        step.attention.attend(0, states, step.kv, ScoreOptions(1.0, 0))
        return DecoderOutput(states[[0, 2], 0][None])


def test_rounded_activations_are_no_dependence_on_the_row() -> None:
    """A Laguna in IQ4_XS was refused: torch multiplies the rows of a step by different kernels."""
    layout = KVLayout(layers=1, kv_heads=1, head_dim=8, page_size=1, dtype=torch.float32)
    with pytest.raises(CheckpointError, match="the numbers of a token depend on its row in the step"):
        rehearse(Noisy(), layout, "model")
    rehearse(Noisy(), layout, "model", is_rounded=True)


def test_a_model_of_real_size_takes_no_memory(tmp_path: Path) -> None:
    """Its experts, which stay transformers' modules, would take 20 GB."""
    values: dict[str, Any] = {"vocab_size": 150_000, "hidden_size": 5120, "intermediate_size": 12_288}
    values |= {"num_hidden_layers": 2, "num_attention_heads": 96, "num_key_value_heads": 8, "n_routed_experts": 160}
    config = build_config({"model_type": "glm4_moe", "first_k_dense_replace": 1, **values}, "folder")
    skeleton = build_skeleton(config, torch.bfloat16, "folder")
    (rules := tmp_path / "rules.yaml").write_text(KEEP)
    modules = [(name, type(module).__name__) for name, module in skeleton.named_modules()]
    plan = make_plan(modules, load_rules(rules, OPERATORS), "cpu")
    assert rehearse_without_weights(skeleton, plan, kv_layout(config, 1, torch.bfloat16), "folder") == plan
    assert dummy_values(150_000, 5120).untyped_storage().nbytes() < 1 << 20
    assert len(set(dummy_values(160, 5120, 3072)[::16, ::64, ::64].flatten().tolist())) > 400


def test_a_composite_model_is_refused() -> None:
    words = "a gemma3 consists of several models; its text model, a gemma3_text, is not served from such a folder"
    with pytest.raises(CheckpointError, match=words):
        build_config({"model_type": "gemma3"}, "folder")
    with pytest.raises(
        CheckpointError, match="a qwen3_vl consists of several models; its text model, a qwen3_vl_text,"
    ):
        build_config({"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text"}}, "folder")


def test_layers_may_differ_only_in_their_heads_and_only_in_gemma_4() -> None:
    for model_type, name, value in (("llama", "head_dim", 32), ("gemma4_text", "intermediate_size", 8)):
        config = {"model_type": model_type, "per_layer_config": {"1": {name: value}}}
        with pytest.raises(CheckpointError, match=f"a {model_type} whose layers differ in {name} is not supported"):
            build_config(config, "folder")
    with pytest.raises(CheckpointError, match=r"head_dim must be a whole number from 1 to .*, got -8"):
        build_config({"model_type": "gemma4_text", "per_layer_config": {"1": {"head_dim": -8}}}, "folder")
