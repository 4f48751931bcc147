"""Fifty JSON schemas of the kinds that people send: nested, recursive, with references, patterns, formats, large."""

from typing import Any

Schema = dict[str, Any]


def _record(required: bool = True, **properties: Any) -> Schema:
    """An object with these properties and no others."""
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": list(properties)} if required else schema


def _list(items: Any, least: int = 0, most: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _text(most: int = 12, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def _union(*options: Schema) -> Schema:
    return {"oneOf": list(options)}


WHOLE: Schema = {"type": "integer", "minimum": -9, "maximum": 999}
SHARE: Schema = {"type": "number", "minimum": 0, "exclusiveMaximum": 1}
PERSON = _record(name=_text(), age={"type": "integer", "minimum": 0, "maximum": 130})
NODE = "#/$defs/node"
FORMATS = ("date", "time", "date-time", "email", "hostname", "ipv4", "ipv6", "uuid", "duration")
PATTERNS = (
    "^[A-Z]{3}-[0-9]{4}$", "^(red|green|blue)+$", "^[a-f0-9]{8}$", r"^\+[1-9][0-9]{5,11}$", "^[^\"\\\\\\s]{1,8}$",
    "^(ab?c|d{2,3}e*)$", "^[äöüß]{2,5}$", r"^\d{1,3}(\.\d{1,3}){3}$", "^#[0-9A-F]{6}$", "[0-9]$",
)  # fmt: skip


def _tree() -> Schema:
    leaf = {"anyOf": [{"$ref": NODE}, {"type": "null"}]}
    return {"$ref": NODE, "$defs": {"node": _record(value=WHOLE, left=leaf, right={"type": "null"})}}


def _expression() -> Schema:
    number = _record(kind={"const": "number"}, value=WHOLE)
    total = _record(kind={"const": "sum"}, parts=_list({"$ref": "#/$defs/term"}, 1, 2))
    return {"$ref": "#/$defs/term", "$defs": {"term": _union(number, total)}}


AWKWARD: dict[str, Any] = {'quo"te': {"type": "null"}, "sl/ash~": WHOLE}  # names of properties


def _menu() -> Schema:
    entry = _record(title=_text(8), entries=_list({"$ref": "#/definitions/entry"}, 0, 2))
    return {"$ref": "#/definitions/entry", "definitions": {"entry": entry}}


def _nested(depth: int) -> Schema:
    schema: Schema = _record(end={"type": "boolean"})
    for level in range(depth):
        properties: dict[str, Any] = {f"level_{level}": schema}
        schema = _record(**properties)
    return schema


def _large(properties: int, *, required: bool) -> Schema:
    kinds = ({"type": "boolean"}, WHOLE, _text(5), {"enum": ["a", "b", None]}, {"type": "null"})
    return _record(required=required, **{f"property_{i}": kinds[i % len(kinds)] for i in range(properties)})


SCHEMAS: tuple[Schema, ...] = (
    {"type": "boolean"},
    {"type": "null"},
    WHOLE,
    SHARE,
    _text(),
    {"enum": ["fox", "crow", 7, None, True, [1, 2], {"a": "b"}]},
    {"const": {"käse": ["🧀", "\n", "\\", '"']}},
    _list(WHOLE, 2, 5),
    _list(_list({"type": "boolean"}, 1, 3), 1, 3),
    PERSON,
    _record(people=_list(PERSON, 1, 3)),
    _record(required=False, a=WHOLE, b=_text(), c={"type": "boolean"}),
    {**_record(required=False, a=WHOLE, b=_text(), c=SHARE), "required": ["b"]},
    {**_record(required=False, a=WHOLE, b=_text()), "minProperties": 1},
    {"type": "object", "additionalProperties": WHOLE, "maxProperties": 1},
    {"type": "object", "patternProperties": {"^x_[a-z]{1,5}$": WHOLE}, "additionalProperties": False},
    _tree(),
    _expression(),
    _menu(),
    _nested(12),
    _large(60, required=True),
    _large(200, required=False),
    {"type": "array", "prefixItems": [WHOLE, _text(), {"type": "boolean"}], "items": False, "minItems": 3},
    {"allOf": [_record(required=False, a=WHOLE, b=WHOLE), {"required": ["a"]}, {"properties": {"a": {"minimum": 5}}}]},
    {"anyOf": [WHOLE, _text(5), _list(WHOLE, 1, 2), PERSON]},
    _union(_record(kind={"const": "cat"}, lives=WHOLE), _record(kind={"const": "dog"}, name=_text())),
    _record(ort=_text(10), größe=WHOLE, 名前=_text(6), **AWKWARD),
    {"type": ["integer", "null", "boolean"]},
    {"type": "integer", "multipleOf": 7, "minimum": -70, "maximum": 7000},
    {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 10},
    {"type": "integer", "exclusiveMinimum": 99, "exclusiveMaximum": 105},
    *({"type": "string", "pattern": pattern, "maxLength": 20} for pattern in PATTERNS),
    *(_text(40, format=name) for name in FORMATS),  # else a model that babbles never ends an address
)
