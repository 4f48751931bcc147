"""Chat messages: validated, then translated to the plain form that chat templates read.

Content parts of type text become one string, and the role `developer` becomes `system`. The arguments of tool calls are
JSON in a string over HTTP, and become objects, as templates expect.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ktqueue.core.codec import CodecError, loads
from ktqueue.openai.common_fields import shallow
from ktqueue.openai.validation import must_be

MAX_MESSAGES = 4096
MAX_TOOL_CALLS = 1024  # of one message
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class TextPart(BaseModel):
    """One text part of a message's content."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text"]
    text: str


def _content(value: Any) -> Any:
    if isinstance(value, list):
        for part in value:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise must_be('a string or a list of {"type": "text", "text": ...} parts', part)
    elif value is not None and not isinstance(value, str):
        raise must_be("a string or a list of text parts", value)
    return value


Content = Annotated[str | list[TextPart] | None, BeforeValidator(_content)]


def _arguments(value: Any) -> Any:
    if not isinstance(value, str | dict):
        raise must_be("a string of JSON, or an object", value)
    return shallow(value)


def _not_supported(value: Any) -> None:
    if value is not None and value is not False and value not in ("", [], {}):
        raise must_be("left out: it would not reach the prompt", value)


NotSupported = Annotated[None, BeforeValidator(_not_supported)]


class FunctionCall(BaseModel):
    """The function that an earlier assistant message called."""

    model_config = ConfigDict(strict=True, extra="ignore")

    name: str
    arguments: Annotated[str | dict[str, Any], BeforeValidator(_arguments)] = ""


class ToolCall(BaseModel):
    """A tool call in an earlier assistant message."""

    model_config = ConfigDict(strict=True, extra="ignore")

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: Role
    content: Content = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_TOOL_CALLS)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # Fields of OpenAI and others whose content would not reach the prompt.
    function_call: NotSupported = None
    refusal: NotSupported = None
    audio: NotSupported = None
    images: NotSupported = None
    prefix: NotSupported = None

    def plain(self) -> dict[str, Any]:
        """The message as a chat template reads it."""
        text = self.content
        if isinstance(text, list):
            text = "\n".join(part.text for part in text)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text or ""}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        if self.tool_calls:
            message["tool_calls"] = [_plain_call(call) for call in self.tool_calls]
        return message


class FunctionDefinition(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolDefinition(BaseModel):
    """A tool that the chat template offers to the model."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["function"]
    function: FunctionDefinition


Tool = Annotated[ToolDefinition, BeforeValidator(shallow)]


def _plain_call(call: ToolCall) -> dict[str, Any]:
    arguments: Any = call.function.arguments
    if isinstance(arguments, str) and arguments.startswith("{"):
        try:
            arguments = shallow(loads(arguments))
        except (CodecError, ValueError):
            arguments = call.function.arguments  # not JSON: the template gets the text unchanged
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}
