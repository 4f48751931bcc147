"""The items of a response's conversation: what `parse_response` made messages of, as items again."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Json = dict[str, Any]
_ITEM_ID = re.compile(r"(?:msg|rs|fc)_(.+)_(?:in)?\d+")


def items_of(messages: Sequence[Mapping[str, Any]], name: str) -> list[Json]:
    """The items of messages that a chat body has, in their order. `name` is the response's id without its prefix."""
    items: list[Json] = []
    for message in messages:
        for prefix, item in _items_in(message):
            items.append({"id": f"{prefix}_{name}_in{len(items)}", "status": "completed", **item})
    return items


def is_reference(item: Any) -> bool:
    """Whether an item of the input names a stored one by its id. OpenAI's clients may leave out the type."""
    return isinstance(item, Mapping) and (
        item.get("type") == "item_reference" or (item.get("type") is None and item.keys() - {"type"} == {"id"})
    )


def response_of(item_id: Any) -> str:
    """The id, without its prefix, of the response that an item belongs to. Empty if it is not the id of an item."""
    found = _ITEM_ID.fullmatch(item_id) if isinstance(item_id, str) else None
    return found[1] if found else ""


def _items_in(message: Mapping[str, Any]) -> Iterator[tuple[str, Json]]:
    """Each item of a message, after the prefix of its id."""
    role, texts = message["role"], _texts(message.get("content"))
    if role == "tool":
        call = str(message.get("tool_call_id") or "")
        yield "fc", {"type": "function_call_output", "call_id": call, "output": "".join(texts)}
        return
    if message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        yield "rs", {"type": "reasoning", "summary": [], "content": content}
    if role == "assistant":
        parts: list[Json] = [
            {"type": "output_text", "text": text, "annotations": [], "logprobs": []} for text in texts if text
        ]
    else:
        parts = [{"type": "input_text", "text": text} for text in texts]
    if parts or role != "assistant":
        yield "msg", {"type": "message", "role": role, "content": parts}
    for call in message.get("tool_calls") or ():
        yield "fc", {"type": "function_call", "call_id": call["id"], **call["function"]}


def _texts(content: Any) -> list[str]:
    """The texts of a message's content: one text, or its parts."""
    if isinstance(content, list):
        return [str(part.get("text") or "") for part in content]
    return [str(content or "")]
