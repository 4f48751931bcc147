"""Renders a model's chat template with jinja2 in a sandbox.

It has the names and filters that templates written for transformers expect. Knows messages and tools as plain data, and
no tokenizer. Source of the conventions: transformers, "Writing a chat template", and utils/chat_template_utils.py.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

from ktqueue.core.codec import CodecError, loads
from ktqueue.core.errors import CheckpointError, InvalidRequest
from ktqueue.core.short_repr import short_repr

RESERVED = frozenset({"messages", "tools", "raise_exception", "strftime_now"})
KNOWN_ROLES = frozenset({"system", "user", "assistant"})  # all other roles are checked: do they reach the prompt?
_CUT = "END_OF_THE_LAST_MESSAGE "
_SHORT_IDS = re.compile(r"length\s*!=\s*9")  # Mistral's templates refuse ids of other lengths


class ChatTemplate:
    """One compiled template. `special` maps names such as `bos_token` to their text."""

    def __init__(self, source: str, special: Mapping[str, str], where: str) -> None:
        """Compile `source`. Raises CheckpointError that begins with `where` if it does not parse."""
        # Not the immutable sandbox: Kimi-K2's template appends to its own list. Templates get copies of the messages.
        environment = SandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants are not computed at compile time, which has no limits
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        environment.code_generator_class = _PlainCodeGenerator
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        self.special = dict(special)
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # jinja2 leaves some faults to Python's compiler: numbers, repeated arguments
            raise CheckpointError(f"{where}: the chat template does not parse: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Return the prompt text. It ends where the assistant's answer begins, if `add_generation_prompt`.

        With `continue_final_message` it ends with the last message's content instead, or with its reasoning if there is
        no content. Raises InvalidRequest if a message is malformed, if the template refuses the conversation, or if it
        leaves tools, tool calls, tool results or messages of other roles out of the prompt. Raises MemoryError.
        """
        if reserved := RESERVED & set(kwargs or {}):
            name = sorted(reserved)[0]
            raise InvalidRequest(
                f"chat_template_kwargs must not set {name!r}", param=f"chat_template_kwargs.{name}", limit="other names"
            )
        names: dict[str, Any] = {
            **self.special, "add_generation_prompt": add_generation_prompt, "documents": None, **(kwargs or {})
        }  # fmt: skip
        plain_messages = [_plain(index, message) for index, message in enumerate(messages)]
        if _SHORT_IDS.search(self.source):
            plain_messages = [_with_short_ids(message) for message in plain_messages]
        if ".thinking" in self.source:
            plain_messages = [_with_thinking(message) for message in plain_messages]
        conversation = _Conversation(plain_messages, tools, names, _cut_field(plain_messages, continue_final_message))
        failure: InvalidRequest | None = None
        for spelling in _spellings(conversation):
            try:
                return self._checked(spelling)
            except InvalidRequest as refusal:
                failure = failure or refusal
        assert failure is not None
        raise failure

    def _checked(self, conversation: "_Conversation") -> str:
        """The prompt of a conversation, none of which is left out. Raises InvalidRequest, MemoryError."""
        try:
            text = self._render(conversation)
        except (MemoryError, InvalidRequest):
            raise
        except Exception as error:  # a template is a program; its errors concern only this request
            raise InvalidRequest(
                f"the model's chat template refused the messages: {str(error)[:500]}", param="messages"
            ) from error
        if conversation.tools and self._is_same(text, conversation._replace(tools=())):
            raise _left_out("tools", "it does not support tools")
        for index, message in enumerate(conversation.messages):
            for name, other in _checked_fields(message):
                if self._is_same(text, conversation.with_field(index, name, other)):
                    is_tool = message["role"] in ("assistant", "tool", "function")
                    role = short_repr(message["role"])
                    raise _left_out(
                        f"messages[{index}].{name}",
                        "it does not support tools" if is_tool else f"it does not know the role {role}",
                    )
        return text

    def _render(self, conversation: "_Conversation") -> str:
        messages, tools, names, cut = conversation
        if cut:
            messages = [*messages[:-1], {**messages[-1], cut: messages[-1][cut] + _CUT}]
        text = self._template.render(messages=deepcopy(messages), tools=deepcopy(list(tools)) or None, **names)
        if not cut:
            return text
        before, mark, after = text.rpartition(_CUT.strip())
        if not mark:
            raise InvalidRequest(
                f"continue_final_message: the model's chat template leaves {cut} of the last message out of the prompt",
                param="continue_final_message",
                limit="false",
            )
        # A template that trims messages also trims the mark's own space, as transformers notices it.
        return before if after.startswith(" ") else before.rstrip()

    def _is_same(self, text: str, conversation: "_Conversation") -> bool:
        """Whether the prompt is still `text` for another conversation: then the difference had no effect."""
        try:
            return self._render(conversation) == text
        except Exception:  # the template reacts to the other value
            return False


class _Conversation(NamedTuple):
    """What a template is rendered with. `cut`: the field of the last message where the prompt ends; empty: none."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    names: Mapping[str, Any]
    cut: str

    def with_field(self, index: int, name: str, value: Any) -> "_Conversation":
        """The same with another value in a message."""
        changed = [*self.messages[:index], {**self.messages[index], name: value}, *self.messages[index + 1 :]]
        return self._replace(messages=changed)


def _cut_field(messages: Sequence[Mapping[str, Any]], continue_final_message: bool) -> str:
    """The field of the last message that the answer continues. Raises InvalidRequest if it is empty."""
    if not continue_final_message:
        return ""
    last = messages[-1]
    cut = "content" if last["content"] else "reasoning_content"
    if not last.get(cut) or last.get("tool_calls"):
        raise InvalidRequest(
            "continue_final_message needs a last message with text and without tool calls",
            param="continue_final_message",
            limit="a last message with text",
        )
    return cut


def _spellings(conversation: _Conversation) -> Iterator[_Conversation]:
    """The conversation in the spellings that templates expect of tool calls, the most frequent one first.

    Most templates take arguments as objects, and some, such as DeepSeek's, as text. Some look for tool calls only in
    messages whose content is none.
    """
    yield conversation
    if any(message.get("tool_calls") for message in conversation.messages):
        for as_text, no_content in ((False, True), (True, False), (True, True)):
            messages = [_spelled(message, as_text, no_content) for message in conversation.messages]
            yield conversation._replace(messages=messages)


def _spelled(message: Mapping[str, Any], as_text: bool, no_content: bool) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    content = None if no_content and not message["content"] else message["content"]
    if as_text:
        calls = [
            {**call, "function": {**call["function"], "arguments": _json_text(call["function"]["arguments"])}}
            for call in calls
        ]
    return {**message, "content": content, "tool_calls": calls}


def _json_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The message with ids of tool calls that have nine characters."""
    changed = dict(message)
    if changed.get("tool_call_id"):
        changed["tool_call_id"] = _short_id(changed["tool_call_id"])
    if changed.get("tool_calls"):
        changed["tool_calls"] = [{**call, "id": _short_id(call.get("id") or "")} for call in changed["tool_calls"]]
    return changed


def _short_id(call_id: Any) -> str:
    text = str(call_id)
    if re.fullmatch("[a-zA-Z0-9]{9}", text):
        return text
    return hashlib.blake2b(text.encode(errors="replace")).hexdigest()[:9]


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under gpt-oss's name, which allows no content beside it before a tool call."""
    reasoning = message.get("reasoning_content")
    if not reasoning or "thinking" in message or (message.get("tool_calls") and message["content"]):
        return message
    return {**message, "thinking": reasoning}


def _plain(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates expect it: text content, tool arguments as objects."""
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, list | tuple):
        plain["content"] = "".join(_text(f"messages[{index}].content[{i}]", part) for i, part in enumerate(content))
    elif content is None:
        if plain["role"] not in ("assistant", "tool", "function"):
            raise _refuse(f"messages[{index}].content", "a text or a list of text parts", "none")
        plain["content"] = ""
    elif not isinstance(content, str):
        raise _refuse(f"messages[{index}].content", "a text or a list of text parts", type(content).__name__)
    if plain.get("tool_calls") is not None:
        calls = plain["tool_calls"]
        if not isinstance(calls, list | tuple):
            raise _refuse(f"messages[{index}].tool_calls", "a list", type(calls).__name__)
        plain["tool_calls"] = [_call(f"messages[{index}].tool_calls[{i}]", call) for i, call in enumerate(calls)]
    return plain


def _text(param: str, part: Any) -> str:
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        raise _refuse(param, "a part of type text (this model reads text only)", str(kind))
    text = part.get("text")
    if not isinstance(text, str):
        raise _refuse(f"{param}.text", "a text", type(text).__name__)
    return text


def _call(param: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise _refuse(f"{param}.function", "an object with name and arguments", type(function).__name__)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = loads(arguments or "{}")
        except CodecError as error:
            raise _refuse(f"{param}.function.arguments", "JSON", short_repr(arguments)) from error
    return {**call, "function": {**function, "arguments": arguments}}


def _checked_fields(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the fields of a message that a template may leave out, each with a different value."""
    fields: list[tuple[str, Any]] = [("tool_calls", None)] if message.get("tool_calls") else []
    if message["role"] not in KNOWN_ROLES and message["content"]:
        fields.append(("content", message["content"] + "."))
    return fields


def _left_out(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"the model's chat template leaves {param} out of the prompt: {reason}", param=param, limit="left out"
    )


def _refuse(param: str, limit: str, value: str) -> InvalidRequest:
    return InvalidRequest(f"{param} must be {limit}, got {value}", param=param, limit=limit, value=value)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replace jinja2's filter, which escapes HTML characters and so changes what the model reads."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _PlainCodeGenerator(CodeGenerator):
    """Computes printed constants when the template is rendered. `optimized` does not cover them."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _GenerationBlock(Extension):
    """Renders the body of `{% generation %}`, which marks the assistant's words for training."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))
