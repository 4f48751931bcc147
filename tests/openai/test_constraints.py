"""Fields of OpenAI, vLLM, llama.cpp and SGLang that constrain an answer become one grammar, or are refused."""

import json
from typing import Any

import pytest

from ktqueue.answers.grammar import byte_compiler
from ktqueue.answers.grammar_errors import GrammarFailed
from ktqueue.core.errors import InvalidRequest
from ktqueue.openai.chat import parse_chat
from ktqueue.openai.completions import parse_completion
from ktqueue.openai.jobs import parse_job

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
SHORT = {key: value for key, value in SCHEMA.items() if key != "additionalProperties"}
GBNF = 'root ::= "a" [0-9]+'
LARK = 'start: "a" NUMBER\nNUMBER: /[0-9]+/'


def grammar(fields: dict[str, Any]) -> str | None:
    chat = parse_chat({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}).request(None).grammar
    completion = parse_completion({"model": "m", "prompt": "x", **fields}).requests(None)[0].grammar
    job = parse_job({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}, None).grammar
    assert chat == completion == job
    return chat


def matches(lark: str | None, text: str) -> bool:
    """Whether a whole text matches."""
    assert lark is not None
    matcher = byte_compiler().compile(lark)
    try:
        for byte in text.encode():
            matcher.consume(byte)
    except GrammarFailed:
        return False
    return matcher.is_accepting


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": False}}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SHORT}}},
        {"guided_json": SCHEMA},
        {"structured_outputs": {"json": SHORT, "disable_additional_properties": True}},
        {"guided_json": json.dumps(SCHEMA)},
        {"json_schema": SCHEMA},
        {"json_schema": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA}, "response_format": {"type": "text"}, "grammar": "", "guided_json": {}},
    ],
)
def test_a_schema_by_any_name(fields: dict[str, Any]) -> None:
    lark = grammar(fields)
    for good in ('{"a":5}', '{"a": -17}', '{\n  "a": 5\n}'):
        assert matches(lark, good), good
    for bad in ("{}", '{"a":"5"}', '{"a":5,"b":1}', '{"a":   5}', ' {"a":5}', '{"a":5} '):
        assert not matches(lark, bad), bad


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_a_json_object_may_have_any_fields(fields: dict[str, Any]) -> None:
    lark = grammar(fields)
    assert matches(lark, '{"b": [1, {"c": null}]}') and matches(lark, "{}")
    assert not matches(lark, "[1]") and not matches(lark, "5")


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": r"[ab]{2}/\d"},
        {"regex": r"^[ab]{2}/\d$"},
        {"regex": r"^(aa|ab|bb|ba)/\d$"},
        {"structured_outputs": {"regex": r"[ab]{2}/\d"}},
        {"response_format": {"type": "regex", "pattern": r"[ab]{2}/\d"}},
    ],
)
def test_a_pattern_by_any_name(fields: dict[str, Any]) -> None:
    lark = grammar(fields)
    assert (
        matches(lark, "ab/7") and not matches(lark, "abc/7") and not matches(lark, "ab/") and not matches(lark, "^ab/7")
    )


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("^a|b$", ("a", "b"), ("ab", "", "a$")),
        ("^a$|^b$", ("a", "b"), ("ab", "^a")),
        (r"^a\$", ("a$",), ("a", "a\\")),
        (r"^a\\$", ("a\\",), ("a", "a$")),
        (r"^[(|]\|$", ("(|", "||"), ("(", "|")),
        ("^$", ("",), ("a",)),
    ],
)
def test_anchors_at_the_ends_of_a_pattern_change_nothing(
    pattern: str, good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    lark = grammar({"regex": pattern})
    assert all(matches(lark, text) for text in good) and not any(matches(lark, text) for text in bad)


@pytest.mark.parametrize("fields", [{"guided_choice": ["x"]}, {"structured_outputs": {"choice": ["x"]}}])
def test_a_choice_of_any_texts(fields: dict[str, Any]) -> None:
    texts = ["yes", "no", 'with "quotes"', "back\\slash", "new\nline", "tab\t", "Käse 🧀", "/slash/", "\u0001", "a|b"]
    ((name, value),) = fields.items()
    lark = grammar({name: {"choice": texts} if isinstance(value, dict) else texts})
    for text in texts:
        assert matches(lark, text), text
    assert not matches(lark, "yesno") and not matches(lark, "a") and not matches(lark, "")


@pytest.mark.parametrize(
    "name", ["grammar", "grammar_string", "ebnf", "guided_grammar", "structured_outputs", "response_format"]
)
@pytest.mark.parametrize("text", [GBNF, LARK])
def test_a_grammar_by_any_name(name: str, text: str) -> None:
    nested = {"structured_outputs": {"grammar": text}, "response_format": {"type": "grammar", "grammar": text}}
    lark = grammar({name: nested.get(name, text)})
    assert matches(lark, "a12") and not matches(lark, "a") and not matches(lark, "12")


def test_whitespace_can_be_chosen() -> None:
    compact = grammar({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}})
    assert matches(compact, '{"a":5}') and not matches(compact, '{"a": 5}')
    for fields in (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " {0,3}"}},
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " {0,3}"},
    ):
        lark = grammar(fields)
        assert matches(lark, '{"a":   5}') and not matches(lark, '{"a":\n5}')


def test_a_job_has_a_grammar_in_lark() -> None:
    body = {"model": "m", "prompt": "x", "sampling": {}, "grammar": LARK}
    assert parse_job(body, None).grammar == LARK
    with pytest.raises(InvalidRequest, match="unknown name"):
        parse_job({**body, "grammar": "start: nothing"}, None)


def test_two_constraints_are_refused() -> None:
    for fields, param, other in (
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "guided_regex"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex", "structured_outputs.json"),
        ({"response_format": {"type": "json_object"}, "grammar": GBNF}, "grammar", "response_format.schema"),
    ):
        with pytest.raises(InvalidRequest, match=f"{param} and {other} both say") as caught:
            grammar(fields)
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"structured_outputs": {"jsno": {}}}, "structured_outputs.jsno", "no such field"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "None"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"response_format": {"type": "regex"}}, "response_format.pattern", "missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "one of"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "only beside a JSON schema"),
        ({"guided_json": "{"}, "guided_json", "is not JSON"),
        ({"guided_json": "[1]"}, "guided_json", "which is an object"),
        ({"guided_json": [1]}, "guided_json", r"a JSON schema, or its text, got \[1\]"),
        ({"structured_outputs": {"json": 1}}, "structured_outputs.json", "a JSON schema, or its text, got 1"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "empty text"),
        ({"guided_choice": ["a"] * 1001}, "guided_choice", "1 to 1000 texts"),
        ({"guided_regex": "a" * 40_000}, "guided_regex", "1 to 32768 characters, got 40000"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_regex": "a{0004294967296}"}, "guided_regex", "repeated at most 4294967295 times, got 4294967296"),
        ({"grammar": 'start: "a"{1,3000000000}'}, "grammar", "repeated at most 2147483647 times, got 3000000000"),
        ({"grammar": "root ::= other"}, "grammar", "other"),
        ({"grammar": "start: ("}, "grammar", r"1\(9\)"),
        ({"grammar": "a" * 300_000}, "grammar", "1 to 262144 characters"),
        ({"json_schema": {"anyOf": [{"type": "strin"}]}}, "json_schema", "json_schema#/anyOf/0 cannot be used"),
    ],
)
def test_what_is_wrong_is_refused_with_its_field(fields: dict[str, Any], param: str | None, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        grammar(fields)
    assert param is None or caught.value.param == param


def test_without_constraints_there_is_no_grammar() -> None:
    assert grammar({"response_format": {"type": "text"}, "guided_choice": [], "json_schema": {}, "regex": ""}) is None
