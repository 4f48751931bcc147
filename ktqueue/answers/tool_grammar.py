"""Grammars of tool calls in the format of each family, and grammars that follow reasoning. In llguidance's Lark.

A marker may be a special token or plain text, which only the model's vocabulary says. The grammars have plain text, in
lines that begin with `mark_`, `upto_` or `text_`. The worker replaces these by special tokens: see
`with_special_tokens`.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ktqueue.answers.call_styles import STYLES, CallStyle
from ktqueue.answers.families import HARMONY, HARMONY_START, REASONING, TOOLS
from ktqueue.answers.grammar import regex_terminal

JsonLark = Callable[[Mapping[str, Any], str], str]
"""From the schema of a value and the name of its function to a grammar `start: %json {...}`."""

_TOOLS_INSIDE = "// Answers and tool calls."  # the first line of all grammars that are made here
_FINAL = "<|channel|>final<|message|>"
_LINE = re.compile(r'^(?P<rule>(?:mark|upto|text)_\d+)(?P<lazy>\[lazy\])?: .*?// (?P<marker>".*")$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called. `parameters` is the schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]


_LIMITS = frozenset({"minLength", "maxLength", "pattern"})  # keywords that limit a text
# Markers inside a call that may be special tokens, besides those in TOOLS.
_INNER_MARKS = (
    "<｜tool▁sep｜>", "<|tool_call_argument_begin|>", "[ARGS]", "<|channel|>", "<|constrain|>", "<|message|>",
    "<|start|>", "<|end|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<|tool_call:end|>", "<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>",
)  # fmt: skip


def tool_grammar(
    functions: Sequence[Function], tool_parser: str, json_lark: JsonLark, *, forced: bool, several: bool,
    answer: str | None = None,
) -> str | None:  # fmt: skip
    """The grammar of an answer that may call functions. None if the format cannot be forced.

    `forced`: the answer must be a call. Else it is text, or matches the grammar `answer`, or calls functions after a
    text. `several`: whether there may be more than one call.
    """
    style = STYLES.get(tool_parser)
    if style is None or not functions:
        return None
    writer = _Writer(tool_parser)
    first = _first_marker(style, tool_parser)
    arguments = [writer.arguments(number, function, style, json_lark) for number, function in enumerate(functions)]

    def call(start: str) -> str:
        """The expression for one call that begins with `start`."""
        alternatives = (
            f"{writer.text(start)} {_name(function, style)} {writer.text(style.middle)} {rule} {writer.text(style.end)}"
            for function, rule in zip(functions, arguments, strict=True)
        )
        return " | ".join(alternatives)

    writer.rules.append(f"call: {call(style.start)}")
    more = f"({writer.text(style.separator)} call)*" if several and style.many else ""
    closing = f"{more} {writer.text(style.closing)}"
    calls = f"{writer.text(style.opening)} call {closing}"
    if forced:
        writer.rules.append(f"start: {calls}")
    elif answer is not None or tool_parser == HARMONY:
        head = writer.text(_FINAL) if tool_parser == HARMONY else ""
        text = "/(?s:.*)/" if answer is None else _nested(answer)
        writer.rules += [f"start: {calls} | {head} other", f"other: {text}"]
    elif not first:  # the call is bare JSON
        writer.rules += [f"start: {calls} | OTHER", r"OTHER: /[^{\[\s](?s:.*)/"]
    else:  # a text may come first, up to the first marker
        if style.opening:
            after = f"{writer.text(style.opening.removeprefix(first))} call"
        else:
            writer.rules.append(f"first_call: {call(style.start.removeprefix(first))}")
            after = "first_call"
        writer.rules += [
            f"start: OTHER | {writer.upto(first)} {after} {closing}",
            f"OTHER: /(?s:.*)/ & ~/(?s:.*){_pattern(first)}(?s:.*)/",
        ]
    return "\n".join([_TOOLS_INSIDE, *writer.rules, ""])


def after_reasoning(grammar: str, reasoning_parser: str, opening: str) -> str:
    """The grammar of an answer that may begin with reasoning, and then matches `grammar`.

    `opening`: the beginning of the answer that the prompt already contains. If the prompt ends inside reasoning, there
    is some; if it contains the end of it, there is none.
    """
    form = REASONING.get(reasoning_parser)
    if form is None:
        return grammar
    is_open = opening.rfind(form.start) > opening.rfind(form.end)
    if opening and not is_open:
        return grammar
    writer = _Writer("")
    if reasoning_parser == HARMONY:
        head = writer.text(form.start) if not is_open else ""
        again = writer.text(HARMONY_START)
        final = "" if grammar.startswith(_TOOLS_INSIDE) else writer.text(_FINAL)
        writer.rules.append(f"start: ({head} {writer.upto(form.end)} {again})? {final} answer")
    else:
        reasoning = f"{writer.upto(form.end)} /\\s{{0,4}}/"
        writer.rules.append(
            f"start: {reasoning} answer" if is_open else f"start: ({writer.text(form.start)} {reasoning})? answer"
        )
    writer.rules.append(f"answer: {_nested(grammar)}")
    return "\n".join([*writer.rules, ""])


def with_special_tokens(grammar: str, special_tokens: Mapping[str, int]) -> str:
    """The grammar with special tokens for markers that are special. `special_tokens`: ids by text."""

    def line(match: re.Match[str]) -> str:
        marker = json.loads(match["marker"])
        if marker not in special_tokens:
            return match[0]
        text = "/(?s:.*)/ " if match["lazy"] else ""
        if match["rule"].startswith("text"):
            text = match["rule"].upper() + " "
        return f"{match['rule']}: {text}<[{special_tokens[marker]}]>"

    return _LINE.sub(line, grammar)


class _Writer:
    """Collects the rules of a grammar, with one rule for each marker."""

    def __init__(self, tool_parser: str) -> None:
        form = TOOLS.get(tool_parser)
        own = (*form.starts, *form.sections, *form.ends) if form else ()
        reasoning = [mark for entry in REASONING.values() for mark in (entry.start, entry.end)]
        marks = [mark for mark in (*own, *_INNER_MARKS, *reasoning) if len(mark) > 3 and mark.count("|>") < 2]
        self._marks = re.compile("|".join(map(re.escape, sorted(set(marks), key=len, reverse=True))))
        self._numbers: dict[str, int] = {}
        self.rules: list[str] = []

    def text(self, text: str) -> str:
        """The expression for a text, in which markers are rules of their own."""
        return " ".join(self._pieces(text))

    def _pieces(self, text: str) -> Iterator[str]:
        place = 0
        for match in self._marks.finditer(text):
            yield from self._plain(text[place : match.start()])
            yield self._mark(match[0])
            place = match.end()
        yield from self._plain(text[place:])

    def _plain(self, text: str) -> Iterator[str]:
        before, number, after = text.partition("\0")
        if before:
            yield _quoted(before)
        if number:
            yield "/[0-9]{1,3}/"
        if after:
            yield _quoted(after)

    def _mark(self, marker: str) -> str:
        if marker not in self._numbers:
            self._numbers[marker] = len(self._numbers)
            self.rules.append(f"mark_{self._numbers[marker]}: {_quoted(marker)} // {_quoted(marker)}")
        return f"mark_{self._numbers[marker]}"

    def upto(self, marker: str) -> str:
        """The expression for any text up to the first `marker`, and the marker."""
        name = f"upto_{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: /(?s:.*){_pattern(marker)}/ // {_quoted(marker)}")
        return name

    def arguments(self, number: int, function: Function, style: CallStyle, json_lark: JsonLark) -> str:
        """The expression for the arguments of the function with this number."""
        if style.parameter:
            return self._parameters(number, function, style, json_lark)
        self.rules.append(f"arguments_{number}: {_json_rule(json_lark(_closed(function.parameters), function.name))}")
        return f"arguments_{number}"

    def _parameters(self, number: int, function: Function, style: CallStyle, json_lark: JsonLark) -> str:
        schema = function.parameters
        definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        required = schema.get("required") or ()
        names = []
        for place, (key, inner) in enumerate((schema.get("properties") or {}).items()):
            rule = f"parameter_{number}_{place}"
            texts = _texts(inner)
            if texts is None and not _is_text(inner):
                value_schema = {**inner, **definitions} if isinstance(inner, dict) else {}
                value, mark = f"value_{number}_{place}", style.json_mark
                self.rules.append(f"{value}: {_json_rule(json_lark(value_schema, function.name))}")
                value = f"{value} {self.text(style.parameter_end)}"
            elif texts is not None:
                value = f"({' | '.join(map(_quoted, texts))}) {self.text(style.parameter_end)}"
                mark = style.string_mark
            elif inner.keys() & _LIMITS:
                value, mark = self._limited_text(inner, style.parameter_end), style.string_mark
            else:
                value, mark = self._text_up_to(style.parameter_end), style.string_mark
            self.rules.append(f"{rule}: {self.text(style.parameter + key + mark + style.parameter_middle)} {value}")
            names.append(rule if key in required else f"{rule}?")
        return " ".join(names)

    def _limited_text(self, schema: Mapping[str, Any], end: str) -> str:
        """The expression for a text with a length or a pattern, and the end of the parameter.

        Text and marker are one terminal, since the lexer is greedy: it would take the beginning of the marker as text.
        """
        most = schema.get("maxLength")
        limits = [f"/(?s:.{{{schema.get('minLength', 0)},{'' if most is None else most}}})/"]
        if "pattern" in schema:
            limits.append(regex_terminal(_whole(schema["pattern"])))
        match = self._marks.search(end)
        marker, rest = (end, "") if match is None else (match[0], self.text(end[match.end() :]))
        rule = f"text_{len(self.rules)}"
        text = rule.upper()
        self.rules += [
            f"{text}: {' & '.join([*limits, f'~/(?s:.*){_pattern(marker.strip())}(?s:.*)/'])}",
            f"{text}_END: {text} {_quoted(marker)}",
            f"{rule}: {text}_END // {_quoted(marker)}",
        ]
        return f"{rule} {rest}"

    def _text_up_to(self, end: str) -> str:
        match = self._marks.search(end)
        if match is None:
            return self.upto(end)
        rest = self.text(end[match.end() :])
        return f"{self.upto(match[0])} {rest}"


def _name(function: Function, style: CallStyle) -> str:
    return _quoted(json.dumps(function.name)[1:-1] if style.start.endswith('name": "') else function.name)


def _json_rule(lark: str) -> str:
    return lark.removeprefix("start: ")


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of arguments, an object, without properties that it does not name."""
    closed = {"type": "object", **schema}
    if "additionalProperties" not in closed and not ({"$ref", "anyOf", "allOf", "oneOf"} & set(closed)):
        closed["additionalProperties"] = False
    return closed


def _texts(schema: Any) -> list[str] | None:
    """The texts that a parameter may be, if its schema lists them."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if values and all(isinstance(value, str) and value for value in values) else None


def _is_text(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "string"


def _whole(pattern: str) -> str:
    """A pattern for the whole text, from one of JSON Schema, which may match anywhere unless it has anchors."""
    begin = "" if pattern.startswith("^") else "(?s:.*)"
    end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
    return f"{begin}(?:{pattern[not begin : len(pattern) - (not end)]}){end}"


def _first_marker(style: CallStyle, tool_parser: str) -> str:
    """The marker with which every list of calls begins; empty if there is none."""
    form = TOOLS[tool_parser]
    written = style.opening + style.start
    return max((mark for mark in (*form.sections, *form.starts) if written.startswith(mark)), key=len, default="")


def _nested(grammar: str) -> str:
    return f"%lark {{\n{grammar}\n}}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _pattern(text: str) -> str:
    return re.sub(r"([\\/.+*?()|\[\]{}^$#&~-])", r"\\\1", text)
