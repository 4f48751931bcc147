"""Chat messages: validated, then translated to the plain form that chat templates read.

Content parts of type text or refusal become one string, and the role `developer` becomes `system`. The arguments of
tool calls are JSON in a string over HTTP, and become objects, as templates expect. OpenAI's old messages about
functions become tool calls and tool results. Roles of other names are left to the template.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import from_json

from ktqueue.core.codec import CodecError, loads
from ktqueue.openai.common_fields import shallow
from ktqueue.openai.validation import StrictBody, must_be

MAX_MESSAGES = 4096
MAX_TOOL_CALLS = 1024  # of one message
Role = Annotated[str, Field(min_length=1, max_length=64)]

_ROLES = {"developer": "system", "function": "tool"}


class TextPart(StrictBody):
    """One text part of a message's content."""

    type: Literal["text"]
    text: str


def _content(value: Any) -> Any:
    if isinstance(value, list):
        return [_text_part(part) for part in value]
    if value is not None and not isinstance(value, str):
        raise must_be("a string or a list of text parts", value)
    return value


def _text_part(part: Any) -> Any:
    """A part of text. OpenAI's histories also have parts of type refusal, which are text that the model wrote."""
    kind = part.get("type") if isinstance(part, dict) else None
    name = "refusal" if kind == "refusal" else "text"
    if kind != name or not isinstance(part.get(name), str):
        shown = kind if isinstance(kind, str) and kind != name else part
        raise must_be('a string or a list of {"type": "text", "text": ...} parts: only text is read', shown)
    return {"type": "text", "text": part[name]} if kind == "refusal" else part


Content = Annotated[str | list[TextPart] | None, BeforeValidator(_content)]


def _arguments(value: Any) -> Any:
    if not isinstance(value, str | dict):
        raise must_be("a string of JSON, or an object", value)
    return shallow(value)


def _not_supported(value: Any) -> None:
    if value is not None and value is not False and value not in ("", [], {}):
        raise must_be("left out: it would not reach the prompt", value)


NotSupported = Annotated[None, BeforeValidator(_not_supported)]


class FunctionCall(StrictBody):
    """The function that an earlier assistant message called."""

    name: str
    arguments: Annotated[str | dict[str, Any], BeforeValidator(_arguments)] = ""


class ToolCall(StrictBody):
    """A tool call in an earlier assistant message."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(StrictBody):
    """One message of a conversation."""

    role: Role
    content: Content = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_TOOL_CALLS)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="The same as reasoning_content.")
    function_call: FunctionCall | None = Field(None, description="Old form of tool_calls.")
    # Fields of OpenAI and others whose content would not reach the prompt.
    refusal: NotSupported = None
    audio: NotSupported = None
    images: NotSupported = None
    prefix: NotSupported = None

    def plain(self) -> dict[str, Any]:
        """The message as a chat template reads it."""
        text = self.content
        if isinstance(text, list):
            text = "\n".join(part.text for part in text)
        role = _ROLES.get(self.role, self.role)
        message: dict[str, Any] = {"role": role, "content": text or ""}
        values = (
            ("name", self.name),
            ("tool_call_id", self.name if self.role == "function" else self.tool_call_id),
            ("reasoning_content", self.reasoning if self.reasoning_content is None else self.reasoning_content),
        )
        message |= {name: value for name, value in values if value is not None}
        calls = list(self.tool_calls or ())
        if self.function_call is not None:
            calls.append(ToolCall(id=self.function_call.name, function=self.function_call))
        if calls:
            message["tool_calls"] = [_plain_call(call) for call in calls]
        return message


class FunctionDefinition(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="true: arguments match the schema.")


class ToolDefinition(StrictBody):
    """A tool that the chat template offers to the model."""

    type: Literal["function"]
    function: FunctionDefinition


Tool = Annotated[ToolDefinition, BeforeValidator(shallow)]


def _beginning(arguments: str) -> Any:
    """The members of an object that was cut off, as `max_tokens` does. Other text goes to the template unchanged."""
    try:
        return shallow(from_json(arguments, allow_partial="trailing-strings"))
    except ValueError:
        return arguments


def _plain_call(call: ToolCall) -> dict[str, Any]:
    text = call.function.arguments
    arguments: Any = text
    if isinstance(text, str) and text.startswith("{"):
        try:
            arguments = shallow(loads(text))
        except (CodecError, ValueError):
            arguments = _beginning(text)
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}
