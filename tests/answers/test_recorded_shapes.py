"""Answers in the shapes that public test files of other servers record, with texts of our own.

A row is a family, how its models wrote something, and what a client gets. The shapes are those of vLLM's
tests/tool_parsers and tests/reasoning.
"""

import json
from typing import Any

import pytest

from ktqueue.answers.families import reasoning_parser_named, tool_parser_named
from ktqueue.answers.parser import make_parser
from ktqueue.answers.parts import AnswerReasoning, AnswerText, AnswerToolCall, joined

# ruff: noqa: E501
TYPES = {"edit": {"old": "string"}, "book": {"day": "string or null", "room": "string"}}
MANY = {"text": "hi", "n": 42, "x": 3.14, "yes": True, "no": None, "l": ["a", "b"], "o": {"k": "v"}, "e": [], "d": {}}
MANY_JSON = json.dumps(MANY)
PYTHON = "text='hi', n=42, x=3.14, yes=True, no=None, l=['a', 'b'], o={'k': 'v'}, e=[], d={}"
QUOTES = {"q": 'He said "hi"', "path": "C:\\dir\\f.txt", "lines": "a\nb", "party": "🎉"}

Call = tuple[str, Any]
FIND: Call = ("find", {"q": "fig"})
LIST: Call = ("list", {})
ROWS: list[tuple[str, str, str | None, list[Call]]] = [
    # Hermes and kin
    ("hermes", '<tool_call>\n{"name": "find", "arguments": {"q": "fig"}}\n</tool_call>', "", [FIND]),
    ("hermes", '<tool_call>{"name": "find",\n"arguments":\n{"q":\n"fig"}}</tool_call>', "", [FIND]),
    ("hermes", '<tool_call>\n{"name": "find", "arguments": {"q": "fig"}}', "", [FIND]),
    ("hermes", f'Ok.<tool_call>{{"name": "many", "arguments": {MANY_JSON}}}</tool_call>', "Ok.", [("many", MANY)]),
    ("hermes", '<tool_call>\n{"name": "find", "arguments": "{\\"q\\": \\"fig\\"}"}\n</tool_call>', "", [FIND]),
    ("hermes", '<tool_call>\n{"name": "say", "arguments": "hello"}\n</tool_call>', "", [("say", "hello")]),
    ("hermes", '<tool_call>\n{"name": "list", "arguments": ""}\n</tool_call>', "", [LIST]),
    (
        "granite4",
        'One: \n<tool_call> {"name": "find", "arguments": {"q": "fig"}} </tool_call> two: \n '
        '<tool_call> {"name": "list", "arguments": {}} </tool_call> See?',
        "One:two:See?",
        [FIND, LIST],
    ),
    ("longcat", '<longcat_tool_call>{"name": "list", "arguments": {}}</longcat_tool_call>', "", [LIST]),
    (
        "longcat",
        '<longcat_tool_call>{"name": "find", "arguments": {"q": "fig"}}</longcat_tool_call>\n'
        '<longcat_tool_call>{"name": "list", "arguments": {}}</longcat_tool_call>',
        "",
        [FIND, LIST],
    ),
    (
        "longcat",
        "Hm\n<longcat_tool_call>find\n<longcat_arg_key>q</longcat_arg_key>\n<longcat_arg_value>fig</longcat_arg_value>"
        "\n</longcat_tool_call>\nDone.",
        "HmDone.",
        [FIND],
    ),
    ("longcat", "Some <longcat_tool_call>no json", "Some <longcat_tool_call>no json", []),
    # Lists of JSON
    ("hunyuan_a13b", '<tool_calls>[{"name": "find", "arguments": {"q": "fig"}}]</tool_calls>\nBye', "Bye", [FIND]),
    ("hunyuan_a13b", '<tool_calls>[{"name": "list", "arguments": {}}, {"name": "find", "arguments": {"q": "fig"}}]'
     "</tool_calls>", "", [LIST, FIND]),
    ("xlam", '[{"name": "find", "arguments": {"q": "fig"}}, {"name": "list", "arguments": {}}]', "", [FIND, LIST]),
    ("xlam", 'Yes.[TOOL_CALLS][{"name": "find", "arguments": {"q": "fig"}}]', "Yes.", [FIND]),
    ("xlam", 'Yes.<tool_call>[{"name": "find", "arguments": {"q": "fig"}}]</tool_call>', "Yes.", [FIND]),
    ("xlam", "[1] is a footnote", "[1] is a footnote", []),
    ("phi4_mini_json", 'functools[\n  {"name": "find", "arguments": {"q": "fig"}},\n  {"name": "list", "arguments": {}}\n]',
     "", [FIND, LIST]),
    ("phi4_mini_json", 'Look.\nfunctools[{"name": "find", "arguments": {"q": "fig"}}]\nMore?', "Look.More?", [FIND]),
    ("phi4_mini_json", "functools[ is a word ]", "functools[ is a word ]", []),
    ("apertus", '<|tools_prefix|>[{"find": {"q": "fig"}}]<|tools_suffix|>', "", [FIND]),
    ("apertus", 'So. <|tools_prefix|>[{"find": {"q": "fig"}}, {"list": {}}]', "So.", [FIND, LIST]),
    ("apertus", f'<|tools_prefix|>[{{"many": {MANY_JSON}}}]<|tools_suffix|>', "", [("many", MANY)]),
    ("nemotron", f'<TOOLCALL>[{{"name": "q", "arguments": {json.dumps(QUOTES)}}}]</TOOLCALL>', "", [("q", QUOTES)]),
    # One object behind a marker
    ("internlm", '<|action_start|><|plugin|>{"name": "find", "parameters": {"q": "fig"}}<|action_end|>', "", [FIND]),
    ("internlm", 'Ok. <|action_start|><|plugin|>{\n  "name": "list",\n  "parameters": {}\n}<|action_end|>', "Ok.", [LIST]),
    ("internlm", "<|action_start|><|plugin|>no json<|action_end|>", "<|action_start|><|plugin|>no json<|action_end|>", []),
    ("gigachat3", '<|function_call|>{"name": "find", "arguments": {"q": "fig"}}', "", [FIND]),
    ("gigachat3", 'Ok.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "find", "arguments": {"q": "fig"}}',
     "Ok.", [FIND]),
    ("granite_20b_fc", '<function_call> {"name": "find", "arguments": {"q": "fig"}}\n<function_call> {"name": "list", '
     '"arguments": {}}', "", [FIND, LIST]),
    ("granite_20b_fc", '<function_call> {"name": 123}', '<function_call> {"name": 123}', []),
    # Llama
    ("llama3_json", 'Here: {"name": "list", "parameters": {}} More?', "Here:More?", [LIST]),
    ("llama3_json", '{"name": "find", "parameters": {"q": "fig"}} ; {"name": "list", "parameters": {}}', "", [FIND, LIST]),
    ("llama3_json", '{"name": "find", "parameters": {"q": "fig"}}\n{"name": "list", "parameters": {}}', "", [FIND, LIST]),
    ("llama3_json", '{"type": "function", "name": "find", "parameters": {"q": "fig"}}', "", [FIND]),
    ("llama3_json", '[{"name": "find", "parameters": {"q": "fig"}}]', "", [FIND]),
    ("llama3_json", '{"parameters": {}}', '{"parameters": {}}', []),
    ("llama3_json", 'A set: {1, 2}', "A set: {1, 2}", []),
    ("llama4_pythonic", "[find(q='fig')]", "", [FIND]),
    ("llama4_pythonic", "<|python_start|>[find(q='fig'), list()]<|python_end|>", "", [FIND, LIST]),
    ("pythonic", f"[many({PYTHON})]", "", [("many", MANY)]),
    ("pythonic", r"""[find(q='Al\'s "fig"')]""", "", [("find", {"q": "Al's \"fig\""})]),
    ("pythonic", "[find(q='a\nb'), at(month=07, day=-05, t=(1, 2), s={3})]", "",
     [("find", {"q": "a\nb"}), ("at", {"month": 7, "day": -5, "t": [1, 2], "s": [3]})]),
    ("pythonic", "[bad(x=b'z'), find(q='fig')]", "bad(x=b'z')", [FIND]),
    ("pythonic", "[calc(x=1e999), find(q='fig')]", "calc(x=1e999)", [FIND]),
    ("pythonic", "[foo(x=1])]", "[foo(x=1])]", []),
    ("lfm2", "<|tool_call_start|> [box.find(q='grep \"]\" f')]<|tool_call_end|>\nOk.", "Ok.",
     [("box.find", {"q": 'grep "]" f'})]),
    ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>", None, []),
    ("olmo3", "<function_calls>find(q='fig')\nlist()</function_calls>", "", [FIND, LIST]),
    ("olmo3", "<function_calls>flags(a=true, b=false, c=null)</function_calls>", "",
     [("flags", {"a": True, "b": False, "c": None})]),
    ("olmo3", "<function_calls>bad(x=b'z')\nfind(q='fig')</function_calls>", "bad(x=b'z')", [FIND]),
    # Mistral
    ("mistral", '[TOOL_CALLS] [{"arguments":{"name": "fig"}, "name": "find"}]', "", [("find", {"name": "fig"})]),
    ("mistral", '[TOOL_CALLS]add{"a": 3.5}[TOOL_CALLS]list{}', "", [("add", {"a": 3.5}), LIST]),
    ("mistral", '[TOOL_CALLS]find[CALL_ID]abc123def[ARGS]{"q": "fig"}', "", [FIND]),
    ("mistral", '[TOOL_CALLS] [{"name": "find", "arguments":{"q": "fig"}}]\nmore', "more", [FIND]),
    # DeepSeek
    ("deepseek_v3", "Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>list\n```json\n{}\n```<｜tool▁call▁end｜>"
     '<｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{"q": "fig"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
     "Ok.", [LIST, FIND]),
    ("deepseek_v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{"q": "fig"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
     "", [FIND]),
    ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="list">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
     "", [LIST]),
    ("deepseek_v4", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="false">[1, {"k": 2}]'
     '</｜DSML｜parameter>\n<｜DSML｜parameter name="b" string="true">7</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
     "</｜DSML｜tool_calls>", "", [("f", {"a": [1, {"k": 2}], "b": "7"})]),
    # Tags
    ("minimax_m2", 'Ok. <minimax:tool_call><invoke name="find"><parameter name="q">fig</parameter></invoke>'
     '<invoke name="list"></invoke></minimax:tool_call>', "Ok.", [FIND, LIST]),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="edit">\n<parameter name="old">  if x:\n    y\n</parameter>\n'
     "</invoke>\n</minimax:tool_call>", "", [("edit", {"old": "  if x:\n    y\n"})]),
    ("minimax_m2", '<minimax:tool_call><invoke name="book"><parameter name="day">5</parameter><parameter name="room">'
     "null</parameter></invoke></minimax:tool_call>", "", [("book", {"day": "5", "room": "null"})]),
    ("minimax_m2", '<minimax:tool_call><invoke name="book"><parameter name="day">null</parameter></invoke>'
     "</minimax:tool_call>", "", [("book", {"day": None})]),
    ("qwen3_coder", "<function=edit>\n<parameter=old>\nreturn 1\n\n</parameter>\n</function>", "",
     [("edit", {"old": "return 1\n"})]),
    # tags that end a parameter are forgotten
    ("qwen3_coder", "<tool_call>\n<function=find>\n<parameter=q>\nfig\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>", "", [("find", {"q": "fig", "n": 3})]),
    ("qwen3_coder", "<tool_call>\n<function=find>\n<parameter=q>\nfig\n</function>\n</tool_call>\n<tool_call>\n<function=list>\n</function>\n</tool_call>", "", [FIND, LIST]),
    ("qwen3_coder", "<tool_call>\n<function=find>\n<parameter=n>\n3\n<parameter=q>\nfig\n</function>\n", "", [("find", {"n": 3, "q": "fig"})]),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="find">\n<parameter name="q">fig\n</invoke>\n</minimax:tool_call>', "", [FIND]),
    ("qwen3_coder", 'Ok.<tool_call>\n<function=f>\n<parameter=o>\n{"w": 10, \n "h": 20}\n</parameter>\n</function>\n'
     "</tool_call>", "Ok.", [("f", {"o": {"w": 10, "h": 20}})]),
    ("glm45", "<tool_call>find\n    <arg_key>q</arg_key>\n    <arg_value>fig</arg_value>\n    </tool_call>\n    "
     "<tool_call>list\n</tool_call>", "", [FIND, LIST]),
    ("glm47", "  \n  <tool_call>list</tool_call>", "", [LIST]),
    ("glm47", "Now.<tool_call>find<arg_key>q</arg_key><arg_value>fig</arg_value></tool_call>", "Now.", [FIND]),
    ("hy_v3", "Ok.<tool_calls>\n<tool_call>list<tool_sep>\n</tool_call>\n<tool_call>find<tool_sep>\n<arg_key>q</arg_key>\n"
     "<arg_value>fig</arg_value>\n</tool_call>\n</tool_calls>", "Ok.", [LIST, FIND]),
    ("hy_v3", "<tool_calls><tool_call>find<tool_sep><arg_key>q</arg_key><arg_value>fig</arg_value></tool_call></tool_calls>",
     "", [FIND]),
    ("step3", '<｜tool_calls_begin｜><｜tool_call_begin｜><steptml:invoke name="find"><steptml:parameter name="q">fig'
     "</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_sep｜><｜tool_call_begin｜><steptml:invoke "
     'name="list"></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>\n\nOk.', "Ok.", [FIND, LIST]),
    ("step3", '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>edit\n<steptml:invoke name="edit">'
     '<steptml:parameter name="old">a \n</steptml:parameter><steptml:parameter name="n"> 4 </steptml:parameter>'
     "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>", "", [("edit", {"old": "a \n", "n": 4})]),
    ("seed_oss", "<seed:tool_call>\n<function=find>\n<parameter=q>fig</parameter>\n</function>\n</seed:tool_call>", "", [FIND]),
    ("poolside_v1", '<tool_call>edit\n<arg_key>old</arg_key>\n<arg_value>    a\n</arg_value>\n</tool_call>', "", [("edit", {"old": "    a\n"})]),
    ("solar_open2", "Ok.<|tool_call:start|>find\n<|tool_arg:start|>q<|tool_arg:value|>fig<|tool_arg:end|>\n<|tool_call:end|>\n"
     "<|tool_call:start|>list\n<|tool_call:end|>", "Ok.", [FIND, LIST]),
    ("solar_open2", "<|tool_call:start|>edit<|tool_arg:start|>old<|tool_arg:value|>a <|tool_call: b\n<|tool_arg:end|>"
     '<|tool_arg:start|>o<|tool_arg:value|>{"n": 3}<|tool_arg:end|><|tool_call:end|>', "",
     [("edit", {"old": "a <|tool_call: b\n", "o": {"n": 3}})]),
    ("solar_open2", "<|tool_call:start|> no name <|tool_arg:start|>", None, []),
    ("minicpm5", 'Hm.\n<function name="find"><param name="q">fig</param></function>\nOr\n<function name="list"></function>',
     "Hm.Or", [FIND, LIST]),
    ("minicpm5", '<function name="edit"><param name="old"><![CDATA[a\n<b>]]></param><param name="l">[7, 8]</param></function>',
     "", [("edit", {"old": "a\n<b>", "l": [7, 8]})]),
    ("minicpm5", '<function name="edit"><param name="old"><![CDATA[<a></param>\n<param name="l">]]></param><param name="l">\n<![CDATA[b]]>\n</param>'
     "</function>", "", [("edit", {"old": '<a></param>\n<param name="l">', "l": "b"})]),
    ("gigachat35", 'Ok.<｜GCML｜tool_calls><｜GCML｜invoke name="f"><｜GCML｜parameter name="a" string="false">[1, null]'
     '</｜GCML｜parameter><｜GCML｜parameter name="b" string="true">7</｜GCML｜parameter></｜GCML｜invoke>'
     '<｜GCML｜invoke name="list"></｜GCML｜invoke></｜GCML｜tool_calls>', "Ok.", [("f", {"a": [1, None], "b": "7"}), LIST]),
    # Kimi
    ("kimi_k2", 'Ok. <|tool_calls_section_begin|><|tool_call_begin|>functions.find:0 <|tool_call_argument_begin|>{"q": '
     '"fig"}<|tool_call_end|><|tool_call_begin|>list:1 <|tool_call_argument_begin|>{}<|tool_call_end|>'
     "<|tool_calls_section_end|>", "Ok.", [FIND, LIST]),
    # Gemma
    ("functiongemma", "Ok. <start_function_call>call:find{q:<escape>fig<escape>}<end_function_call>"
     "<start_function_call>call:list{}<end_function_call>", "Ok.", [FIND, LIST]),
    ("functiongemma", "<start_function_call>call:f{a:<escape>42<escape>,b:<escape>true<escape>}<end_function_call>", "",
     [("f", {"a": 42, "b": True})]),
    ("gemma4", '<|tool_call>call:my-box.f{o:{k:<|"|>a, b<|"|>},l:[<|"|>x]<|"|>,2],n:3.14,t:true,z:null,<|"|>3<|"|>:1}'
     "<tool_call|>", "", [("my-box.f", {"o": {"k": "a, b"}, "l": ["x]", 2], "n": 3.14, "t": True, "z": None, "3": 1})]),
    ("gemma4", "<|tool_call>call:f{a:[1}<tool_call|>", "<|tool_call>call:f{a:[1}<tool_call|>", []),
]  # fmt: skip


def read(tools: str, reasoning: str, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, text, and name and arguments of each call."""
    parser = make_parser(tool_parser_named(tools, ""), reasoning_parser_named(reasoning, ""), TYPES, "")
    assert parser is not None
    parts = joined([*(part for piece in pieces for part in parser.push(piece)), *parser.finish()])
    calls = [(part.name, part.arguments) for part in parts if isinstance(part, AnswerToolCall)]
    text, thought = (
        "".join(part.text for part in parts if isinstance(part, kind)) for kind in (AnswerText, AnswerReasoning)
    )
    return thought, text, calls


@pytest.mark.parametrize(
    ("family", "answer", "text", "calls"), ROWS, ids=[f"{i} {row[0]}" for i, row in enumerate(ROWS)]
)
def test_calls_of_each_shape(family: str, answer: str, text: str | None, calls: list[Call]) -> None:
    whole = read(family, "none", [answer])
    assert whole == read(family, "none", [*answer])
    assert [(name, json.loads(arguments)) for name, arguments in whole[2]] == calls
    assert text is None or whole[1] == text


THOUGHTS = [
    ("deepseek_r1", "Hm, a fig.</think>Here.", "Hm, a fig.", "Here."),
    ("deepseek_r1", "<think>Hm</think>\nHere", "Hm", "Here"),
    ("deepseek_r1", "\n<think>Hm", "Hm", ""),
    ("deepseek_r1", "</think>Here", "", "Here"),
    ("deepseek_r1", "Hm", "Hm", ""),
    ("qwen3", "<think>\n\n</think>\n\nHere", "", "Here"),
    ("ernie45", "<think>abc</think>\n<response>\ndef\n</response>\n", "abc", "def"),
    ("granite", "Here is my thought process:Hm\nyes Here is my response:Fig", "Hm\nyes", "Fig"),
    ("granite", "Here is my thought failure", "", "Here is my thought failure"),
    ("hunyuan_a13b", "<think>\nHm\n</think>\n<answer>\nFig\n</answer>", "Hm", "Fig"),
    ("hunyuan_a13b", "<think>\n\n</think>\n<answer>\nFig", "", "Fig"),
    ("apertus", "<|inner_prefix|>Hm<|inner_suffix|>Fig", "Hm", "Fig"),
    ("gemma4", "<|channel>thought\nHm<channel|>Fig", "Hm", "Fig"),
    ("magistral", "[THINK]Hm[/THINK]Fig", "Hm", "Fig"),
    ("seed_oss", "<seed:think>Hm</seed:think>Fig", "Hm", "Fig"),
    ("solar_open2", "<|think:start|>Hm<|think:end|>Fig", "Hm", "Fig"),
]


@pytest.mark.parametrize(("family", "answer", "thought", "text"), THOUGHTS)
def test_reasoning_of_each_shape(family: str, answer: str, thought: str, text: str) -> None:
    for pieces in ([answer], [*answer]):
        found = read("none", family, pieces)
        assert (found[0].strip(), found[1].strip()) == (thought, text)


def test_a_call_ends_reasoning() -> None:
    answer = '<think>I must look.\n\n<tool_call>\n{"name": "find", "arguments": {"q": "fig"}}\n</tool_call>'
    for pieces in ([answer], [*answer]):
        assert read("hermes", "qwen3", pieces) == ("I must look.", "", [("find", '{"q": "fig"}')])


@pytest.mark.parametrize("answer", ["<think>A <tool_call> is a tag.</think>Fig", "<think>A <tool_call>.</think>Fig"])
def test_a_word_does_not_end_reasoning(answer: str) -> None:
    thought = answer.removeprefix("<think>").removesuffix("</think>Fig")
    for pieces in ([answer], [*answer]):
        assert read("hermes", "qwen3", pieces) == (thought, "Fig", [])


def test_a_text_between_tags_keeps_its_line_breaks() -> None:
    answer = '<minimax:tool_call><invoke name="edit"><parameter name="old">a\n</parameter></invoke></minimax:tool_call>'
    assert read("minimax_m2", "none", [answer])[2] == [("edit", '{"old": "a\\n"}')]


def test_a_wrong_call_drops_no_other() -> None:
    assert read("pythonic", "none", ["[bad(x=b'z'), list()]"]) == ("", "bad(x=b'z')", [("list", "{}")])


def test_a_line_like_a_tag_is_part_of_a_value() -> None:
    old = "<function=f>\n<parameter=q>\n1\n</function>\n"
    answer = f"<function=edit>\n<parameter=old>\n{old}\n</parameter>\n</function>"
    for pieces in ([answer], [*answer]):
        assert read("qwen3_coder", "none", pieces)[2] == [("edit", json.dumps({"old": old}))]


def test_many_wrong_calls_are_text_within_the_time_of_a_test() -> None:
    """A model can write as many as its answer is long, and the gateway has other clients meanwhile."""
    answer = f"[list(), {', '.join(f'bad(x=b{i})' for i in range(20_000))}]"
    _, text, calls = read("pythonic", "none", [answer])
    assert calls == [("list", "{}")]
    assert text.splitlines()[-1] == "bad(x=b19999)"


def test_a_wrong_call_of_several_lines_is_given_back_as_it_was() -> None:
    assert read("pythonic", "none", ["[é(x=o),\n list(), bad(\n 1)]"]) == ("", "é(x=o)\nbad(\n 1)", [("list", "{}")])
