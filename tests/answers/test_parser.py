"""Reasoning and tool calls of each family, read from its text: whole, character by character, and cut at random."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from ktqueue.answers.families import (
    reasoning_format_of,
    reasoning_parser_named,
    tool_format_of,
    tool_parser_named,
)
from ktqueue.answers.parser import make_parser
from ktqueue.answers.parts import AnswerPart, AnswerReasoning, AnswerText, AnswerToolCall, joined


@dataclass(frozen=True)
class Case:
    """A text of a family, and the parts that it has."""

    tools: str
    text: str
    parts: tuple[AnswerPart, ...]
    reasoning: str = ""
    opening: str = ""
    types: dict[str, dict[str, str]] = field(default_factory=dict)


def parse(case: Case, pieces: list[str]) -> tuple[AnswerPart, ...]:
    parser = make_parser(case.tools, case.reasoning, case.types, case.opening)
    assert parser is not None
    parts = [part for piece in pieces for part in parser.push(piece)]
    return joined([*parts, *parser.finish()])


def call(name: str, arguments: str = "{}", place: int = 0, call_id: str = "") -> AnswerToolCall:
    return AnswerToolCall(place, name, arguments, call_id)


CASES = {
    "Hermes, two calls, a marker inside a string": Case(
        "tool_call",
        '<think>\nHmm\n</think>\n\nSure.\n<tool_call>\n{"name": "w", '
        '"arguments": {"city": "P </tool_call> }", "n": [1]}}\n</tool_call>\n'
        '<tool_call>{"arguments": {"a": 1}, "name":"t"}</tool_call>',
        (
            AnswerReasoning("Hmm"),
            AnswerText("Sure."),
            call("w", '{"city": "P </tool_call> }", "n": [1]}'),
            call("t", '{"a": 1}', 1),
        ),
        reasoning="think",
    ),
    "Hermes, arguments as a string of JSON": Case(
        "tool_call",
        '<tool_call>{"name": "w", "arguments": "{\\"a\\": \\"b\\"}"}</tool_call>',
        (call("w", '{"a": "b"}'),),
    ),
    "Qwen3-Coder": Case(
        "tool_call",
        "<tool_call>\n<function=w>\n<parameter=city>\nParis\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
        "<parameter=zip>\n75001\n</parameter>\n</function>\n</tool_call>",
        (call("w", '{"city": "Paris", "n": 3, "zip": "75001"}'),),
        types={"w": {"zip": "string"}},
    ),
    "Qwen3-Coder without the outer marker": Case(
        "tool_call", "Well. <function=now>\n</function>", (AnswerText("Well."), call("now"))
    ),
    "GLM-4.5 in a prompt that begins the reasoning": Case(
        "tool_call",
        "hm</think>ok<tool_call>get\n<arg_key>a</arg_key>\n<arg_value>x y</arg_value>\n<arg_key>b</arg_key>"
        "<arg_value>2</arg_value></tool_call>",
        (AnswerReasoning("hm"), AnswerText("ok"), call("get", '{"a": "x y", "b": 2}')),
        reasoning="think",
        opening="<think>\n",
    ),
    "GLM-4.5 without parameters": Case("tool_call", "<tool_call>now\n</tool_call>", (call("now"),)),
    "DeepSeek V3": Case(
        "deepseek",
        'Hi<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>w\n```json\n{"a": 1}'
        "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>v\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (AnswerText("Hi"), call("w", '{"a": 1}'), call("v", place=1)),
    ),
    "DeepSeek V3.1": Case(
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>w<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        (call("w", '{"a": 1}'),),
    ),
    "DeepSeek V3.2": Case(
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="w">\n<｜DSML｜parameter name="a" string="true">1'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="b" string="false">[1]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        (call("w", '{"a": "1", "b": [1]}'),),
    ),
    "Kimi-K2": Case(
        "kimi_k2",
        'I<|tool_calls_section_begin|><|tool_call_begin|>functions.w:0<|tool_call_argument_begin|>{"a": 1}'
        "<|tool_call_end|><|tool_call_begin|>functions.v:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        (AnswerText("I"), call("w", '{"a": 1}', 0, "functions.w:0"), call("v", "{}", 1, "functions.v:1")),
    ),
    "Mistral, a list": Case(
        "mistral",
        '[THINK]a[/THINK]b[TOOL_CALLS][{"name": "w", "arguments": {"a": 1}}, {"name":"v","arguments":{}}]',
        (AnswerReasoning("a"), AnswerText("b"), call("w", '{"a": 1}'), call("v", place=1)),
        reasoning="mistral",
    ),
    "Mistral, names": Case(
        "mistral", '[TOOL_CALLS]w[ARGS]{"a": 1}[TOOL_CALLS]v[ARGS]{}', (call("w", '{"a": 1}'), call("v", place=1))
    ),
    "MiniMax-M2": Case(
        "minimax",
        '<minimax:tool_call>\n<invoke name="w">\n<parameter name="a">1</parameter>\n<parameter name="b">x</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        (call("w", '{"a": 1, "b": "x"}'),),
    ),
    "Llama 3, two objects": Case(
        "llama3",
        '{"name": "w", "parameters": {"a": 1}}; {"name": "v", "parameters": {}}',
        (call("w", '{"a": 1}'), call("v", place=1)),
    ),
    "Llama 4, a call behind the text that the answer continues": Case(
        "llama4", "[w(a=1)]", (call("w", '{"a": 1}'),), opening="Let me look. "
    ),
    "Llama 3, JSON that is no call": Case("llama3", ' {"answer": 3} ', (AnswerText(' {"answer": 3} '),)),
    "Llama 3, a marker": Case(
        "llama3", '<|python_tag|>{"name": "w", "parameters": {"a": 1}}', (call("w", '{"a": 1}'),)
    ),
    "Llama 4": Case("llama4", "[w(a=1, b='x]'), v()]", (call("w", '{"a": 1, "b": "x]"}'), call("v", place=1))),
    "Llama 4, a list that is no call": Case("llama4", "[1, 2] is a list", (AnswerText("[1, 2] is a list"),)),
    "gpt-oss, a call": Case(
        "harmony",
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary to=functions.w "
        '<|constrain|>json<|message|>{"a": 1}<|call|>',
        (AnswerReasoning("Think."), call("w", '{"a": 1}')),
    ),
    "gpt-oss, an answer": Case(
        "",
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>Hi there<|return|>",
        (AnswerReasoning("Think."), AnswerText("Hi there")),
        reasoning="harmony",
    ),
    "text that looks like a call": Case(
        "tool_call",
        "Text with < and <tool and <tool_call> no JSON\n",
        (AnswerText("Text with < and <tool and <tool_call> no JSON\n"),),
        reasoning="think",
    ),
    "text behind what is no call": Case(
        "tool_call", "a <tool_call>\n<function=b c>\n d", (AnswerText("a <tool_call>\n<function=b c>\n d"),)
    ),
    "a call that was cut off": Case(
        "tool_call", '<tool_call>{"name": "w", "arguments": {"a": [1, ', (call("w", '{"a": [1, '),)
    ),
    "a call whose end was cut off": Case(
        "tool_call", '<tool_call>{"name": "w", "arguments": {}}\n</tool_', (call("w", "{}"),)
    ),
    "a call that was cut off before its name": Case(
        "tool_call", 'x <tool_call>{"nam', (AnswerText('x <tool_call>{"nam'),)
    ),
    "reasoning that was cut off": Case("", "<think>I wonder\n", (AnswerReasoning("I wonder\n"),), reasoning="think"),
    "no reasoning": Case("", " Plain text. ", (AnswerText(" Plain text. "),), reasoning="think"),
}


@pytest.mark.parametrize("name", CASES)
def test_parts_do_not_depend_on_how_the_text_is_cut(name: str) -> None:
    case = CASES[name]
    assert parse(case, [case.text]) == case.parts
    assert parse(case, list(case.text)) == case.parts
    rng = random.Random(name)
    for _ in range(50):
        places = sorted(rng.choices(range(len(case.text) + 1), k=rng.randint(1, 12)))
        pieces = [case.text[a:b] for a, b in zip([0, *places], [*places, len(case.text)], strict=True)]
        assert parse(case, pieces) == case.parts, pieces


@pytest.mark.parametrize("name", CASES)
def test_every_beginning_of_a_text_can_be_parsed_in_pieces(name: str) -> None:
    case = CASES[name]
    for end in range(len(case.text)):
        assert parse(case, list(case.text[:end])) == parse(case, [case.text[:end]])


def test_a_request_without_formats_needs_no_parser() -> None:
    assert make_parser("", "", {}, "") is None
    assert make_parser("of-a-newer-version", "", {}, "") is None


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ '<tool_call>' }} {{ '<think>' }}", "tool_call", "think"),
        ("<｜tool▁calls▁begin｜> </think>", "deepseek", "think"),
        ("<|tool_calls_section_begin|>", "kimi_k2", ""),
        ("<|start|>assistant<|channel|>analysis", "harmony", "harmony"),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", "", ""),
    ],
)
def test_a_template_shows_its_family(template: str, tools: str, reasoning: str) -> None:
    assert (tool_format_of(template), reasoning_format_of(template)) == (tools, reasoning)


THINKING = "deepseek_v3 deepseek_v4 qwen3 glm45 glm47 kimi_k2 kimi_k25 mimo minimax_m2 olmo3 nemotron_v3 exaone4 holo2"


def test_names_of_vllm_and_sglang_are_known() -> None:
    assert {reasoning_parser_named(name, "") for name in THINKING.split()} == {"think"}
    assert {tool_parser_named(name, "") for name in ("hermes", "trinity", "qwen25", "granite4")} == {"tool_call"}
    for name in ("kimi_k9", "no parser"):
        with pytest.raises(KeyError):
            tool_parser_named(name, "")


def test_what_is_random_is_never_an_error_and_never_lost() -> None:
    pieces: list[Any] = ["<tool_call>", "</tool_call>", "{", "}", '"', "name", ":", "<think>", "</think>", "<function=",
                         ">", "x ", "\n", "[", "]", ",", "\\", "<arg_key>", "</function>", "arguments"]  # fmt: skip
    rng = random.Random(1)
    for _ in range(2000):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 14)))
        case = Case("tool_call", text, (), reasoning="think")
        assert parse(case, [text]) == parse(case, list(text)), text
