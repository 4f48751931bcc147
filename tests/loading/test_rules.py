"""Rule files: the language, errors with file and line, the plan, and carrying out the plan."""

import contextlib
from pathlib import Path

import pytest
from torch import nn

from ktqueue.core.errors import RuleError
from ktqueue.families.table import SUPPORTED
from ktqueue.loading.load import load_model
from ktqueue.loading.plan import LoadPlan, make_plan
from ktqueue.loading.rules import DEFAULT_RULES, SHIPPED_RULES, Rule, load_rules, rules_file

OPERATORS = ("CpuExperts", "Other")
WHOLE = (*OPERATORS, "CpuDecoder", "CpuLinear", "GpuDecoder", "LatentAttention")
TREE = [
    ("", "Model"),
    ("layers", "ModuleList"),
    *(
        (f"layers.{i}{tail}", kind)
        for i in range(12)
        for tail, kind in (("", "Layer"), (".mlp", "Block"), (".mlp.experts", "Experts"))
    ),
    ("norm", "Norm"),
]


def _rules(tmp_path: Path, text: str) -> list[Rule]:
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    return load_rules(path, OPERATORS)


def _plan(tmp_path: Path, text: str, device: str = "cpu") -> LoadPlan:
    return make_plan(TREE, _rules(tmp_path, text), device)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "expected a list of rules"),
        ("[]", 1, "expected a list of rules"),
        ("match: {name: a}", 1, "unknown key of a rule file 'match'; known: base, without, options, rules"),
        ("- match: {name: a}\n  replace: {op: Other}\n  recurse: true", 3, "'recurse'; did you mean 'recursive'?"),
        ("- match:\n    names: a\n  replace: {op: Other}", 2, "'names'; did you mean 'name'?"),
        ("- match: {name: a}\n  replace:\n    op: CpuExpert", 3, "unknown op 'CpuExpert'; did you mean 'CpuExperts'?"),
        ("- match: {name: a}\n  replace: {device: cpu}", 2, "replace needs op"),
        ("- match: {name: a}", 1, "a rule needs replace"),
        ("- replace: {op: Other}", 1, "a rule needs match"),
        ("- match: {device: cpu}\n  replace: {op: Other}", 1, "match needs name or class"),
        ("- match: {name: a, device: gpu}\n  replace: {op: Other}", 1, "unknown device 'gpu'"),
        ("- match: {name: a, dtype: float64}\n  replace: {op: Other}", 1, "'float64'; did you mean"),
        ("- match: {name: a}\n  replace: {op: Other}\n  optional: 1", 3, "optional must be true or false"),
        ("- match: {}\n  replace: {op: Other}", 1, "match needs name or class"),
        ("- match:\n    name: '('\n  replace: {op: Other}", 2, "name is not a regular expression"),
        ("- match: {name: 3}\n  replace: {op: Other}", 1, "name must be a text, got 3"),
        ("- match: {name: a}\n  replace: {op: Other, device: gpu}", 2, "device must be cpu, cuda or cuda:N, got 'gpu'"),
        ("- match: {name: a}\n  replace: {op: default, isa: x}", 2, "op default has no option 'isa'"),
        ("- match: {name: a}\n  replace: {op: Other}\n  recursive: often", 3, "recursive must be true or false"),
        ("- match: {name: a, name: b}\n  replace: {op: Other}", 1, "'name' appears twice"),
        ("- match: {name: a}\n  replace: {op: Other\n", 3, "not YAML"),
        ("- match: {name: a}\n  replace: !!python/object:os.system {op: Other}", 2, "replace"),
        ("- match: {name: !!binary aGk=}\n  replace: {op: Other}", 1, "which rules do not use"),
        ("- [a]", 1, "a rule must be a mapping"),
    ],
)
def test_errors_have_file_and_line(text: str, line: int, words: str, tmp_path: Path) -> None:
    with pytest.raises(RuleError) as caught:
        _rules(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'rules.yaml'}:{line}: ")
    assert words in str(caught.value)


BASE = """- match: {class: Experts}
  replace: {op: CpuExperts, isa: scalar}
- match: {class: Norm}
  replace: {op: Other}
"""


def test_a_file_changes_the_options_of_its_base(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    rules = _rules(tmp_path, "base: base.yaml\noptions:\n  CpuExperts: {activations: float32, isa: avx2}")
    assert [(rule.op, rule.options) for rule in rules] == [
        ("CpuExperts", {"activations": "float32", "isa": "avx2"}),
        ("Other", {}),
    ]
    assert rules[0].source == f"{tmp_path}/base.yaml:1, with options of {tmp_path}/rules.yaml:3"
    assert rules[1].source == f"{tmp_path}/base.yaml:3"


def test_a_file_leaves_out_operators_of_its_base_and_puts_its_own_rules_first(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    text = "base: base.yaml\nwithout: [Other]\nrules:\n- match: {name: 'layers.0'}\n  replace: {op: default}"
    assert [rule.op for rule in _rules(tmp_path, text)] == ["default", "CpuExperts"]


def test_a_base_may_have_a_base(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "middle.yaml").write_text("base: base.yaml\nwithout: [Other]")
    rules = _rules(tmp_path, "base: middle.yaml\noptions: {CpuExperts: {isa: avx2}}")
    assert [(rule.op, rule.options) for rule in rules] == [("CpuExperts", {"isa": "avx2"})]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("without: [Other]", 1, "needs base"),
        ("base: defalt", 1, "there is no rule file 'defalt'; known by name: both, default, exact, modules, quantised"),
        ("base: rules.yaml", 1, "rules.yaml is based on this file, or is this file"),
        ("base: circle.yaml", 1, "rules.yaml is based on this file"),
        ("base: base.yaml\nwithout: Other", 2, "without must be a list"),
        ("base: base.yaml\nwithout: [CpuExpert]", 2, "'CpuExpert'; did you mean 'CpuExperts'?"),
        ("base: base.yaml\nwithout: [default]", 2, "unknown operator 'default'"),
        ("base: base.yaml\nwithout: [Other, Other]", 2, "no rule of the base uses Other"),
        ("base: base.yaml\nwithout: [Other, CpuExperts]", 1, "there is no rule left"),
        ("base: base.yaml\noptions: {Other: fast}", 2, "Other must be a mapping"),
        ("base: base.yaml\noptions: [Other]", 2, "options must be a mapping"),
        ("base: base.yaml\nwithout: [Other]\noptions:\n  Other: {isa: avx2}", 4, "no rule of the base uses Other"),
        ("base: base.yaml\nrules: {}", 2, "rules must be a list"),
        ("base: base.yaml\nrules:\n- match: {name: a}", 3, "a rule needs replace"),
    ],
)
def test_errors_of_a_derived_file_have_file_and_line(text: str, line: int, words: str, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "circle.yaml").write_text("base: rules.yaml")
    with pytest.raises(RuleError) as caught:
        _rules(tmp_path, text)
    file = "circle.yaml" if "circle" in text else "rules.yaml"
    assert str(caught.value).startswith(f"{tmp_path / file}:{line}: ")
    assert words in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match=r"none.yaml:1: "):
        load_rules(tmp_path / "none.yaml", OPERATORS)


def test_a_shipped_file_is_found_by_its_name(tmp_path: Path) -> None:
    assert rules_file(None) == DEFAULT_RULES
    for name in ("both", "default", "exact", "modules", "quantised"):
        assert rules_file(name) == SHIPPED_RULES / f"{name}.yaml"
        load_rules(rules_file(name), WHOLE)
    (tmp_path / "mine.yaml").write_text("[]")
    with contextlib.chdir(tmp_path):
        assert rules_file("mine.yaml") == Path("mine.yaml")
        assert rules_file("exact") == SHIPPED_RULES / "exact.yaml"


@pytest.mark.parametrize(
    ("rules", "words"),
    [("exakt", "did you mean --rules exact"), ("rules/exact.yaml", "mean --rules exact"), ("nil", "")],
)
def test_an_unknown_name_lists_the_shipped_files(rules: str, words: str, tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path), pytest.raises(RuleError) as caught:
        rules_file(rules)
    assert words in str(caught.value)
    assert "both, default, exact, modules, quantised" in str(caught.value)
    assert caught.value.param == "engine.rules"


def test_the_first_match_wins_and_names_may_select_layers(tmp_path: Path) -> None:
    plan = _plan(
        tmp_path,
        r"""
- match: {name: '^layers\.([0-9]|1[01])\.mlp\.experts$', class: Experts}
  replace: {op: CpuExperts, isa: scalar}
- match: {class: '^(Norm|Experts)$'}
  replace: {op: Other}
""",
    )
    assert [(item.name, item.op) for item in plan.replacements] == [
        *((f"layers.{i}.mlp.experts", "CpuExperts") for i in range(12)),
        ("norm", "Other"),
    ]
    assert plan.replacements[0].options == {"isa": "scalar"}
    assert plan.replacements[0].source.endswith("rules.yaml:2")


def test_name_is_searched_and_both_must_match(tmp_path: Path) -> None:
    plan = _plan(tmp_path, "- match: {name: '3', class: Block}\n  replace: {op: Other}")
    assert [item.name for item in plan.replacements] == ["layers.3.mlp"]


def test_the_root_can_be_replaced(tmp_path: Path) -> None:
    plan = _plan(tmp_path, "- match: {class: '^Model$'}\n  replace: {op: Other, device: cpu}", device="cuda")
    assert [(item.name, item.op) for item in plan.replacements] == [("", "Other")]
    assert plan.device_of("layers.3") == "cpu"


@pytest.mark.parametrize(
    ("device", "dtype", "count"), [("cpu", "float32", 12), ("cuda:1", "float32", 0), ("cpu", "bfloat16", 0)]
)
def test_a_rule_may_match_by_device_and_type(device: str, dtype: str, count: int, tmp_path: Path) -> None:
    text = "- match: {class: Experts, device: cpu, dtype: float32}\n  replace: {op: Other}\n  optional: true"
    assert len(make_plan(TREE, _rules(tmp_path, text), device, dtype).replacements) == count


def test_a_rule_matches_by_the_device_of_the_module_above(tmp_path: Path) -> None:
    text = """
- match: {name: '^layers\\.[01]$'}
  replace: {op: default, device: cpu}
- match: {class: Experts, device: cpu}
  replace: {op: Other}
"""
    assert len(_plan(tmp_path, text, device="cuda").replacements) == 2


def test_an_optional_rule_may_have_no_effect(tmp_path: Path) -> None:
    assert not _plan(tmp_path, "- match: {name: attention}\n  replace: {op: Other}\n  optional: true").replacements


def test_nothing_below_a_replaced_module_is_replaced(tmp_path: Path) -> None:
    plan = _plan(tmp_path, "- match: {name: 'mlp'}\n  replace: {op: Other}")
    assert [item.name for item in plan.replacements] == [f"layers.{i}.mlp" for i in range(12)]


def test_recursive_false_closes_a_module(tmp_path: Path) -> None:
    text = """
- match: {name: '^layers\\.[0-4]$'}
  replace: {op: default}
  recursive: RECURSIVE
- match: {class: Experts}
  replace: {op: CpuExperts}
"""
    assert len(_plan(tmp_path, text.replace("RECURSIVE", "false")).replacements) == 7
    assert len(_plan(tmp_path, text.replace("RECURSIVE", "true")).replacements) == 12


def test_devices_are_inherited(tmp_path: Path) -> None:
    plan = _plan(
        tmp_path,
        """
- match: {name: '^layers\\.0$'}
  replace: {op: default, device: 'cuda:1'}
- match: {name: '^layers\\.0\\.mlp\\.experts$'}
  replace: {op: CpuExperts, device: cpu}
""",
        device="cuda",
    )
    assert plan.device_of("layers.0.self_attn.q_proj.weight") == "cuda:1"
    assert plan.device_of("layers.0.mlp.experts") == "cpu"
    assert plan.device_of("layers.1.mlp") == plan.device_of("norm.weight") == "cuda"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- match: {name: attention}\n  replace: {op: Other}", "it matches no module"),
        (
            "- match: {class: Experts}\n  replace: {op: CpuExperts}\n"
            "- match: {name: '7.mlp.experts'}\n  replace: {op: Other}",
            "earlier rules match all its modules",
        ),
    ],
)
def test_a_rule_without_effect_is_an_error(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(RuleError, match=rf"rules.yaml:\d: this rule has no effect: {words}"):
        _plan(tmp_path, text)


def test_the_default_rules_replace_the_whole_model(tiny: Path) -> None:
    rules = load_rules(DEFAULT_RULES, WHOLE)
    assert [rule.op for rule in rules] == ["CpuDecoder", "GpuDecoder", "LatentAttention", "CpuExperts", "CpuLinear"]
    assert type(load_model(str(tiny)).module).__name__ == "CpuDecoder"

    def planned(class_name: str, device: str, dtype: str) -> list[tuple[str, str]]:
        tree = [("", class_name), ("lm_head", "Linear"), ("model.layers.0.mlp.experts", "Experts")]
        return [(item.name, item.op) for item in make_plan(tree, rules, device, dtype).replacements]

    on_cpu = ("model.layers.0.mlp.experts", "CpuExperts")
    assert planned("Qwen3MoeForCausalLM", "cpu", "float32") == [("", "CpuDecoder")]
    assert planned("Gemma3nForCausalLM", "cpu", "float32") == [("lm_head", "CpuLinear"), on_cpu]
    assert planned("Qwen3MoeForCausalLM", "cpu", "bfloat16") == [on_cpu]
    assert planned("Qwen3MoeForCausalLM", "cuda", "float32") == [("", "GpuDecoder")]
    assert planned("Qwen3MoeForCausalLM", "cuda:1", "bfloat16") == [("", "GpuDecoder")]
    assert planned("Gemma3nForCausalLM", "cuda", "bfloat16") == [on_cpu]


def test_the_other_shipped_files_change_the_default() -> None:
    default, exact, quantised, both, modules = (
        load_rules(SHIPPED_RULES / f"{name}.yaml", WHOLE)
        for name in ("default", "exact", "quantised", "both", "modules")
    )
    assert [rule.op for rule in exact] == [rule.op for rule in quantised] == [rule.op for rule in default]
    assert all(rule.options == {"activations": "float32"} for rule in exact)
    assert {rule.op: rule.options for rule in quantised if rule.options} == {"GpuDecoder": {"dense": "quantised"}}
    assert {rule.op: rule.options for rule in both if rule.options} == {"GpuDecoder": {"dense": "both"}}
    assert modules == default[2:]


def test_default_rules_replace_the_classes_that_operators_support(tmp_path: Path) -> None:
    rules = {rule.op: rule for rule in load_rules(DEFAULT_RULES, WHOLE)}
    for op, classes in SUPPORTED.items():
        pattern = rules[op].class_name
        assert pattern is not None and all(pattern.search(name) for name in classes)
        assert not any(pattern.search(name) for name in ("supported", f"{classes[0]}2", f"X{classes[0]}", "Linear"))
    path = tmp_path / "rules.yaml"
    path.write_text("- match: {class: supported}\n  replace: {op: CpuLinear}")
    limit = "CpuDecoder, GpuDecoder, LatentAttention"
    with pytest.raises(RuleError, match=rf"rules.yaml:1: class: supported needs an op that lists classes: {limit}"):
        load_rules(path, WHOLE)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "- match: {name: 'experts$'}\n  replace: {op: CpuExperts, speed: fast}",
            "model.layers.0.mlp.experts: .*'speed'",
        ),
        ("- match: {name: 'norm$'}\n  replace: {op: CpuExperts}", "cannot be replaced by CpuExperts"),
    ],
)
def test_errors_of_operators_name_the_rule(text: str, words: str, tiny: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(text)
    with pytest.raises(RuleError, match=rf"rules.yaml:1: .*{words}"):
        load_model(str(tiny), rules=str(rules))


def test_a_rule_may_replace_the_experts_of_one_layer_only(tiny: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("- match: {name: '^model.layers.0.mlp.experts$'}\n  replace: {op: CpuExperts}")
    module = load_model(str(tiny), rules=str(rules)).module
    kinds = [type(module.get_submodule(f"model.layers.{i}.mlp.experts")).__name__ for i in range(2)]
    assert kinds == ["CpuExperts", "Qwen3MoeExperts"]
    assert isinstance(module, nn.Module)


def test_aliases_may_not_stand_for_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    lines = ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12))]
    path.write_text("- match: {name: x}\n  replace: {class: 'a.b:C'}\n  recursive:\n    " + "\n    ".join(lines) + "\n")
    with pytest.raises(RuleError, match=r"rules\.yaml:1: its aliases stand for \d+ values; at most 100000"):
        load_rules(path, [])
