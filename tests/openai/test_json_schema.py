"""Every keyword of JSON schemas is honoured or refused with its place; none is ignored."""

import json
from typing import Any

import jsonschema
import pytest

from ktqueue.answers.grammar import byte_compiler
from ktqueue.answers.grammar_errors import TOO_COMPLEX, GrammarFailed
from ktqueue.core.errors import InvalidRequest
from ktqueue.openai.json_schema import ANNOTATIONS, HONOURED, closed, lark_of_schema

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
# For each keyword a schema, documents that are valid, and documents that are not.
KEYWORDS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "type": ({"type": ["integer", "null"]}, [1, None], ["1", 1.5, True]),
    "enum": ({"enum": ["a", 1, None, {"b": [2]}]}, ["a", 1, None, {"b": [2]}], ["b", 2, {"b": []}]),
    "const": ({"const": {"a": "ü"}}, [{"a": "ü"}], [{"a": "u"}, {}]),
    "anyOf": ({"anyOf": [{"type": "integer"}, {"maxLength": 1, "type": "string"}]}, [1, "a"], [None, "ab"]),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [None]),
    "allOf": ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, [3, 5], [2, 6]),
    "$ref": (
        {"$ref": "#/$defs/x", "$defs": {"x": {"type": "array", "items": {"$ref": "#/$defs/x"}}}},
        [[[], [[]]]],
        [[1], 1],
    ),
    "items": ({"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [["a"]]),
    "prefixItems": (
        {"type": "array", "prefixItems": [{"const": 1}], "items": False, "minItems": 1},
        [[1]],
        [[2], [1, 1]],
    ),
    "minItems": ({"type": "array", "items": {"const": 1}, "minItems": 2}, [[1, 1], [1, 1, 1]], [[1]]),
    "maxItems": ({"type": "array", "items": {"const": 1}, "maxItems": 2}, [[1, 1]], [[1, 1, 1]]),
    "properties": (
        {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": True},
        [{"a": 1}, {}, {"b": 2}],
        [{"a": 2}],
    ),
    "additionalProperties": ({"type": "object", "additionalProperties": {"const": 1}}, [{"x": 1}], [{"x": 2}]),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^a+$": {"const": 1}}, "additionalProperties": False},
        [{"a": 1}, {"aa": 1}],
        [{"b": 1}, {"a": 2}],
    ),
    "required": ({"type": "object", "properties": {"a": {}}, "required": ["a", "b"]}, [{"a": 1, "b": 2}], [{"a": 1}]),
    "minProperties": ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    "maxProperties": ({"type": "object", "maxProperties": 1}, [{"a": 1}, {}], [{"a": 1, "b": 2}]),
    "minLength": ({"type": "string", "minLength": 2}, ["äö"], ["ä"]),
    "maxLength": ({"type": "string", "maxLength": 2}, ["äö"], ["abc"]),
    "pattern": ({"type": "string", "pattern": "^[a-c]+$"}, ["abc"], ["abd", ""]),
    "format": (
        {"type": "string", "format": "date-time"},
        ["2024-02-29T01:02:03Z", "2023-12-31T23:59:59.5+02:00"],
        ["2023-02-29T01:02:03Z", "2023-04-31T01:02:03Z", "2024-02-29T24:00:00Z", "2024-02-29T23:59:60Z", "x"],
    ),
    "minimum": ({"type": "number", "minimum": 1.5}, [1.5, 2], [1.4, -3]),
    "maximum": ({"type": "integer", "maximum": 12}, [12, -99], [13, 100]),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 1}, [2], [1]),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 1}, [0.99], [1]),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, [0, 14, 49], [13]),
    "additionalItems": (
        {"$schema": DRAFT_7, "type": "array", "items": [{"const": 1}], "additionalItems": False},
        [[1]],
        [[1, 1]],
    ),
}  # fmt: skip
REFUSED: list[tuple[str, Any]] = [
    ("not", {"type": "string"}), ("if", {}), ("then", {}), ("else", {}), ("contains", {}), ("minContains", 1),
    ("maxContains", 1), ("uniqueItems", True), ("propertyNames", {"pattern": "a"}), ("dependentRequired", {}),
    ("dependentSchemas", {}), ("dependencies", {}), ("unevaluatedItems", False), ("unevaluatedProperties", False),
    ("$dynamicRef", "#a"), ("$dynamicAnchor", "a"), ("$recursiveRef", "#"), ("nullable", 1), ("x-guidance", {}),
    ("minimun", 3), ("lenient", True),
]  # fmt: skip


def accepts(schema: Any, document: Any) -> bool:
    matcher = byte_compiler().compile(lark_of_schema(schema, "p"))
    try:
        for byte in json.dumps(document, ensure_ascii=False).encode():
            matcher.consume(byte)
    except GrammarFailed:
        return False
    return matcher.is_accepting


def test_every_honoured_keyword_has_a_case() -> None:
    assert set(KEYWORDS) == HONOURED


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_keyword_is_honoured(keyword: str) -> None:
    schema, good, bad = KEYWORDS[keyword]
    checker = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(
        schema, format_checker=jsonschema.FormatChecker()
    )
    for document in good:
        assert checker.is_valid(document) and accepts(schema, document), document
    for document in bad:
        assert not accepts(schema, document), document


@pytest.mark.parametrize(("keyword", "value"), REFUSED)
def test_a_keyword_is_refused_with_its_place(keyword: str, value: Any) -> None:
    for schema, place in (
        ({keyword: value}, f"#/{keyword}"),
        ({"properties": {"a/b": {"items": [{keyword: value}]}}}, f"#/properties/a~1b/items/0/{keyword}"),
        ({"anyOf": [True, {"additionalProperties": {keyword: value}}]}, f"#/anyOf/1/additionalProperties/{keyword}"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            lark_of_schema(schema, "p")
        assert caught.value.message.startswith(f"p{place} ") and caught.value.limit == place


@pytest.mark.parametrize("keyword", sorted(ANNOTATIONS - {"$defs", "definitions", "$schema", "$id", "id", "$anchor"}))
def test_an_annotation_changes_nothing(keyword: str) -> None:
    assert accepts({"type": "integer", keyword: "text", "x-order": 1}, 5)


@pytest.mark.parametrize("name", ["uniqueItems", "const", "not"])
def test_a_property_may_have_the_name_of_a_keyword(name: str) -> None:
    schema = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
    assert accepts(schema, {name: 1}) and not accepts(schema, {name: "a"})


@pytest.mark.parametrize(
    "schema", [{"type": "string"}, {"type": ["string"]}, {"enum": ["a"]}, {"anyOf": [{"const": "a"}]}]
)
def test_nullable_allows_null_too(schema: dict[str, Any]) -> None:
    whole = {"properties": {"a": {**schema, "nullable": True}, "b": {**schema, "nullable": False}}}
    assert accepts(whole, {"a": None, "b": "a"}) and accepts(whole, {"a": "a"})
    assert not accepts({"type": "object", **whole}, {"b": 5})
    assert not accepts({"properties": {"b": {"type": "string", "nullable": False}}}, {"b": None})


def test_a_keyword_that_asks_for_nothing_is_accepted() -> None:
    schema = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}
    assert accepts(schema, {"a": 1}) and not accepts(schema, {"a": "b"})
    assert accepts({"type": "array", "uniqueItems": False}, [1, 1])


@pytest.mark.parametrize("name", ["password", "int32", "regex", "iri", 5])
def test_an_unknown_format_is_refused(name: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"p#/properties/a/format is not supported"):
        lark_of_schema({"properties": {"a": {"format": name}}}, "p")


def test_a_pattern_and_a_date_hold_together() -> None:
    schema = {"type": "string", "format": "date", "pattern": "^2024"}
    assert accepts(schema, "2024-02-29") and not accepts(schema, "2023-01-01") and not accepts(schema, "2024-02-30")


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (5, "which is an object"),
        ({"$ref": "https://example.org/x.json"}, "not present"),
        (
            {"properties": {"a": {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}}},
            "p#/properties/a .*oneOf",
        ),
        ({"items": {"pattern": "(?=a)"}}, "p#/items cannot be used: regex parse error: look-around"),
        ({"minProperties": 2}, "p#/minProperties must be at most 1"),
        ({"type": "object", "required": ["a", "b"], "minProperties": 3}, "must be at most 2"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
        ({"enum": ["x" * 600_000]}, "must have at most 524288 characters"),
        (
            {"items": {"maxLength": 10**12}},
            "p#/items/maxLength must be an integer from 0 to 4294967295, got 1000000000000",
        ),
        ({"minItems": 1e30}, r"p#/minItems must be an integer from 0 to 4294967295, got 1e\+30"),
        ({"minLength": True}, "p#/minLength must be an integer from 0 to 4294967295, got True"),
        ({"maxProperties": 1.5}, "p#/maxProperties must be an integer from 0 to 4294967295, got 1.5"),
        ({"maxItems": 10**5000}, "p#/maxItems must be an integer .*, got an integer of 16610 bits"),
        ({"type": "number", "maximum": 1e308}, r"p#/maximum must be a number from -10{18} to 10{18}, got 1e\+308"),
        ({"minimum": "x"}, r"p#/minimum must be a number from -10{18} to 10{18}, got 'x'"),
        (
            {"items": {"pattern": "a{2,5000000000}"}},
            "p#/items cannot be used: a part may be repeated at most 4294967295 times, got 5000000000",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_place(schema: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        lark_of_schema(schema, "p")


def test_a_long_minimum_beside_a_pattern_is_refused_with_its_limit() -> None:
    part: dict[str, Any] = {"type": "string", "pattern": "^([a-z]+ )+$", "minLength": 20_000}
    schema = {"type": "object", "properties": {"a": part}, "required": ["a"]}
    with pytest.raises(InvalidRequest, match="p#/properties/a/minLength must be at most") as refused:
        lark_of_schema(schema, "p")
    assert refused.value.value == 20_000
    part["minLength"] = refused.value.limit
    assert accepts(schema, {"a": "ab " * 100}) and not accepts(schema, {"a": "ab "})
    part["minLength"] += 1
    with pytest.raises(InvalidRequest, match="got"):
        lark_of_schema(schema, "p")
    patterns = [{"type": "string", "pattern": f"(.*{letter}.{{40}})"} for letter in "abc"]
    with pytest.raises(InvalidRequest, match=f"^p cannot be used: {TOO_COMPLEX}$"):
        lark_of_schema({"allOf": patterns}, "p")


def test_the_largest_numbers_are_honoured() -> None:
    assert accepts({"type": "string", "maxLength": 4294967295, "minLength": 2.0}, "ab")
    assert not accepts({"type": "string", "minLength": 2.0}, "a")
    bounds = {"minimum": -(10**18), "maximum": 1e18}
    assert accepts({"type": "number", **bounds}, 10**18) and accepts({"type": "integer", **bounds}, -(10**18))
    assert not accepts({"type": "number", **bounds}, 1.1e18) and accepts({"type": "array", "maxItems": 10**9}, [])


def test_a_deep_schema_is_refused() -> None:
    schema: Any = {"type": "string"}
    for _ in range(60):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequest):
        for _ in range(10_000):
            schema = {"type": "array", "items": schema}
        lark_of_schema(schema, "p")


def test_a_schema_that_explodes_is_refused_soon() -> None:
    choices: list[dict[str, Any]] = [
        {"anyOf": [{"properties": {f"{side}{i}": {}}} for side in "ab"]} for i in range(18)
    ]
    with pytest.raises(InvalidRequest, match="schema too large"):
        lark_of_schema({"allOf": choices}, "p")


PART: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
SHUT = {**PART, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (PART, SHUT),
        ({"type": "array", "items": PART}, {"type": "array", "items": SHUT}),
        ({"$ref": "#/$defs/x", "$defs": {"x": PART}}, {"$ref": "#/$defs/x", "$defs": {"x": SHUT}}),
        ({"anyOf": [PART, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        ({"const": PART}, {"const": PART}),
        ({"type": "object"}, {"type": "object"}),
        *((same, same) for same in (
            {**PART, "additionalProperties": True}, {**PART, "patternProperties": {"^x": {"type": "string"}}},
            {**PART, "anyOf": [PART, {"properties": {"b": {}}}]}, {"allOf": [PART, {"properties": {"b": {}}}]},
            {**PART, "$ref": "#/$defs/x", "$defs": {"x": PART}}, {**PART, "unevaluatedProperties": True},
            {**PART, "required": ["b"]}, {**PART, "required": [{}]},
        )),
        ({"items": {"allOf": [PART]}}, {"items": {"allOf": [SHUT]}}),
    ],
)  # fmt: skip
def test_closed_objects_have_the_properties_that_they_name(schema: Any, expected: Any) -> None:
    assert closed(schema) == expected
