"""The tools of POST /v1/responses as those of a chat.

A namespace groups functions. A chat has none, so the name of the namespace becomes a part of each function's name.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ktqueue.core.codec import Json
from ktqueue.core.errors import InvalidRequest
from ktqueue.openai.client_names import Names
from ktqueue.openai.common_fields import shallow
from ktqueue.openai.errors import UnsupportedParameter
from ktqueue.openai.validation import StrictBody

MAX_TOOLS = 128
_SEARCH = "web_search"  # web_search_preview and dated names begin with it
_DEFAULTS = {"parameters": None, "strict": None}


class _NamedTool(StrictBody):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(_NamedTool):
    """A function of a namespace."""

    type: Literal["function"]


class OfferedTool(_NamedTool):
    """A function that the model may call, or a namespace of them."""

    type: Literal["function", "namespace"]
    tools: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS)


ToolList = Annotated[list[Annotated[OfferedTool, BeforeValidator(shallow)]], Field(max_length=MAX_TOOLS)]


def without_web_search(tools: Sequence[Any]) -> list[Any]:
    """The tools without a web search that stands beside functions.

    Agents such as Codex always offer it. The model does not learn of it, so it calls the functions alone. Other hosted
    tools are what a request is about. Raises UnsupportedParameter for them.
    """
    kinds = [tool.get("type") if isinstance(tool, dict) else None for tool in tools]
    has_functions = "function" in kinds or "namespace" in kinds
    kept = []
    for place, (tool, kind) in enumerate(zip(tools, kinds, strict=True)):
        if not isinstance(kind, str) or kind in ("function", "namespace"):
            kept.append(tool)
        elif not (kind.startswith(_SEARCH) and has_functions):
            raise UnsupportedParameter(
                f"tools[{place}].type must be function or namespace, got {kind[:80]!r}: there are no hosted tools",
                param=f"tools[{place}].type",
                limit="function, namespace",
                value=kind[:80],
            )
    return kept


def chat_tools(tools: Sequence[OfferedTool]) -> tuple[list[Json], Names]:
    """The tools of a chat body, and how errors name their fields. Raises InvalidRequest if they are too many."""
    functions: list[Json] = []
    names: list[tuple[str, str]] = []
    for where, namespace, tool in _functions(tools):
        if len(functions) == MAX_TOOLS:
            message = f"tools must have at most {MAX_TOOLS} functions, also in namespaces"
            raise InvalidRequest(message, param="tools", limit=MAX_TOOLS, value=MAX_TOOLS + 1)
        names.append((rf"tools\.{len(functions)}\.function", where))
        fields = tool.model_dump(exclude={"type", "tools"}, exclude_none=True)
        functions.append({"type": "function", "function": {**fields, "name": function_name(namespace, tool.name)}})
    return functions, names


def _functions(tools: Sequence[OfferedTool]) -> Iterator[tuple[str, str | None, _NamedTool]]:
    """The place of each function in the body, its namespace and the function."""
    for place, tool in enumerate(tools):
        if tool.type == "function":
            yield f"tools[{place}]", None, tool
        else:
            for inner, function in enumerate(tool.tools or ()):
                yield f"tools[{place}].tools[{inner}]", tool.name, function


def function_name(namespace: Any, name: Any) -> Any:
    """The name that a function has in a chat."""
    return f"{namespace}__{name}" if namespace else name


def called_function(tools: Sequence[Mapping[str, Any]], name: str) -> Json:
    """The fields of an item that name a called function. `tools` are those of `tools_json`."""
    for tool in tools:
        for function in tool.get("tools") or ():
            if function_name(tool["name"], function["name"]) == name:
                return {"name": function["name"], "namespace": tool["name"]}
    return {"name": name}


def tools_json(tools: Sequence[OfferedTool]) -> list[Json]:
    """The tools as an answer repeats them."""
    return [{**(_DEFAULTS if tool.type == "function" else {}), **tool.model_dump(exclude_none=True)} for tool in tools]
