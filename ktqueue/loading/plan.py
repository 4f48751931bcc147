"""Makes the plan of a model from its module tree and the rules: pure functions over names and class names."""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ktqueue.core.errors import RuleError
from ktqueue.loading.rules import KEEP, Rule


@dataclass(frozen=True, slots=True)
class Replacement:
    """One module and the operator that replaces it. `source` is the file:line of the rule."""

    name: str
    class_name: str
    op: str
    options: dict[str, Any]
    source: str


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What is replaced, and where modules live.

    `replacements` are in tree order. `devices` maps a module name to the device of it and of all modules below it.
    """

    replacements: list[Replacement]
    devices: dict[str, str]

    def device_of(self, name: str) -> str:
        """Return the device of a module or parameter: that of the nearest module above it that has one."""
        while name not in self.devices:
            name = name.rpartition(".")[0]
        return self.devices[name]


def make_plan(
    modules: Iterable[tuple[str, str]], rules: Sequence[Rule], device: str, dtype: str = "float32"
) -> LoadPlan:
    """Apply the rules to a module tree. For each module the first matching rule decides.

    `modules` are pairs of dotted name and class name, parents before children; the root has the name "". `device` and
    `dtype` are those of the model. Modules below a replaced module, or below one kept with `recursive: false`, are not
    visited. Raises RuleError with file:line for a rule that never decides and is not optional, and for rules that want
    a GPU if the model is on the CPU.
    """
    if device == "cpu" and (source := next((rule.gpu_source for rule in rules if rule.gpu_source), None)):
        raise RuleError(f"{source}: these rules put the model on a GPU: start with --device cuda, or use other rules")
    plan = LoadPlan([], {"": device})
    closed_modules: set[str] = set()
    used: set[int] = set()
    matched: set[int] = set()
    for name, class_name in modules:
        if is_below(name, closed_modules):
            continue
        module_device = plan.device_of(name)
        matching = [i for i, rule in enumerate(rules) if rule.matches(name, class_name, module_device, dtype)]
        matched.update(matching)
        if not matching:
            continue
        rule = rules[matching[0]]
        used.add(matching[0])
        if rule.device is not None:
            plan.devices[name] = rule.device
        if rule.op != KEEP:
            plan.replacements.append(Replacement(name, class_name, rule.op, rule.options, rule.source))
        if rule.op != KEEP or not rule.recursive:
            closed_modules.add(name)
    for i, rule in enumerate(rules):
        if i not in used and not rule.optional:
            why = "earlier rules match all its modules" if i in matched else "it matches no module"
            raise RuleError(f"{rule.source}: this rule has no effect: {why}")
    return plan


def find_replaced(name: str, replaced: Container[str]) -> str | None:
    """Return the name in `replaced` that is `name` or a module above it; None if there is none."""
    while name not in replaced:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name


def is_below(name: str, modules: Container[str]) -> bool:
    """Whether one of `modules` is above the module or parameter `name`."""
    while name:
        name = name.rpartition(".")[0]
        if name in modules:
            return True
    return False
