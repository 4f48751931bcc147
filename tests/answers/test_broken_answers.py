"""Broken and odd answers of every family: the same parts however the text is cut, nothing lost, nothing raised."""

import random

import orjson
import pytest

from ktqueue.answers.call_styles import STYLES
from ktqueue.answers.families import REASONING, TOOLS
from ktqueue.answers.parser import make_parser
from ktqueue.answers.parts import AnswerPart, AnswerReasoning, AnswerText, AnswerToolCall, joined

Parts = tuple[AnswerPart, ...]


def call(name: str, arguments: str = "{}", place: int = 0) -> AnswerToolCall:
    return AnswerToolCall(place, name, arguments)


def parse(tools: str, reasoning: str, pieces: list[str]) -> Parts:
    parser = make_parser(tools, reasoning, {}, "")
    assert parser is not None
    parts = [part for piece in pieces for part in parser.push(piece)]
    return joined([*parts, *parser.finish()])


ODD: list[tuple[str, str, Parts]] = [
    ("harmony", ' to=functions.w<|channel|>commentary json<|message|>{"a": 1}<|call|>', (call("w", '{"a": 1}'),)),
    ("llama4", '<|python_start|>[w(a="b"), t()]<|python_end|>', (call("w", '{"a": "b"}'), call("t", "{}", 1))),
    ("lfm2", '<|tool_call_start|>[w(a="b")]<|tool_call_end|>Done.', (call("w", '{"a": "b"}'), AnswerText("Done."))),
    ("llama3", '<function=w>{"a": 1}</function>', (call("w", '{"a": 1}'),)),
    ("tool_call", '<tool_call>{"name": "w", "arguments": {"a": 1}\n</tool_call>', (call("w", '{"a": 1}'),)),
    ("tool_call", 'Use <tool_call> to call. {"a": 1}', (AnswerText('Use <tool_call> to call. {"a": 1}'),)),
    ("tool_call", "<tool_call> hello you </tool_call>  x", (AnswerText("<tool_call> hello you </tool_call>  x"),)),
    ("tool_call", "<tool_call>", (AnswerText("<tool_call>"),)),
    (
        "glm45",
        "<tool_call>\nw\n<arg_key>a</arg_key><arg_value>NaN</arg_value></tool_call>",
        (call("w", '{"a": "NaN"}'),),
    ),
    ("tool_call", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', (call("?"),)),
    ("llama4", r"[w(a='\ud800', b='\d')]", (call("w", r'{"a": "?", "b": "\\d"}'),)),
    ("mistral", '[TOOL_CALLS] [{"a": 1}, {"b": 2}] x', (AnswerText('[TOOL_CALLS] [{"a": 1}, {"b": 2}] x'),)),
    ("llama4", "[w(a=1e999)]", (AnswerText("[w(a=1e999)]"),)),
    ("llama4", "[w(**{})]", (AnswerText("[w(**{})]"),)),
    ("deepseek", "<｜tool▁call▁begin｜>two words{}", (AnswerText("<｜tool▁call▁begin｜>two words{}"),)),
    ("tool_call", "<tool_call>\nhello\n</tool_call>", (AnswerText("<tool_call>\nhello\n</tool_call>"),)),
    ("qwen3_coder", "<function=w>\n<parameter=a>\n1", (call("w", '{"a": "1'),)),
    ("qwen3_coder", "<function=w>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx", (call("w", '{"a": 1, "b": "x'),)),
    (
        "command",
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "w", "parameters": {"a": 1}}]<|END_ACTION|>',
        (AnswerToolCall(0, "w", '{"a": 1}'),),
    ),
]


@pytest.mark.parametrize(("family", "text", "parts"), ODD)
def test_odd_calls_become_valid_calls_or_stay_text(family: str, text: str, parts: Parts) -> None:
    for pieces in ([text], list(text)):
        assert parse(family, "harmony" if family == "harmony" else "", pieces) == parts


FRAGMENTS = (
    '{"name": "f", ', '"arguments": ', '{"a": "b"}', "}", "[", "]", "{", ", ", "\n", " ", "f", "text", '"', "\\", "é",
    "</", "<", ":0", "f(a=1)", "```", "<think>", "</think>", "\u25c1", "\\ud800", "NaN", "1e999", "long " * 120,
    "<answer>",
)  # fmt: skip


@pytest.mark.parametrize("family", list(TOOLS))
def test_random_answers_have_the_same_parts_however_they_are_cut(family: str) -> None:
    draw = random.Random(family)
    form, style = TOOLS[family], STYLES.get(family)
    own = [*form.starts, *form.sections, *form.ends, "<|message|>", "<|end|>", "<|start|>assistant", " to=f"]
    own += [form.inner, form.quote, "f{a:", "}"]
    if style is not None:
        own += [style.start, style.middle, style.end, style.parameter, style.parameter_middle, style.parameter_end]
    for number in range(150):
        fragments = draw.choices([*filter(None, own), *FRAGMENTS], k=draw.randint(1, 12))
        text = "".join(fragments)
        reasoning = "harmony" if family == "harmony" else draw.choice(["", *REASONING][:6])
        whole = parse(family, reasoning, [text])
        assert parse(family, reasoning, list(text)) == whole, (number, text)
        assert parse(family, reasoning, fragments) == whole, (number, text)
        for part in whole:
            assert isinstance(part, AnswerToolCall) or part.text
            assert isinstance(part, AnswerText | AnswerReasoning) or part.name
            orjson.dumps(part)
        markers = [*form.sections, *form.ends]
        for marks in REASONING.values():
            markers += [marks.start, *marks.wrappers]
        if reasoning and REASONING[reasoning].begun:
            continue
        has_marker = family == "harmony" or any(mark in text for mark in markers)
        if not has_marker and all(isinstance(part, AnswerText) for part in whole):
            assert "".join(part.text for part in whole if isinstance(part, AnswerText)) == text, (number, text)


@pytest.mark.parametrize("family", ["tool_call", "minimax", "kimi_k2", "mistral", "harmony"])
def test_a_marker_before_prose_does_not_hold_the_answer_back(family: str) -> None:
    form = TOOLS[family]
    start = form.starts[0] if form.starts else "<|channel|>"
    parser = make_parser(family, "", {}, "")
    assert parser is not None
    streamed = [part for _ in range(200) for part in parser.push(start + "word " * 200)]
    text = "".join(part.text for part in streamed if isinstance(part, AnswerText))
    assert text.count("word") > 190 * 200
