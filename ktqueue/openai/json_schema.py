"""JSON schemas as grammars: which keywords are honoured, and where a schema asks for more than that.

The vocabulary is that of draft 2020-12 (https://json-schema.org/draft/2020-12). A keyword that is neither honoured nor
an annotation is refused with its JSON pointer, so no part of a schema is ignored.
"""

import difflib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ktqueue.answers.grammar_errors import TOO_COMPLEX, GrammarRefused
from ktqueue.answers.grammar_process import check_syntax
from ktqueue.core.errors import InvalidRequest
from ktqueue.core.short_repr import short_repr
from ktqueue.openai.validation import is_deeper

MAX_SCHEMA_DEPTH = 100  # levels of lists and objects
MAX_SCHEMA = 1 << 19  # characters of its JSON
MAX_COUNT = (1 << 32) - 1  # what a repetition in the library's patterns can count
MAX_BOUND = 10**18  # beyond 64 bits the library has no pattern of a range
SEARCH_SECONDS = 0.2  # for the place of a problem
WHITESPACE = r"( |\r?\n[ \t]{0,32})"  # one space, or a new line with its indentation: no answer ends in endless spaces

HONOURED = frozenset(
    (
        "$ref", "additionalItems", "additionalProperties", "allOf", "anyOf", "const", "enum", "exclusiveMaximum",
        "exclusiveMinimum", "format", "items", "maxItems", "maxLength", "maxProperties", "maximum", "minItems",
        "minLength", "minProperties", "minimum", "multipleOf", "oneOf", "pattern", "patternProperties", "prefixItems",
        "properties", "required", "type",
    )
)  # fmt: skip
ANNOTATIONS = frozenset(
    (
        "$anchor", "$comment", "$defs", "$id", "$schema", "contentEncoding", "contentMediaType", "contentSchema",
        "default", "definitions", "deprecated", "description", "discriminator", "example", "examples", "externalDocs",
        "id", "readOnly", "title", "writeOnly", "xml",
    )
)  # fmt: skip
# Keywords that are not honoured, with the values that ask for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "minContains": (0,),
}
_YEAR_29 = "(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)-02-29"
_DATE = (
    f"(?:{_YEAR_29}|[1-9][0-9]{{3}}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])))"
)
# RFC 3339 without leap seconds, which are valid on a few dates only.
_OFFSET = "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?{_OFFSET}"
# The library's own patterns for these allow the 29th of February in each year.
_PATTERNS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}"}
FORMATS = frozenset(("duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", *_PATTERNS))
_ONE_OF = "oneOf needs options that differ in type or in the constant of a required property; anyOf does not"
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_NAMING = frozenset(("$ref", "anyOf", "oneOf", "properties"))  # keywords that may name properties of an object
_OPENING = frozenset(("additionalProperties", "patternProperties", "unevaluatedProperties"))
_COUNTS = frozenset(("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"))
_BOUNDS = frozenset(("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"))
_SINGLE = ("items", "additionalItems", "additionalProperties")


def lark_of_schema(schema: Any, param: str, *, whitespace: str | None = WHITESPACE) -> str:
    """A grammar of the JSON documents that a schema allows, with closed objects: see `closed`.

    `whitespace` is a pattern for the space that may stand between two parts; None: none. Raises InvalidRequest that
    names `param` and the place in the schema.
    """
    if not isinstance(schema, dict):
        raise _wrong(param, "", f"must be a JSON schema, which is an object, got {short_repr(schema)}")
    if is_deeper(schema, MAX_SCHEMA_DEPTH):
        raise _wrong(param, "", f"must be nested at most {MAX_SCHEMA_DEPTH} levels deep")
    style: dict[str, Any] = {"whitespace_flexible": False}
    if whitespace is not None:
        style = {"whitespace_pattern": whitespace}
    prepared = {"x-guidance": style, **_prepared(closed(schema), param, "")}
    lark = _lark(prepared)
    if len(lark) > MAX_SCHEMA:
        limit = f"at most {MAX_SCHEMA} characters"
        raise InvalidRequest(f"{param} must have {limit}, got {len(lark)}", param=param, limit=limit, value=len(lark))
    reason = _reason(prepared)
    if reason:
        pointer, part = _place(prepared, reason)
        if reason == TOO_COMPLEX and (least := part.get("minLength")):
            _check_min_length(part, least, param, f"{pointer}/minLength")
        raise _wrong(param, pointer, f"cannot be used: {reason}")
    return lark


def closed(schema: Any) -> Any:
    """A copy of a schema whose objects have only the properties that they name, where nothing else is said.

    llama.cpp, xgrammar and Ollama read schemas so. A schema that describes an object in several parts stays open, since
    each part names some of the properties. So does an object that requires a property without naming it.
    """
    return schema if _is_in_parts(schema) else _closed(schema)


def _is_in_parts(schema: Any) -> bool:
    if isinstance(schema, dict):
        combined = schema.get("allOf")
        parts = len(_NAMING & set(schema)) + (len(combined) if isinstance(combined, list) else 0)
        if parts > 1:
            return True
    return any(_is_in_parts(part) for _, part in _parts(schema))


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    copy = {key: _inner(key, value, lambda part, _: _closed(part), "") for key, value in schema.items()}
    named, required = copy.get("properties"), copy.get("required", [])
    if not (isinstance(named, dict) and isinstance(required, list)) or _OPENING & set(copy):
        return copy
    is_named = all(_is_text(name) and name in named for name in required)
    return {**copy, "additionalProperties": False} if is_named else copy


def _lark(schema: Any) -> str:
    return f"start: %json {json.dumps(schema, ensure_ascii=False)}"


def _reason(schema: Any) -> str:
    """Why the library refuses a schema, empty if it does not."""
    try:
        check_syntax(_lark(schema))
    except GrammarRefused as refused:
        reason = refused.reason.rpartition("failed to compile JSON schema: ")[2]
        return _ONE_OF if reason.startswith("oneOf constraints") else reason
    return ""


def _check_min_length(schema: Mapping[str, Any], least: int, param: str, place: str) -> None:
    """Raise InvalidRequest if a smaller `minLength` would do: beside a pattern, a large one takes too much work.

    Does nothing if the largest that would do is not found quickly.
    """
    latest, most, refused = time.monotonic() + SEARCH_SECONDS, -1, int(least)
    while refused - most > 1:
        if time.monotonic() > latest:
            return
        middle = (most + refused) // 2
        if _reason({**schema, "minLength": middle}):
            refused = middle
        else:
            most = middle
    if most >= 0:
        message = f"{param}#{place} must be at most {most} beside the pattern or format, got {least}"
        raise InvalidRequest(message, param=param, limit=most, value=least)


def _place(schema: Any, reason: str) -> tuple[str, Any]:
    """The innermost part that is refused for the same reason, as far as it is found quickly, and its JSON pointer."""
    pointer = ""
    latest = time.monotonic() + SEARCH_SECONDS
    while True:
        for inner, part in _parts(schema):
            if time.monotonic() > latest:
                return pointer, schema
            if isinstance(part, dict) and _reason(part) == reason:
                pointer, schema = pointer + inner, part
                break
        else:
            return pointer, schema


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas inside a schema, with their pointers from there."""
    if not isinstance(schema, dict):
        return
    for key in _MAPS:
        if isinstance(inner := schema.get(key), dict):
            yield from ((f"/{_escaped(key)}/{_escaped(name)}", part) for name, part in inner.items())
    for key in (*_LISTS, "items"):
        if isinstance(inner := schema.get(key), list):
            yield from ((f"/{key}/{place}", part) for place, part in enumerate(inner))
    for key in _SINGLE:
        if isinstance(inner := schema.get(key), dict):
            yield f"/{key}", inner


def _prepared(schema: Any, param: str, pointer: str) -> Any:
    """A copy of a schema without keywords that ask for nothing, and with our patterns of formats.

    Raises InvalidRequest for a keyword that is not honoured, and for a number out of range.
    """
    if not isinstance(schema, dict):
        return schema
    copy: dict[str, Any] = {}
    for key, value in schema.items():
        place = f"{pointer}/{_escaped(key)}"
        if key in _NEUTRAL and any(value == neutral and type(value) is type(neutral) for neutral in _NEUTRAL[key]):
            continue
        if key == "nullable" and isinstance(value, bool):
            continue
        if key not in HONOURED and key not in ANNOTATIONS:
            if key.startswith("x-") and key != "x-guidance":
                continue
            raise _wrong(param, place, f"is not supported{_hint(key)}")
        if key in _COUNTS or key in _BOUNDS:
            value = _number(key, value, param, place)
        if key == "minProperties":
            _check_min_properties(schema, param, place)
        copy[key] = _inner(key, value, lambda part, inner: _prepared(part, param, inner), place)
    if "format" in copy:
        _replace_format(copy, param, f"{pointer}/format")
    return _or_null(copy) if schema.get("nullable") is True else copy


def _inner(key: str, value: Any, prepare: Callable[[Any, str], Any], place: str) -> Any:
    """The value of a keyword, with `prepare` applied to the schemas in it."""
    if key in _MAPS and isinstance(value, dict):
        return {name: prepare(part, f"{place}/{_escaped(name)}") for name, part in value.items()}
    if key in (*_LISTS, "items") and isinstance(value, list):
        return [prepare(part, f"{place}/{number}") for number, part in enumerate(value)]
    return prepare(value, place) if key in _SINGLE else value


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with null beside what it allows, as `nullable` of OpenAPI 3.0 asks."""
    kinds = schema.get("type")
    if "type" not in schema or {"enum", "const"} & set(schema):
        return {"anyOf": [schema, {"type": "null"}]}
    return {**schema, "type": [*(kinds if isinstance(kinds, list) else [kinds]), "null"]}


def _replace_format(schema: dict[str, Any], param: str, place: str) -> None:
    name = schema["format"]
    if not isinstance(name, str) or name not in FORMATS:
        raise _wrong(param, place, f"is not supported: {short_repr(name)}; formats are {', '.join(sorted(FORMATS))}")
    if name in _PATTERNS:
        del schema["format"]
        pattern = {"pattern": f"^{_PATTERNS[name]}$"}
        if "pattern" in schema:
            schema["allOf"] = [*schema.get("allOf", []), pattern]
        else:
            schema |= pattern


def _number(key: str, value: Any, param: str, place: str) -> int | float:
    """The value of a keyword that is a number. A count may be written as 2.0, which JSON schemas call an integer."""
    kind, least, most = ("an integer", 0, MAX_COUNT) if key in _COUNTS else ("a number", -MAX_BOUND, MAX_BOUND)
    if type(value) in (int, float) and least <= value <= most and (key in _BOUNDS or value == int(value)):
        return int(value) if key in _COUNTS else value
    shown = short_repr(value)
    message = f"{param}#{place} must be {kind} from {least} to {most}, got {shown}"
    raise InvalidRequest(message, param=param, limit=most, value=shown)


def _check_min_properties(schema: Mapping[str, Any], param: str, place: str) -> None:
    required = schema.get("required")
    least = schema["minProperties"]
    certain = max(1, len(set(required)) if isinstance(required, list) and all(map(_is_text, required)) else 0)
    if isinstance(least, int | float) and least > certain:
        # The grammar does not see that a key is repeated, so it cannot count different ones.
        raise _wrong(param, place, f"must be at most {certain}, the number of required properties (or 1), got {least}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _hint(key: str) -> str:
    near = difflib.get_close_matches(key, HONOURED - {"$ref"}, n=1, cutoff=0.75)
    return f" (did you mean {near[0]}?)" if near else ""


def _escaped(name: str) -> str:
    """A part of a JSON pointer. Source: RFC 6901, section 3."""
    return name.replace("~", "~0").replace("/", "~1")


def _wrong(param: str, pointer: str, problem: str) -> InvalidRequest:
    place = f"#{pointer}" if pointer else ""
    return InvalidRequest(f"{param}{place} {problem}"[:1000], param=param, limit=place or "a JSON schema")
