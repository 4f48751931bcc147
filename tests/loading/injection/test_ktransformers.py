"""Rule files of KTransformers: what they mean here, and the lines that are refused."""

from pathlib import Path

import pytest

from ktqueue.core.errors import RuleError
from ktqueue.loading.model_report import report_model
from ktqueue.loading.rules import ktransformers_placement

FILE = Path(__file__).with_name("ktransformers_qwen.yaml")
HEAD = "- match: {name: '^model'}\n  replace:\n    class: ktransformers.operators."
ROUTER = f"{HEAD}gate.KMoEGate\n    kwargs:"
EXPERTS = f"{HEAD}experts.KTransformersExperts\n    kwargs:\n      "


def test_a_file_has_the_effect_of_our_rules(tiny: Path, tmp_path: Path) -> None:
    theirs, ours, default = (report_model("demo", rules=name, device="cuda") for name in (str(FILE), "quantised", None))
    assert theirs.rows == ours.rows != default.rows
    assert {row.operator for row in theirs.rows} == {"GpuDecoder"} and theirs.refusal is None
    (decoded := tmp_path / "decoded.yaml").write_text(FILE.read_text().replace("KLinearMarlin", "KLinearTorch"))
    placement = ktransformers_placement(decoded)
    assert placement is not None and placement.dense == "dequantised" and not placement.refusals
    changed = tmp_path / "changed.yaml"
    changed.write_text("base: decoded.yaml\nwithout: [GpuDecoder]\n")
    rows = report_model(str(tiny), rules=str(changed), device="cuda").rows
    assert {row.operator for row in rows} == {"default", "CpuExperts"}


def test_each_rule_has_a_meaning() -> None:
    placement = ktransformers_placement(FILE)
    assert placement is not None and placement.on_gpu
    assert [(meaning.line, meaning.operator, meaning.text[:25]) for meaning in placement.meanings] == [
        (1, "RotaryEmbedding", "the rotary embedding of G"),
        (6, "KTransformersLinear", "GpuDecoder with dense: qu"),
        (16, "KQwen3MoeSparseMoeBlock", "the Mixture-of-Experts la"),
        (22, "KTransformersExperts", "experts on the CPU; a lon"),
        (33, "KQwen2MoeModel", "not used: --expert-stream"),
        (38, "default", "not used: GpuDecoder has "),
    ]


def test_a_head_with_a_kernel_of_gpus_is_on_the_gpu(tmp_path: Path) -> None:
    (file := tmp_path / "theirs.yaml").write_text(
        "- match: {name: '^lm_head'}\n  replace:\n    class: ktransformers.operators.linear.KTransformersLinear\n"
        "    kwargs: {generate_device: cpu, prefill_device: cuda, generate_op: KLinearMarlin}\n"
    )
    placement = ktransformers_placement(file)
    assert placement is not None and placement.on_gpu and not placement.refusals
    file.write_text(file.read_text().replace("lm_head", "model"))
    placement = ktransformers_placement(file)
    assert placement is not None and [line for line, _ in placement.refusals] == [4]


def test_our_own_rules_are_not_theirs() -> None:
    assert ktransformers_placement("rules/default.yaml") is None
    assert ktransformers_placement("rules/exact.yaml") is None


def test_rules_for_a_gpu_are_refused_on_the_cpu(tiny: Path) -> None:
    with pytest.raises(RuleError, match="yaml:1: these rules put the model on a GPU: start with --device cuda"):
        report_model(str(tiny), rules=str(FILE))


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            f"{HEAD}gate.KMoEGate\n    kwargs: {{generate_device: 'cuda:1', prefill_device: 'cuda:1'}}",
            ["4: cuda:1: a worker serves on one GPU"],
        ),
        (f"{HEAD}gate.KMoEGate\n    kwargs: {{generate_device: npu}}", ["4: ktqueue has no device 'npu'"]),
        (f"{HEAD}gate.KMoEGate\n    kwargs: {{generate_device: cpu}}", ["4: only routed experts are on the CPU"]),
        (f"{HEAD}gate.KMoEGate\n    kwargs: {{generate_op: x}}", ["4: unknown argument 'generate_op' of KMoEGate"]),
        (f"{HEAD}gate.KOther", ["3: ktqueue has no operator like ktransformers.operators.gate.KOther"]),
        (f"{HEAD}models.KDeepseekV2Model\n    kwargs:\n      transfer_map: {{10: 'cuda:1'}}", ["5: transfer_map"]),
        (f"{HEAD}linear.KTransformersLinear\n    kwargs: {{generate_op: KLinearCPUInfer}}", ["4: ktqueue has no op"]),
        (
            f"{HEAD}linear.KTransformersLinear\n    kwargs: {{generate_op: [1]}}",
            ["4: ktqueue has no operator like [1]"],
        ),
        (f"{EXPERTS}generate_device: cuda\n      generate_op: KExpertsMarlin", ["5: experts are in GPU memory by"]),
        (f"{EXPERTS}n_deferred_experts: [2, 4]", ["5: n_deferred_experts [2, 4]: ktqueue defers none"]),
        (f"{EXPERTS}prefill_op: KExpertsOther", ["5: ktqueue has no operator like KExpertsOther"]),
        (f"{HEAD}gate.KMoEGate\n    device: cpu", ["4: only routed experts are on the CPU"]),
        (f"{HEAD}gate.KMoEGate\n  optional: true", ["4: unknown key 'optional' of a KTransformers rule"]),
        (f"{HEAD}gate.KMoEGate\n{HEAD.replace('^model', '(')}gate.KMoEGate", ["4: name is not a regular expression"]),
        (
            f"{HEAD}gate.KMoEGate\n{HEAD.replace('ktransformers.operators.', 'mine.Norm')}",
            ["6: mine.Norm is built as KTransformers builds operators"],
        ),
        (
            f"{HEAD}linear.KTransformersLinear\n    kwargs: {{generate_op: KLinearMarlin}}\n"
            f"{HEAD}linear.KTransformersLinear\n    kwargs: {{generate_op: KLinearTorch}}",
            ["5: dense weights are dequantised here and quantised in line 1"],
        ),
        (f"{HEAD}gate.KOther\n{HEAD}gate.KMore", ["3: ktqueue has no operator", "6: ktqueue has no operator"]),
    ],
    ids=[
        *("a second GPU", "an NPU", "a router on the CPU", "an unknown argument", "an unknown class", "a transfer map"),
        *("dense on the CPU", "a list", "experts on the GPU", "deferred", "another prefill", "loaded to the CPU"),
        *("a key of ours", "no expression", "a class of the user", "two forms", "two lines"),
    ],
)
def test_lines_that_cannot_be_followed_are_named(text: str, lines: list[str], tiny: Path, tmp_path: Path) -> None:
    (file := tmp_path / "theirs.yaml").write_text(text)
    with pytest.raises(RuleError) as caught:
        report_model(str(tiny), rules=str(file), device="cuda")
    found = caught.value.message.splitlines()
    assert len(found) == len(lines)
    assert all(line.startswith(f"{file}:{start}") for line, start in zip(found, lines, strict=True)), found


def test_an_error_names_a_limited_number_of_lines(tiny: Path, tmp_path: Path) -> None:
    (file := tmp_path / "theirs.yaml").write_text(f"{HEAD}gate.KOther\n" * 30)
    with pytest.raises(RuleError) as caught:
        report_model(str(tiny), rules=str(file), device="cuda")
    lines = caught.value.message.splitlines()
    assert len(lines) == 21 and lines[-1] == f"{file}: and 10 more lines"


def test_their_published_files_are_read(shared_data: Path) -> None:
    """Each rule of a file has a meaning or refused lines."""
    files = sorted((shared_data / "ktransformers").rglob("*.yaml"))
    if not files:
        pytest.skip("there is no folder shared/data/ktransformers beside the clone")
    for file in files:
        placement = ktransformers_placement(file)
        assert placement is not None and (placement.meanings or placement.refusals), file
