"""Renders a model's chat template with jinja2 in a sandbox.

It has the names and filters that templates written for transformers expect. Knows messages and tools as plain data, and
no tokenizer. Source of the conventions: transformers, "Writing a chat template", and utils/chat_template_utils.py.
"""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from datetime import datetime
from typing import Any, NoReturn

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
        except (jinja2.TemplateError, RecursionError) as error:
            raise CheckpointError(f"{where}: the chat template does not parse: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text, which ends where the assistant's answer begins.

        Raises InvalidRequest if a message is malformed, if the template refuses the conversation, or if it leaves
        tools, tool calls or tool results out of the prompt. Raises MemoryError.
        """
        if reserved := RESERVED & set(kwargs or {}):
            name = sorted(reserved)[0]
            raise InvalidRequest(
                f"chat_template_kwargs must not set {name!r}", param=f"chat_template_kwargs.{name}", limit="other names"
            )
        names: dict[str, Any] = {**self.special, "add_generation_prompt": True, "documents": None, **(kwargs or {})}
        plain_messages = [_plain(index, message) for index, message in enumerate(messages)]
        try:
            text = self._render(plain_messages, tools, names)
        except MemoryError:
            raise
        except Exception as error:  # a template is a program; its errors concern only this request
            raise InvalidRequest(
                f"the model's chat template refused the messages: {str(error)[:500]}", param="messages"
            ) from error
        if tools and self._is_same(text, plain_messages, (), names):
            raise _left_out("tools")
        for index, message in enumerate(plain_messages):
            for name, other in _tool_fields(message):
                changed = [*plain_messages[:index], {**message, name: other}, *plain_messages[index + 1 :]]
                if self._is_same(text, changed, tools, names):
                    raise _left_out(f"messages[{index}].{name}")
        return text

    def _render(self, messages: Sequence[Any], tools: Sequence[Any], names: Mapping[str, Any]) -> str:
        return self._template.render(messages=deepcopy(messages), tools=deepcopy(list(tools)) or None, **names)

    def _is_same(self, text: str, messages: Sequence[Any], tools: Sequence[Any], names: Mapping[str, Any]) -> bool:
        """Whether the prompt is still `text` for other messages or tools: then the original ones had no effect."""
        try:
            return self._render(messages, tools, names) == text
        except Exception:  # the template reacts to the other value
            return False


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


def _tool_fields(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return a message's fields about tools, each with a different value."""
    fields: list[tuple[str, Any]] = [("tool_calls", None)] if message.get("tool_calls") else []
    if message["role"] in ("tool", "function") and message["content"]:
        fields.append(("content", message["content"] + "."))
    return fields


def _left_out(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"the model's chat template leaves {param} out of the prompt: it does not support tools",
        param=param,
        limit="left out",
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
