"""pydantic's validation errors to one InvalidRequest that names field, limit and value.

Only the first error is reported: one clear sentence is easier to act on than a list.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from ktqueue.core.errors import InvalidRequest
from ktqueue.core.short_repr import short_repr

Body = TypeVar("Body", bound=BaseModel)


class StrictBody(BaseModel):
    """A part of a body: no value is converted to another type, and fields that we do not have are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


def _number(limit: float) -> str:
    return (
        str(limit) if isinstance(limit, int) else f"{limit:.15g}"
    )  # the default of six digits would show another limit


def _choice(expected: str) -> str:
    return f"one of {expected}" if " or " in expected else expected


_EXPECTED: dict[str, Callable[[dict[str, Any]], str]] = {
    "missing": lambda _: "present",
    "string_type": lambda _: "a string",
    "int_type": lambda _: "an integer",
    "int_from_float": lambda _: "an integer",
    "int_parsing": lambda _: "an integer",
    "int_parsing_size": lambda _: "an integer",
    "float_type": lambda _: "a number",
    "finite_number": lambda _: "a finite number",
    "bool_type": lambda _: "true or false",
    "list_type": lambda _: "a list",
    "dict_type": lambda _: "an object",
    "model_type": lambda _: "an object",
    "model_attributes_type": lambda _: "an object",
    "union_tag_invalid": lambda ctx: f"of a type that is one of {ctx['expected_tags']}",
    "union_tag_not_found": lambda _: "an object with a type",
    "greater_than": lambda ctx: f"greater than {_number(ctx['gt'])}",
    "greater_than_equal": lambda ctx: f"at least {_number(ctx['ge'])}",
    "less_than": lambda ctx: f"less than {_number(ctx['lt'])}",
    "less_than_equal": lambda ctx: f"at most {_number(ctx['le'])}",
    "too_short": lambda ctx: f"a list of at least {ctx['min_length']} entries",
    "too_long": lambda ctx: f"at most {ctx['max_length']} entries",
    "string_too_short": lambda ctx: f"at least {ctx['min_length']} characters",
    "string_too_long": lambda ctx: f"at most {ctx['max_length']} characters",
    "literal_error": lambda ctx: _choice(ctx["expected"]),
    "enum": lambda ctx: _choice(ctx["expected"]),
    "extra_forbidden": lambda _: "left out: no such field is known",
}


def must_be(expected: str, value: Any) -> PydanticCustomError:
    """An error that a validator raises: the field `must be {expected}, got {value}`."""
    return PydanticCustomError(
        "ktqueue", "must be {expected}, got {shown}", {"expected": expected, "shown": short_repr(value)}
    )


def is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested more than `levels` deep."""
    level = [value]
    for _ in range(levels):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return False
    return True


def parse(kind: type[Body], body: Mapping[str, Any], names: Mapping[str, str] | None = None) -> Body:
    """A validated body of `kind`. `names`: the client's names of fields that have other names in `kind`.

    Raises InvalidRequest naming the dotted field, limit and value.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise explain(error.errors(include_url=False)[0], names or {}) from None


def explain(detail: ErrorDetails, names: Mapping[str, str]) -> InvalidRequest:
    """One error of pydantic as an InvalidRequest."""
    first, *rest = (str(part) for part in detail["loc"])
    param = ".".join((names.get(first, first), *rest))
    context = detail.get("ctx", {})
    if detail["type"] == "missing":
        return InvalidRequest(f"{param} is missing", param=param, limit="present")
    if detail["type"] == "ktqueue":
        expected = str(context["expected"])
    else:
        describe = _EXPECTED.get(detail["type"])
        expected = describe(context) if describe else detail["msg"]
        if detail["type"] == "int_type" and type(detail["input"]) is float and abs(detail["input"]) >= 1 << 63:
            expected = "an integer of at most 64 bits"  # the reader of JSON makes a larger one a float
    value = context["shown"] if detail["type"] == "ktqueue" else short_repr(detail["input"])
    bounds = [context[key] for key in ("ge", "gt", "le", "lt", "min_length", "max_length") if key in context]
    limit = bounds[0] if bounds else expected
    number = detail["input"] if type(detail["input"]) in (int, float) else value
    return InvalidRequest(f"{param} must be {expected}, got {value}", param=param, limit=limit, value=number)
