"""Operators of other packages: replaced by rule, checked when the rule is read, equal to what they replace."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from example_package import RULES

from ktqueue.core.errors import CheckpointError, RuleError
from ktqueue.engine.gpu.device_model import device_model
from ktqueue.loading.load import LoadedModel, load_model
from ktqueue.loading.model_report import report_model
from ktqueue.operators.base import Operator
from ktqueue.operators.registry import operator_names
from ktqueue.workers.startup.gpu_memory import can_be_captured

IDS = [*range(3, 43)]
PLAIN = RULES[: RULES.index("rules:")]
HEAD = "- match: {class: 'RMSNorm$'}\n  replace:\n    "
pytestmark = pytest.mark.usefixtures("example")


def _operators(model: LoadedModel) -> dict[str, Operator]:
    return {name: module for name, module in model.module.named_modules() if isinstance(module, Operator)}


@pytest.mark.parametrize("source", ["demo", "tiny"])
def test_a_norm_and_experts_of_a_package_give_the_same_tokens(
    source: str, tiny: Path, rule_file: Callable[[str], str], run_logits: Callable[..., torch.Tensor]
) -> None:
    path = "demo" if source == "demo" else str(tiny)
    plain, changed = (load_model(path, rules=rule_file(text)) for text in (PLAIN, RULES))
    kinds = [type(module).__name__ for module in _operators(changed).values()]
    layers = changed.config.num_hidden_layers
    assert kinds.count("TorchExperts") == layers and kinds.count("DoubleNorm") >= 2 * layers + 1
    expected, found = (run_logits(model.module, model.kv_layout(16), IDS) for model in (plain, changed))
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    closed: list[str] = []
    for name, operator in _operators(changed).items():
        operator.close = lambda name=name: closed.append(name)  # type: ignore[method-assign, misc]
    device_model(changed.module).close()
    assert closed == [*_operators(changed)]


def test_the_report_names_operators_of_packages(tiny: Path, rule_file: Callable[[str], str]) -> None:
    assert "DoubleNorm" in operator_names()
    rows = {row.name: row.operator for row in report_model(str(tiny), rules=rule_file(RULES)).rows}
    assert rows["model.norm"] == "DoubleNorm"
    assert rows["model.layers.*.mlp.experts"] == "exact_operators:TorchExperts"


def test_an_operator_says_whether_it_may_be_on_another_device(tiny: Path, rule_file: Callable[[str], str]) -> None:
    report = report_model(str(tiny), rules=rule_file(RULES), device="cuda")
    assert report.refusal is None
    assert {row.device for row in report.rows if "TorchExperts" in row.operator} == {"cpu"}
    text = RULES.replace("op: DoubleNorm", "op: DoubleNorm\n    device: cpu")
    refusal = report_model(str(tiny), rules=rule_file(text), device="cuda").refusal
    assert refusal is not None and "norm" in refusal and "operators with any_device" in refusal


def test_steps_are_captured_only_if_every_operator_allows_it(
    tiny: Path, rule_file: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    planner: Any = SimpleNamespace(backend="triton")
    norms = f"{HEAD}op: DoubleNorm\n"
    assert can_be_captured(load_model(str(tiny), rules=rule_file(norms)), planner)
    experts = f"- match: {{name: '.experts$'}}\n  replace: {{class: exact_operators:TorchExperts}}\n{norms}"
    assert not can_be_captured(load_model(str(tiny), rules=rule_file(experts)), planner)
    assert "because TorchExperts does not allow it" in caplog.text


@pytest.mark.parametrize(
    ("replacement", "line", "words"),
    [
        ("class: no_such_package:Norm", 3, "no_such_package cannot be imported: ModuleNotFoundError"),
        ("class: exact_operators:Norm", 3, "exact_operators has no class 'Norm'"),
        ("class: exact_operators:dequantize", 3, "exact_operators has no class 'dequantize'"),
        ("class: torch.nn:RMSNorm", 3, "torch.nn:RMSNorm is not a subclass of ktqueue.operators.base.Operator"),
        (
            "class: ktqueue.operators.base:Operator",
            3,
            "ktqueue.operators.base:Operator lacks from_module, load, device_bytes, forward",
        ),
        (
            "class: exact_operators:TorchExperts\n    kwargs: {threads: 2}",
            3,
            "exact_operators:TorchExperts.from_module cannot be called with kwargs threads as an operator is: got an "
            "unexpected keyword argument 'threads'",
        ),
        ("class: exact_operators:DoubleNorm\n    isa: avx2", 4, "unknown key of replace 'isa'; known: class, device"),
        ("class: exact_operators:DoubleNorm\n    op: CpuLinear", 4, "unknown key of replace 'op'"),
        ("op: DoubleNorms", 3, "unknown op 'DoubleNorms'; did you mean 'DoubleNorm'?"),
        ("class: exact_operators", 3, "class must be package.module:Class, got 'exact_operators'"),
    ],
    ids=[
        *("no package", "no class", "a function", "a plain module", "no methods", "wrong options", "a key", "both"),
        *("no short name", "no path"),
    ],
)
def test_a_class_is_checked_when_its_rule_is_read(
    replacement: str, line: int, words: str, tiny: Path, rule_file: Callable[[str], str]
) -> None:
    file = rule_file(HEAD + replacement)
    with pytest.raises(RuleError) as caught:
        report_model(str(tiny), rules=file)
    assert caught.value.message.startswith(f"{file}:{line}: ") and words in caught.value.message


def test_a_failure_of_a_package_names_its_rule_or_its_tensor(
    tiny: Path, rule_file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = importlib.import_module("exact_operators")
    text = f"{HEAD}class: exact_operators:DoubleNorm\n    kwargs: {{epsilon: 1}}"
    with pytest.raises(RuleError, match=r"yaml:1: model.*norm.*: DoubleNorm has no option 'epsilon'"):
        load_model(str(tiny), rules=rule_file(text))
    file = rule_file(RULES)

    def broken(self: Operator, weights: object) -> None:
        raise KeyError("scale")

    monkeypatch.setattr(package.DoubleNorm, "load", broken)
    with pytest.raises(CheckpointError, match="norm: KeyError: 'scale'"):
        load_model(str(tiny), rules=file)
