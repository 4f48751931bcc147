"""Which functions the model may or must call: the request's fields, and the grammar that follows from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ktqueue.answers.tool_grammar import Function, tool_grammar
from ktqueue.core.codec import Json
from ktqueue.core.errors import InvalidRequest
from ktqueue.core.model_card import ModelCard
from ktqueue.openai.errors import UnsupportedParameter
from ktqueue.openai.json_schema import lark_of_schema
from ktqueue.openai.messages import Tool, ToolDefinition
from ktqueue.openai.validation import StrictBody, must_be

MAX_TOOLS = 128
MODES = ("none", "auto", "required")


def _checked_choice(value: Any) -> Any:
    if value is None or value in MODES:
        return value
    if value == "any":  # Mistral's name
        return "required"
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = {"type": "function", **value}  # huggingface_hub leaves the type out
    wanted = 'none, auto, required, {"type": "function", ...} or {"type": "allowed_tools", ...}'
    if not isinstance(value, dict) or value.get("type") not in ("function", "allowed_tools"):
        raise must_be(wanted, value)
    names = _names_in(value)
    if not names or not all(isinstance(name, str) for name in names):
        raise must_be("an object that names functions", value)
    return value


def _names_in(choice: Mapping[str, Any]) -> list[Any]:
    """The functions that an object names, in OpenAI's forms for chats and for responses."""
    if choice.get("type") == "function":
        return [_inner(choice, "function").get("name")]
    tools = _inner(choice, "allowed_tools").get("tools")
    entries = tools if isinstance(tools, list) else []
    return [_inner(entry, "function").get("name") if isinstance(entry, dict) else None for entry in entries]


def _inner(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    inner = value.get(name)
    return inner if isinstance(inner, dict) else value


ToolChoice = Annotated[str | dict[str, Any] | None, BeforeValidator(_checked_choice)]


def _old_choice(value: Any) -> Any:
    if value is None or value in ("none", "auto"):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise must_be('none, auto or {"name": ...}', value)
    return value


class ToolFields(StrictBody):
    """Fields of tools in chats. `functions` and `function_call` are OpenAI's old names."""

    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS, description="Functions that the model may call.")
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call in an answer.")
    functions: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS, description="Old form of tools.")
    function_call: Annotated[str | dict[str, Any] | None, BeforeValidator(_old_choice)] = Field(
        None, description="Old form of tool_choice."
    )

    @property
    def has_old_functions(self) -> bool:
        """Whether tools came in the old form, which the answer has then too."""
        return bool(self.functions) and not self.tools


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The functions of a request: `tools` for the prompt, `parser` of their calls, `grammar` of the whole answer."""

    tools: tuple[Json, ...] = ()
    parser: str = ""
    grammar: str | None = None


def offer_tools(
    tools: Sequence[ToolDefinition], choice: str | Mapping[str, Any] | None, card: ModelCard | None, *,
    parallel: bool, answer: str | None, field: str = "tools",
) -> OfferedTools:  # fmt: skip
    """What a request offers. `answer`: the grammar of an answer without calls. `field`: the client's name for tools.

    Raises InvalidRequest for two functions of one name, for a choice of functions that are not offered, for a strict
    schema that cannot be honoured, and UnsupportedParameter if the calls of this model could not be read.
    """
    _check_names(tools, field)
    mode, names = _wish(choice)
    parallel = parallel and not (isinstance(choice, Mapping) and choice["type"] == "function")  # OpenAI: exactly one
    if not tools:
        if mode != "none" and choice is not None:
            raise InvalidRequest(
                "tool_choice is allowed only beside tools", param="tool_choice", limit="tools", value=str(choice)[:100]
            )
        return OfferedTools(grammar=answer)
    if mode == "none":
        return OfferedTools(grammar=answer)
    chosen = [tool for tool in tools if names is None or tool.function.name in names]
    missing = sorted((names or set()) - {tool.function.name for tool in chosen})
    if missing:
        raise InvalidRequest(
            f"tool_choice names a function that is not among tools: {missing[0]}",
            param="tool_choice", limit="a function of tools", value=missing[0],
        )  # fmt: skip
    if card is not None and not card.tool_parser:
        raise UnsupportedParameter(
            f"the model {card.name} cannot call tools: its chat template has no format of tool calls that is known",
            param=field,
            limit="another model, or --tool-call-parser of its worker",
        )
    parser = card.tool_parser if card else ""
    offered = chosen if mode == "auto" else tools  # a forced call is chosen by the grammar
    described = tuple(tool.model_dump(exclude_none=True) for tool in offered)
    is_strict = any(tool.function.strict for tool in chosen)
    if mode == "auto" and not is_strict and parallel and answer is None:
        return OfferedTools(described, parser)
    if card is None:
        return OfferedTools(described, parser, answer)
    functions = [Function(tool.function.name, tool.function.parameters or {}) for tool in chosen]
    grammar = tool_grammar(
        functions, parser, _Schemas(tools, field), forced=mode == "required", several=parallel, answer=answer
    )
    if grammar is None and mode == "required":
        raise UnsupportedParameter(
            f"calls in the format {parser} cannot be forced", param="tool_choice", limit="auto or none"
        )
    return OfferedTools(described, parser, grammar or answer)


def old_tools(fields: ToolFields) -> tuple[list[ToolDefinition], str | Mapping[str, Any] | None]:
    """The tools of a request and the choice among them, also from the old fields. Raises InvalidRequest."""
    if not fields.has_old_functions:
        if fields.function_call not in (None, "none") and not fields.tools:
            raise InvalidRequest(
                "function_call is allowed only beside functions", param="function_call", limit="functions"
            )
        return fields.tools or [], fields.tool_choice
    tools = []
    for index, function in enumerate(fields.functions or ()):
        if not isinstance(function.get("name"), str):
            raise InvalidRequest(
                f"functions.{index} must be an object with a name", param=f"functions.{index}", limit="a name"
            )
        tools.append(ToolDefinition.model_validate({"type": "function", "function": function}))
    called = fields.function_call
    return tools, {"type": "function", **called} if isinstance(called, dict) else called


def _wish(choice: str | Mapping[str, Any] | None) -> tuple[str, set[str] | None]:
    """The mode of a choice, and the functions to which it is restricted; None: all."""
    if choice is None or isinstance(choice, str):
        return choice or "auto", None
    names = {str(name) for name in _names_in(choice)}
    if choice["type"] == "function":
        return "required", names
    return ("required" if _inner(choice, "allowed_tools").get("mode") == "required" else "auto"), names


def _check_names(tools: Sequence[ToolDefinition], field: str) -> None:
    """Refuse different functions of one name, since a call could not say which it means.

    Anthropic, DeepSeek and Gemini refuse equal ones too. OpenAI does not, and frameworks send them.
    """
    first: dict[str, ToolDefinition] = {}
    for index, tool in enumerate(tools):
        name = tool.function.name
        if first.setdefault(name, tool) != tool:
            wanted = "a name that no other function has"
            raise InvalidRequest.must_be(f"{_place(field, index)}.name", wanted, name[:100])


def _place(field: str, index: int) -> str:
    """The field of a function. `field`: tools, or functions in OpenAI's old form."""
    return f"{field}.{index}" if field == "functions" else f"{field}.{index}.function"


class _Schemas:
    """Makes grammars of the functions' schemas. One that is not strict may be honoured in part."""

    def __init__(self, tools: Sequence[ToolDefinition], field: str) -> None:
        self._places = {
            tool.function.name: (f"{_place(field, index)}.parameters", bool(tool.function.strict))
            for index, tool in enumerate(tools)
        }

    def __call__(self, schema: Mapping[str, Any], name: str) -> str:
        param, is_strict = self._places[name]
        try:
            return lark_of_schema(dict(schema), param)
        except InvalidRequest:
            if is_strict:
                raise
            kind = schema.get("type")
            return lark_of_schema({"type": kind} if isinstance(kind, str) else {}, param)
