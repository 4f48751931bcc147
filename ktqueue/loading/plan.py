"""(module tree, rules) -> what is replaced by what. A pure function: names and class names in, a plan out."""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ktqueue.core.errors import RuleError
from ktqueue.loading.rules import KEEP, Rule


@dataclass(frozen=True, slots=True)
class Replacement:
    """One module and the operator that takes its place. `source`: file:line of the rule."""

    name: str
    class_name: str
    op: str
    options: dict[str, Any]
    source: str


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """`replacements` in tree order; `devices`: module name to device, for it and all below it."""

    replacements: list[Replacement]
    devices: dict[str, str]

    def device_of(self, name: str) -> str:
        """The device of a module or parameter: that of the nearest module above it that has one."""
        while name not in self.devices:
            name = name.rpartition(".")[0]
        return self.devices[name]


def make_plan(
    modules: Iterable[tuple[str, str]], rules: Sequence[Rule], device: str, dtype: str = "float32"
) -> LoadPlan:
    """`modules`: (dotted name, class name), parents before children, the root under "". First matching rule wins.

    `device` and `dtype` are the model's. Below a replaced module nothing is looked at; below a module kept with
    `recursive: false` nothing either.
    Raises RuleError with file:line for a rule that decides nothing and is not optional.
    """
    plan = LoadPlan([], {"": device})
    closed: set[str] = set()
    used: set[int] = set()
    matched: set[int] = set()
    for name, class_name in modules:
        if is_below(name, closed):
            continue
        here = plan.device_of(name)
        hits = [i for i, rule in enumerate(rules) if rule.matches(name, class_name, here, dtype)]
        matched.update(hits)
        if not hits:
            continue
        rule = rules[hits[0]]
        used.add(hits[0])
        if rule.device is not None:
            plan.devices[name] = rule.device
        if rule.op != KEEP:
            plan.replacements.append(Replacement(name, class_name, rule.op, rule.options, rule.source))
        if rule.op != KEEP or not rule.recursive:
            closed.add(name)
    for i, rule in enumerate(rules):
        if i not in used and not rule.optional:
            why = "earlier rules take all modules that it matches" if i in matched else "it matches no module"
            raise RuleError(f"{rule.source}: this rule is idle: {why}")
    return plan


def find_replaced(name: str, replaced: Container[str]) -> str | None:
    """The one of `replaced` that is the module or parameter `name` or above it; None: it stays."""
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
