"""Tool calls of answers in OpenAI's form, and what of a request's tools the reader of its answer must know."""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from ktqueue.answers.parts import AnswerToolCall
from ktqueue.answers.xml_reader import NULLABLE
from ktqueue.core.codec import Json
from ktqueue.openai.choices import Delta

MAX_TYPED = 256  # parameters whose type is kept with a job


def call_id(answer_id: str, choice: int, call: AnswerToolCall) -> str:
    """The id of a tool call: the model's own, else one that every reader of the answer computes alike."""
    digest = hashlib.blake2b(f"{answer_id}/{choice}/{call.place}".encode(), digest_size=12)
    return call.id or f"call_{digest.hexdigest()}"


def tool_calls_json(choice: Delta, answer_id: str) -> list[Json]:
    """All tool calls of a whole choice."""
    return [
        {
            "id": call_id(answer_id, choice.index, call),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in choice.tool_calls
    ]


def tool_call_delta(choice: int, call: AnswerToolCall, answer_id: str) -> Json:
    """A piece of a tool call in a stream. Its id, type and name are in the first piece only."""
    if not call.name:
        return {"index": call.place, "function": {"arguments": call.arguments}}
    return {
        "index": call.place,
        "id": call_id(answer_id, choice, call),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def call_arguments(text: str) -> Json:
    """The arguments of a call as an object. If they end too early, it has what was written of them."""
    try:
        value = from_json(text, allow_partial="trailing-strings") if text else {}
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def parameter_types(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Which parameters of which functions are strings: the formats with tags do not show that."""
    types: dict[str, dict[str, str]] = {}
    left = MAX_TYPED
    for tool in tools:
        function = tool.get("function") or {}
        properties = (function.get("parameters") or {}).get("properties")
        named = properties.items() if isinstance(properties, dict) else ()
        kinds = {name: kind for name, schema in named if (kind := _kind_of_string(schema))}
        strings = dict(itertools.islice(kinds.items(), left))
        left -= len(strings)
        if strings:
            types[str(function.get("name"))] = strings
    return types


def _kind_of_string(schema: Any) -> str:
    """How a schema describes a string: `string`, `string or null`, or empty if it does not."""
    if not isinstance(schema, dict):
        return ""
    choices = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(schema.get("type"), list):
        choices = [{"type": kind} for kind in schema["type"]]
    if isinstance(choices, list):
        others = [choice for choice in choices if not (isinstance(choice, dict) and choice.get("type") == "null")]
        return NULLABLE if len(others) == 1 and _is_string(others[0]) else ""
    return "string" if _is_string(schema) else ""


def _is_string(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    values = schema.get("enum")
    is_enum = isinstance(values, list) and bool(values) and all(isinstance(value, str) for value in values)
    return is_enum or schema.get("type") == "string"
