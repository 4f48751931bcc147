"""Messages made of content blocks, and their translation to chat messages."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from ktqueue.core.codec import Json
from ktqueue.openai.common_fields import FreeObject
from ktqueue.openai.messages import MAX_MESSAGES
from ktqueue.openai.validation import StrictBody, must_be

MAX_BLOCKS = 1024  # of one message


class TextBlock(StrictBody):
    """A block of text. `cache_control` and `citations` change nothing."""

    type: Literal["text"]
    text: str


class ToolUseBlock(StrictBody):
    """An earlier tool call of the model."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: FreeObject


class ThinkingBlock(StrictBody):
    """What the model thought before. Its signature is not checked."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(StrictBody):
    """Thoughts that another server encrypted. No prompt can have them."""

    type: Literal["redacted_thinking"]
    data: str


def _blocks(value: Any) -> Any:
    """A string is one block of text."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise must_be("a string or a list of blocks", value)
    return value


def _only_text(value: Any) -> Any:
    value = None if value is None else _blocks(value)
    for block in value or ():
        if not isinstance(block, dict) or block.get("type") != "text":
            raise must_be("a string or a list of text blocks: only text is served", block)
    return value


Text = Annotated[
    list[TextBlock],
    Field(max_length=MAX_BLOCKS),
    BeforeValidator(_only_text, json_schema_input_type=str | list[TextBlock]),
]


class ToolResultBlock(StrictBody):
    """What a tool returned. The model reads an error as it reads a result."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Text = Field(default_factory=list)
    is_error: bool | None = None


Block = Annotated[
    TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock | ToolResultBlock, Field(discriminator="type")
]
_ALLOWED = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


class InputMessage(StrictBody):
    """One message of the conversation. Instructions in the middle of it have the role system."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Block],
        Field(max_length=MAX_BLOCKS),
        BeforeValidator(_blocks, json_schema_input_type=str | Annotated[list[Block], Field(max_length=MAX_BLOCKS)]),
    ]

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> Self:
        allowed = _ALLOWED[self.role]
        if any(block.type not in allowed for block in self.content):
            raise must_be(f"made of blocks of type {', '.join(allowed)}", None)
        if not self.content and self.role != "assistant":
            raise must_be("a message whose content is not empty, or the assistant's", None)
        return self


InputMessages = Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


def text_parts(blocks: Sequence[TextBlock]) -> list[Json]:
    """Blocks of text as the content of a chat message."""
    return [{"type": "text", "text": block.text} for block in blocks]


def chat_messages(messages: Sequence[InputMessage]) -> list[Json]:
    """The same conversation as chat messages. A tool's result becomes a message of the role tool."""
    made: list[Json] = []
    names: dict[str, str] = {}  # of the functions that were called so far, by the ids of the calls
    for message in messages:
        if message.role == "assistant":
            made.append(_assistant(message.content, names))
        else:
            made += _said(message.role, message.content, names)
    return made


def _assistant(blocks: Sequence[Block], names: dict[str, str]) -> Json:
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    names.update((call.id, call.name) for call in calls)
    made: Json = {
        "role": "assistant",
        "content": text_parts([block for block in blocks if isinstance(block, TextBlock)]),
    }
    if thinking := "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)):
        made["reasoning_content"] = thinking
    if calls:
        made["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in calls
        ]
    return made


def _said(role: str, blocks: Sequence[Block], names: Mapping[str, str]) -> Iterator[Json]:
    """What the user or the system says, and results of tools. Neighbouring blocks of text are one message."""
    texts: list[TextBlock] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ToolResultBlock):
            if texts:
                yield {"role": role, "content": text_parts(texts)}
                texts = []
            result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": text_parts(block.content)}
            yield {**result, "name": names[block.tool_use_id]} if block.tool_use_id in names else result
    if texts:
        yield {"role": role, "content": text_parts(texts)}
