"""Grammars of tool calls allow exactly what the parser of the same family reads as calls."""

import json
from typing import Any

import pytest

from ktqueue.answers.call_styles import STYLES
from ktqueue.answers.families import REASONING, TOOLS
from ktqueue.answers.grammar import Matcher, byte_compiler
from ktqueue.answers.grammar_errors import GrammarFailed
from ktqueue.answers.parser import make_parser
from ktqueue.answers.parts import AnswerText, AnswerToolCall, joined
from ktqueue.answers.tool_grammar import Function, after_reasoning, tool_grammar, with_special_tokens
from ktqueue.openai.json_schema import lark_of_schema

WEATHER = Function(
    "weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["city", "days", "unit"],
        "additionalProperties": False,
    },
)
TIME = Function("time", {"type": "object", "properties": {}})
TYPES = {"weather": {"city": "string", "unit": "string"}}


def json_lark(schema: Any, name: str) -> str:
    return lark_of_schema(schema, name)


def grammar_for(family: str, *, forced: bool = True, several: bool = False, answer: str | None = None) -> str:
    grammar = tool_grammar([WEATHER, TIME], family, json_lark, forced=forced, several=several, answer=answer)
    assert grammar is not None
    return grammar


def walk(grammar: str, text: str) -> Matcher:
    matcher = byte_compiler().compile(grammar)
    for byte in text.encode():
        matcher.consume(byte)
    return matcher


def matches(grammar: str, text: str) -> bool:
    try:
        return walk(grammar, text).is_accepting
    except GrammarFailed:
        return False


def written(family: str, calls: int = 1) -> str:
    """Calls of `weather` as the family writes them."""
    style = STYLES[family]
    values: dict[str, Any] = {"city": "Köln", "days": 3, "unit": "C"}
    if style.parameter:
        texts = []
        for key, value in values.items():
            mark = style.string_mark if isinstance(value, str) else style.json_mark
            texts.append(f"{style.parameter}{key}{mark}{style.parameter_middle}{value}{style.parameter_end}")
        arguments = "".join(texts)
    else:
        arguments = json.dumps(values, ensure_ascii=False)
    call = f"{style.start}weather{style.middle}{arguments}{style.end}".replace("\0", "0")
    return style.opening + style.separator.join([call] * calls) + style.closing


@pytest.mark.parametrize("family", list(STYLES))
def test_a_forced_call_is_read_as_it_was_written(family: str) -> None:
    text = written(family)
    grammar = grammar_for(family)
    assert matches(grammar, text)
    assert not matches(grammar, "It is sunny.")
    assert not matches(grammar, text.replace("weather", "wether"))
    assert not matches(grammar, text.replace("3", "three"))
    if STYLES[family].many:
        assert not matches(grammar, written(family, 2))
        assert matches(grammar_for(family, several=True), written(family, 2))
    parser = make_parser(family, "", TYPES, "")
    assert parser is not None
    parts = joined([*parser.push(text), *parser.finish()])
    assert [type(part) for part in parts] == [AnswerToolCall]
    call = parts[0]
    assert isinstance(call, AnswerToolCall)
    assert call.name == "weather"
    assert json.loads(call.arguments) == {"city": "Köln", "days": 3, "unit": "C"}


@pytest.mark.parametrize("family", list(STYLES))
def test_a_free_answer_is_text_or_a_call_after_text(family: str) -> None:
    grammar = grammar_for(family, forced=False)
    final = "<|channel|>final<|message|>" if family == "harmony" else ""
    assert matches(grammar, f"{final}It is <sunny> [today].")
    assert matches(grammar, written(family))
    assert not matches(grammar, written(family).replace("3", "three"))
    if not STYLES[family].start.startswith(("{", "<|channel|>")) or STYLES[family].opening:
        assert matches(grammar, f"I look.\n{written(family)}")


@pytest.mark.parametrize("family", list(STYLES))
def test_with_an_answer_format_the_answer_is_a_call_or_has_that_format(family: str) -> None:
    grammar = grammar_for(family, forced=False, answer='start: %json {"type": "integer"}')
    final = "<|channel|>final<|message|>" if family == "harmony" else ""
    assert matches(grammar, f"{final}12")
    assert matches(grammar, written(family))
    assert not matches(grammar, f"{final}twelve")


def test_every_format_of_the_parser_has_a_style() -> None:
    """But for those whose calls are no JSON and have no tags: they can be read, but not forced."""
    assert set(TOOLS) - set(STYLES) == {"functiongemma", "gemma4", "olmo3"}
    assert set(STYLES) <= set(TOOLS)


def test_a_function_without_arguments_has_an_empty_object() -> None:
    assert matches(grammar_for("tool_call"), '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>')
    assert not matches(grammar_for("tool_call"), '<tool_call>\n{"name": "time", "arguments": {"a": 1}}\n</tool_call>')


@pytest.mark.parametrize(
    ("schema", "arguments", "allowed"),
    [
        ({"properties": {"a": {"type": "integer"}}}, '{"a": 1}', True),
        ({"properties": {"a": {"type": "integer"}}}, '{"b": 1}', False),
        ({"additionalProperties": {"type": "integer"}}, '{"b": 1}', True),
        ({"additionalProperties": {"type": "integer"}}, '{"b": "x"}', False),
        ({"anyOf": [{"type": "object", "properties": {"b": {"type": "integer"}}}]}, '{"b": 1}', True),
    ],
)
def test_arguments_have_no_others_than_the_schema_names_or_allows(
    schema: dict[str, Any], arguments: str, allowed: bool
) -> None:
    grammar = tool_grammar([Function("f", schema)], "tool_call", json_lark, forced=True, several=False, answer=None)
    assert grammar is not None
    call = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    assert matches(grammar, call) is allowed


@pytest.mark.parametrize("name", [name for name in REASONING if name != "harmony"])
def test_reasoning_comes_first(name: str) -> None:
    form = REASONING[name]
    inner = 'start: "yes" | "no" /[}{]/'
    grammar = after_reasoning(inner, name, "")
    assert matches(grammar, "yes")
    assert matches(grammar, f"{form.start}\nWell {{\n{form.end}\n\nno}}")
    assert not matches(grammar, f"{form.start}\nWell")
    assert not matches(grammar, "maybe")
    opened = after_reasoning(inner, name, f"{form.start}\n")
    assert matches(opened, f"Well.{form.end}yes")
    assert not matches(opened, "yes")
    assert after_reasoning(inner, name, f"{form.start}\n\n{form.end}\n\n") == inner
    assert after_reasoning(inner, "", "") == inner


def test_harmony_puts_an_answer_into_the_final_channel() -> None:
    thoughts = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    grammar = after_reasoning('start: "yes"', "harmony", "")
    assert matches(grammar, "<|channel|>final<|message|>yes")
    assert matches(grammar, f"{thoughts}<|channel|>final<|message|>yes")
    assert not matches(grammar, "yes")
    tools = after_reasoning(grammar_for("harmony"), "harmony", "")
    assert matches(tools, written("harmony"))
    assert matches(tools, thoughts + written("harmony"))
    assert not matches(tools, thoughts + "<|channel|>final<|message|>yes")


def test_markers_become_special_tokens_where_the_vocabulary_has_them() -> None:
    grammar = after_reasoning(grammar_for("deepseek"), "think", "<think>\n")
    special = with_special_tokens(grammar, {"<｜tool▁call▁begin｜>": 7, "</think>": 9, "Köln": 1})
    assert "<[7]>" in special
    assert "/(?s:.*)/ <[9]>" in special
    assert "<[1]>" not in special
    assert with_special_tokens(grammar, {}) == grammar


def test_parser_reads_text_that_the_grammar_leaves_free() -> None:
    parser = make_parser("tool_call", "", TYPES, "")
    assert parser is not None
    parts = joined([*parser.push(f"I look.\n{written('tool_call')}"), *parser.finish()])
    assert parts[0] == AnswerText("I look.")


@pytest.mark.parametrize("family", [name for name, style in STYLES.items() if style.parameter])
@pytest.mark.parametrize(
    ("limits", "right", "wrong"),
    [
        ({"maxLength": 5}, ["", "12345", "日本 é"], ["123456"]),
        ({"minLength": 2, "maxLength": 3}, ["ab", "abc"], ["a", "abcd"]),
        ({"pattern": "^[a-z/]+$"}, ["ab/c"], ["", "aB", "ab1"]),
        ({"pattern": "b|c"}, ["b", "abd", "c c"], ["a", ""]),
        ({"pattern": "^a", "maxLength": 3}, ["a", "abc"], ["ba", "abcd"]),
        ({"pattern": r"1\$"}, ["a1$b"], ["1", "$1"]),
    ],
)
def test_texts_between_tags_keep_their_limits(
    family: str, limits: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", **limits}}, "required": ["a"]}
    grammar = tool_grammar([Function("f", schema)], family, json_lark, forced=True, several=False)
    assert grammar is not None
    style = STYLES[family]

    def call(value: str) -> str:
        argument = f"{style.parameter}a{style.string_mark}{style.parameter_middle}{value}{style.parameter_end}"
        return f"{style.opening}{style.start}f{style.middle}{argument}{style.end}{style.closing}"

    assert all(matches(grammar, call(value)) for value in right)
    assert not any(matches(grammar, call(value)) for value in wrong)
    assert not matches(grammar, call(f"b{style.parameter_end.strip()}"))
    if family == "glm45":
        rule = next(line for line in grammar.splitlines() if line.startswith("text_"))
        name = rule.partition(":")[0]
        assert f"{name}: {name.upper()} <[7]>" in with_special_tokens(grammar, {"</arg_value>": 7}).splitlines()
