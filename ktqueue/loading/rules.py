"""Reads rule files, which say what modules of a model are replaced by what operators.

The language is documented in rules/README.md. Every error begins with file:line. Knows no model.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ktqueue.core.errors import RuleError
from ktqueue.core.short_repr import short_repr
from ktqueue.families.table import SUPPORTED
from ktqueue.loading.ktransformers import KTransformersRule, Placement, has_ktransformers_form, read_placement

KEEP = "default"  # the op that leaves a module as it is
SUPPORTED_CLASSES = "supported"  # instead of a pattern of class names
SHIPPED_RULES = Path(__file__).parents[1] / "rules"
DEFAULT_RULES = SHIPPED_RULES / "default.yaml"
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
_DTYPES = ("float32", "bfloat16", "float16")
_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_MAX_REFUSALS = 20  # named in one error
_MOST_VALUES = 100_000  # of a rule file; each alias of an alias can multiply them
_TAGS = ("str", "bool", "int", "float", "null", "seq", "map")


CheckOperator = Callable[[str, Mapping[str, Any]], None]
"""(op, options): raises ValueError if there is no such operator, or if it does not take the options."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a file.

    `name` is searched in a module's dotted path and `class_name` in its class name. `on_device` ("cpu" or "cuda") and
    `dtype` say where and in what type the module would compute. All conditions that are not None must match. `op` is a
    short name or `package.module:Class`. `device` is the new device; None means the model's. `options` are passed to
    the operator. An `optional` rule may have no effect. `source` is file:line. `gpu_source` is the file:line that
    wants the whole model on a GPU, or None.
    """

    name: re.Pattern[str] | None
    class_name: re.Pattern[str] | None
    on_device: str | None
    dtype: str | None
    op: str
    device: str | None
    options: dict[str, Any]
    recursive: bool
    optional: bool
    source: str
    gpu_source: str | None = None

    def matches(self, name: str, class_name: str, device: str, dtype: str) -> bool:
        """Whether the rule applies to a module with that name and class that would compute in `dtype` on `device`."""
        return (
            (self.name is None or self.name.search(name) is not None)
            and (self.class_name is None or self.class_name.search(class_name) is not None)
            and self.on_device in (None, device.partition(":")[0])
            and self.dtype in (None, dtype)
        )


def rules_file(rules: str | None) -> Path:
    """Return the rule file that a setting names: a shipped one by its name alone (`exact`), or a path.

    None is the default. Raises RuleError, which lists the shipped names, if there is no such file.
    """
    if rules is None:
        return DEFAULT_RULES
    shipped = _shipped_files()
    if rules in shipped:
        return shipped[rules]
    if Path(rules).is_file():
        return Path(rules)
    close = difflib.get_close_matches(Path(rules).stem, shipped, n=1, cutoff=0.6)
    hint = f"did you mean --rules {close[0]}? " if close else ""
    raise RuleError(
        f"{rules}: there is no such rule file; {hint}known by name: {', '.join(shipped)}; or give the path of a file",
        param="engine.rules",
        limit=", ".join(shipped),
        value=rules,
    )


def load_rules(path: str | Path, operators: Iterable[str], check: CheckOperator | None = None) -> list[Rule]:
    """Return the rules of a file in their order, including those of the file that it is based on.

    `operators` are the names that `op` may have besides `default`. `check` is called for each rule with an operator;
    without it no class is imported. Raises RuleError with file:line.
    """
    return _RuleReader(Path(path), sorted({KEEP, *operators}), (), check).rules()


def ktransformers_placement(path: str | Path) -> Placement | None:
    """Return the meaning of a rule file in KTransformers' form, or None for a file in ours. Raises RuleError."""
    return _RuleReader(Path(path), [], (), None).placement()


def _shipped_files() -> dict[str, Path]:
    return {path.stem: path for path in sorted(SHIPPED_RULES.glob("*.yaml"))}


@lru_cache(maxsize=8)  # a load reads its file and its base more than once, and nobody changes the nodes
def _composed(text: str) -> yaml.Node | None:
    found: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    return found


def _written_out(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Return how many values a node has with all aliases written out. `sizes`: of the nodes that were seen, by id."""
    if id(node) not in sizes:
        sizes[id(node)] = 1  # of an alias inside of what it stands for, which is refused later
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        nodes = [part for pair in parts for part in (pair if isinstance(pair, tuple) else (pair,))]
        sizes[id(node)] = 1 + sum(_written_out(part, sizes) for part in nodes)
    return sizes[id(node)]


class _RuleReader:
    """Reads one rule file. `derived` are the files that are based on it."""

    def __init__(
        self, path: Path, operators: list[str], derived: tuple[Path, ...], check: CheckOperator | None
    ) -> None:
        self._check = check
        self._path = path
        self._operators = operators
        self._derived = derived

    def rules(self) -> list[Rule]:
        """Return all rules. Raises RuleError with file:line."""
        root = self._root()
        if isinstance(root, yaml.MappingNode):
            return self._derived_rules(root)
        if not isinstance(root, yaml.SequenceNode) or not root.value:
            raise RuleError(f"{self._path}:1: expected a list of rules, or a mapping with the key base")
        if (placement := self.placement()) is not None:
            return self._placed(placement)
        return [self._rule(node) for node in root.value]

    def placement(self) -> Placement | None:
        """Return the meaning of a file in KTransformers' form; None for a file in ours. Raises RuleError."""
        root = self._root()
        if not isinstance(root, yaml.SequenceNode):
            return None
        classes = [
            value.value
            for rule in root.value
            if isinstance(rule, yaml.MappingNode)
            for key, part in rule.value
            if key.value == "replace" and isinstance(part, yaml.MappingNode)
            for name, value in part.value
            if name.value == "class"
        ]
        if not has_ktransformers_form(classes):
            return None
        return read_placement([self._ktransformers_rule(node) for node in root.value])

    def _ktransformers_rule(self, node: yaml.Node) -> KTransformersRule:
        fields: dict[str, tuple[int, Any]] = {}

        def add(prefix: str, nodes: dict[str, yaml.Node], groups: tuple[str, ...]) -> None:
            for key, value in nodes.items():
                if key in groups:
                    add(f"{key}.", self._fields(value, key, None), ("kwargs",))
                else:
                    fields[prefix + key] = (value.start_mark.line + 1, self._value(value, key))

        add("", self._fields(node, "a rule", None), ("match", "replace"))
        if "replace.class" not in fields:
            self._fail(node, "a rule of KTransformers needs class in replace")
        return KTransformersRule(node.start_mark.line + 1, fields)

    def _placed(self, placement: Placement) -> list[Rule]:
        """Return the shipped rules that have the effect of KTransformers' file. Raises RuleError for all its lines."""
        if placement.refusals:
            lines = [f"{self._path}:{line}: {why}" for line, why in placement.refusals]
            if more := lines[_MAX_REFUSALS:]:
                lines[_MAX_REFUSALS:] = [f"{self._path}: and {len(more)} more lines"]
            raise RuleError("\n".join(lines))
        name = "quantised" if placement.dense == "quantised" else "default"
        shipped = _RuleReader(_shipped_files()[name], self._operators, self._derived, self._check).rules()
        gpu_source = f"{self._path}:1" if placement.on_gpu else None
        return [replace(rule, gpu_source=gpu_source, source=f"{self._path}:1, by {rule.source}") for rule in shipped]

    def _root(self) -> yaml.Node | None:
        try:
            text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RuleError(f"{self._path}:1: {getattr(error, 'strerror', None) or error}") from error
        try:
            root = _composed(text)
            if root is not None and (size := _written_out(root, {})) > _MOST_VALUES:
                raise RuleError(f"{self._path}:1: its aliases stand for {size} values; at most {_MOST_VALUES}")
            return root
        except (yaml.YAMLError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None)
            line = mark.line + 1 if mark else 1
            raise RuleError(f"{self._path}:{line}: not YAML: {getattr(error, 'problem', None) or error}") from error

    def _derived_rules(self, root: yaml.MappingNode) -> list[Rule]:
        """Return this file's own rules, followed by those of its base, changed as `without` and `options` say."""
        fields = self._fields(root, "a rule file", ("base", "without", "options", "rules"))
        if "base" not in fields:
            self._fail(root, "a rule file that is not a list of rules needs base")
        base_rules = self._base_rules(fields["base"])
        for node in self._items(fields["without"], "without") if "without" in fields else ():
            op = self._base_op(node, base_rules)
            base_rules = [rule for rule in base_rules if rule.op != op]
        for node, op_options in self._pairs(fields["options"], "options") if "options" in fields else ():
            op = self._base_op(node, base_rules)
            values = {key: self._value(value, key) for key, value in self._fields(op_options, op, None).items()}
            where = f"{self._path}:{node.start_mark.line + 1}"
            base_rules = [
                replace(rule, options=rule.options | values, source=f"{rule.source}, with options of {where}")
                if rule.op == op
                else rule
                for rule in base_rules
            ]
        first = [self._rule(node) for node in self._items(fields["rules"], "rules")] if "rules" in fields else []
        if not first and not base_rules:
            self._fail(root, "there is no rule left")
        return [*first, *base_rules]

    def _base_rules(self, node: yaml.Node) -> list[Rule]:
        name = self._text(node, "base", None)
        shipped = _shipped_files()
        path = shipped.get(name, self._path.parent / name)
        if not path.is_file():
            self._fail(node, f"there is no rule file {name!r}; known by name: {', '.join(shipped)}; or give a path")
        if path.resolve() in (derived := (self._path.resolve(), *self._derived)):
            self._fail(node, f"{name} is based on this file, or is this file")
        return _RuleReader(path, self._operators, derived, self._check).rules()

    def _base_op(self, node: yaml.Node, base_rules: list[Rule]) -> str:
        """Return the operator that `node` names. A rule of the base must use it."""
        op = self._text(node, "operator", None)
        if not _CLASS.fullmatch(op):
            op = self._text(node, "operator", [name for name in self._operators if name != KEEP])
        if all(rule.op != op for rule in base_rules):
            self._fail(node, f"no rule of the base uses {op}")
        return op

    def _rule(self, node: yaml.Node) -> Rule:
        fields = self._fields(node, "a rule", ("match", "replace", "recursive", "optional"))
        for key in ("match", "replace"):
            if key not in fields:
                self._fail(node, f"a rule needs {key}")
        match = self._fields(fields["match"], "match", ("name", "class", "device", "dtype"))
        if "name" not in match and "class" not in match:
            self._fail(fields["match"], "match needs name or class, or both")
        op, device, options = self._replacement(fields["replace"])
        return Rule(
            name=self._pattern(match["name"], "name") if "name" in match else None,
            class_name=self._class_pattern(match["class"], op) if "class" in match else None,
            on_device=self._text(match["device"], "device", ["cpu", "cuda"]) if "device" in match else None,
            dtype=self._text(match["dtype"], "dtype", [*_DTYPES]) if "dtype" in match else None,
            op=op,
            device=device,
            options=options,
            recursive=self._flag(fields["recursive"], "recursive") if "recursive" in fields else True,
            optional=self._flag(fields["optional"], "optional") if "optional" in fields else False,
            source=f"{self._path}:{node.start_mark.line + 1}",
        )

    def _class_pattern(self, node: yaml.Node, op: str) -> re.Pattern[str]:
        """Return the pattern of class names. The word `supported` stands for those that the operator lists."""
        if self._value(node, "class") != SUPPORTED_CLASSES:
            return self._pattern(node, "class")
        if op not in SUPPORTED:
            self._fail(node, f"class: {SUPPORTED_CLASSES} needs an op that lists classes: {', '.join(SUPPORTED)}")
        return re.compile(f"^({'|'.join(SUPPORTED[op])})$")

    def _replacement(self, node: yaml.Node) -> tuple[str, str | None, dict[str, Any]]:
        """Return operator, device and options of the mapping `replace`."""
        replacement = self._fields(node, "replace", None)
        if "class" in replacement:
            replacement = self._fields(node, "replace", ("class", "device", "kwargs"))
            op = self._text(op_node := replacement.pop("class"), "class", None)
            if not _CLASS.fullmatch(op):
                self._fail(op_node, f"class must be package.module:Class, got {op!r}")
            given = self._fields(replacement["kwargs"], "kwargs", None) if "kwargs" in replacement else {}
        elif "op" in replacement:
            op = self._text(op_node := replacement.pop("op"), "op", self._operators)
            given = {key: value for key, value in replacement.items() if key != "device"}
        else:
            self._fail(node, "replace needs op or class")
        device = None
        if "device" in replacement:
            device = self._text(replacement["device"], "device", None)
            if not _DEVICE.fullmatch(device):
                self._fail(replacement["device"], f"device must be cpu, cuda or cuda:N, got {device!r}")
        if op == KEEP and given:
            self._fail(next(iter(given.values())), f"op {KEEP} has no option {next(iter(given))!r}")
        options = {key: self._value(value, key) for key, value in given.items()}
        if op != KEEP and self._check is not None:
            try:
                self._check(op, options)
            except ValueError as error:
                self._fail(op_node, str(error))
        return op, device, options

    def _fields(self, node: yaml.Node, what: str, known: tuple[str, ...] | None) -> dict[str, yaml.Node]:
        fields: dict[str, yaml.Node] = {}
        for key_node, value in self._pairs(node, what):
            key = self._text(key_node, f"a key of {what}", list(known) if known else None)
            if key in fields:
                self._fail(key_node, f"{key!r} appears twice")
            fields[key] = value
        return fields

    def _pairs(self, node: yaml.Node, what: str) -> list[tuple[yaml.Node, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode) or node.tag != "tag:yaml.org,2002:map":
            self._fail(node, f"{what} must be a mapping")
        pairs: list[tuple[yaml.Node, yaml.Node]] = node.value
        return pairs

    def _items(self, node: yaml.Node, what: str) -> list[yaml.Node]:
        if not isinstance(node, yaml.SequenceNode) or node.tag != "tag:yaml.org,2002:seq":
            self._fail(node, f"{what} must be a list")
        items: list[yaml.Node] = node.value
        return items

    def _text(self, node: yaml.Node, what: str, known: list[str] | None) -> str:
        value = self._value(node, what)
        if not isinstance(value, str):
            self._fail(node, f"{what} must be a text, got {short_repr(value)}")
        if known is not None and value not in known:
            close = difflib.get_close_matches(value, known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}? " if close else ""
            self._fail(node, f"unknown {what.removeprefix('a ')} {value!r}; {hint}known: {', '.join(known)}")
        return value

    def _flag(self, node: yaml.Node, what: str) -> bool:
        value = self._value(node, what)
        if not isinstance(value, bool):
            self._fail(node, f"{what} must be true or false, got {short_repr(value)}")
        return value

    def _pattern(self, node: yaml.Node, what: str) -> re.Pattern[str]:
        text = self._text(node, what, None)
        try:
            return re.compile(text)
        except (re.error, RecursionError, OverflowError) as error:
            self._fail(node, f"{what} is not a regular expression: {error}")

    def _value(self, node: yaml.Node, what: str) -> Any:
        if node.tag not in {f"tag:yaml.org,2002:{tag}" for tag in _TAGS}:
            self._fail(node, f"{what} has the type {node.tag}, which rules do not use")
        try:
            return yaml.SafeLoader("").construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            self._fail(node, f"{what}: {error}")

    def _fail(self, node: yaml.Node, message: str) -> NoReturn:
        raise RuleError(f"{self._path}:{node.start_mark.line + 1}: {message}")
