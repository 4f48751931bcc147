"""The body of POST /v1/responses, translated to the body of a chat.

Items of the input become messages: function calls and their outputs, reasoning, and messages with text parts. What a
chat has under another name is renamed, and everything else is passed on, so a field means the same at both endpoints.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ktqueue.core.codec import Json
from ktqueue.core.errors import InvalidRequest
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest
from ktqueue.core.short_repr import short_repr
from ktqueue.openai.chat import parse_chat
from ktqueue.openai.client_names import Names, client_name, client_names
from ktqueue.openai.common_fields import Metadata, shallow
from ktqueue.openai.errors import UnsupportedParameter
from ktqueue.openai.prompt_endpoints import PromptCall, PromptEndpoint
from ktqueue.openai.responses.tools import ToolList, chat_tools, function_name, tools_json, without_web_search
from ktqueue.openai.validation import StrictBody, must_be, parse

MAX_ITEMS = 4096
PREFIX = "resp_"

_RENAMED = {"max_output_tokens": "max_completion_tokens"}
_OWN = frozenset({
    "input", "instructions", "text", "tools", "tool_choice", "reasoning", "store", "previous_response_id", "background",
    "include", "truncation", "conversation", "prompt", "max_tool_calls", "stream_options",
    "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
})  # fmt: skip
NAMES: Names = (
    (r"response_format(\.json_schema)?", "text.format"),
    (r"max_(completion_)?tokens", "max_output_tokens"),
    (r"reasoning_effort", "reasoning.effort"),
    (r"messages.*|prompt(?!\w)", "input"),  # of which instructions and stored items are a part too
)
_LOGPROBS = "message.output_text.logprobs"
Includable = Literal[  # the logprobs alone exist here: the others ask for parts that no answer has
    "message.output_text.logprobs", "reasoning.encrypted_content", "message.input_image.image_url",
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "code_interpreter_call.outputs", "computer_call_output.output.image_url",
]  # fmt: skip
_REFUSED = {
    "conversation": "use previous_response_id",
    "prompt": "prompts are not stored here: send input",
    "max_tool_calls": "tools are called by the client",
}


class TextFormat(StrictBody):
    """The form of the text, as `text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(StrictBody):
    """The field `text`."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(StrictBody):
    """The field `reasoning`."""

    effort: str | None = Field(None, max_length=32)
    summary: str | None = Field(None, max_length=32, description="Changes nothing: reasoning is returned whole.")


def _input(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
        return shallow(value)
    raise must_be("a string or a list of objects", value)


def _choice(value: Any) -> Any:
    if value is None or isinstance(value, str | dict):
        return shallow(value)
    raise must_be("a string or an object", value)


class ResponseBody(StrictBody):
    """The fields of POST /v1/responses that a chat does not have, or has in another form."""

    input: Annotated[str | list[Json], BeforeValidator(_input)]
    instructions: str | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: ToolList | None = None
    tool_choice: Annotated[str | Json | None, BeforeValidator(_choice)] = None
    parallel_tool_calls: bool | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    store: bool | None = None
    background: bool | None = None
    include: list[Includable] | None = Field(None, max_length=16)
    truncation: Literal["auto", "disabled"] | None = None
    stream: bool | None = None
    metadata: Metadata = None


@dataclass(frozen=True, slots=True)
class ResponseCall:
    """What a body asks for. `messages` are the conversation up to the answer, as a chat body has them.

    `echo`: the fields of the request that its answer repeats.
    """

    generation: GenerationRequest
    messages: tuple[Json, ...]
    echo: Json
    stream: bool
    store: bool
    background: bool
    digest: str


def parse_response(body: Mapping[str, Any], card: ModelCard | None, history: Sequence[Json] = ()) -> ResponseCall:
    """What a body asks for. `history`: the messages of the response that it continues. Raises InvalidRequest."""
    for name, advice in _REFUSED.items():
        if body.get(name) is not None:
            raise UnsupportedParameter(f"{name} is not supported: {advice}", param=name, limit=advice)
    if isinstance(body.get("tools"), list):
        body = {**body, "tools": without_web_search(body["tools"])}
    own = parse(ResponseBody, {name: value for name, value in body.items() if name in ResponseBody.model_fields})
    if own.background and own.store is False:
        raise InvalidRequest("background needs store: true", param="background", limit="store: true", value=True)
    messages = _messages(own.input, history)
    chat: Json = {_RENAMED.get(name, name): value for name, value in body.items() if name not in _OWN}
    chat["messages"] = [*([{"role": "system", "content": own.instructions}] if own.instructions else []), *messages]
    functions, names = chat_tools(own.tools or ())
    if functions:
        chat["tools"] = functions
    names = (*names, *NAMES)
    if own.tool_choice is not None and (own.tools or own.tool_choice != "auto"):
        chat["tool_choice"] = _tool_choice(own.tool_choice)
    if own.text is not None and own.text.format is not None and own.text.format.type != "text":
        chat["response_format"] = _response_format(own.text.format)
    if _LOGPROBS in (own.include or ()) or body.get("top_logprobs"):
        chat["logprobs"] = True
    else:
        chat.pop("top_logprobs", None)
    if own.reasoning is not None and own.reasoning.effort is not None:
        chat["reasoning_effort"] = own.reasoning.effort
    with client_names(names):
        generation = parse_chat(chat).request(card)
    return ResponseCall(
        generation=replace(
            generation, endpoint="responses", grammar_field=client_name(generation.grammar_field, names)
        ),
        messages=tuple(messages),
        echo=_echo(own, body),
        stream=bool(own.stream),
        store=own.store is not False,
        background=bool(own.background),
        digest=card.digest if card else "",
    )


def parse_input_tokens(body: Mapping[str, Any], card: ModelCard | None) -> PromptCall:
    """The body of a response to the number of tokens of its prompt. Raises InvalidRequest."""
    if body.get("previous_response_id") is not None:
        advice = "send the whole conversation"
        raise UnsupportedParameter(
            f"previous_response_id is not supported here: {advice}", param="previous_response_id", limit=advice
        )
    return PromptCall(
        parse_response(body, card).generation,
        lambda prompt: {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)},
    )


INPUT_TOKENS = PromptEndpoint("/v1/responses/input_tokens", parse_input_tokens, NAMES)


def _tool_choice(choice: str | Json) -> str | Json:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(text: TextFormat) -> Json:
    if text.type == "json_object":
        return {"type": "json_object"}
    schema = {"name": text.name or "answer", "schema": text.schema_, "strict": text.strict}
    return {"type": "json_schema", "json_schema": {name: value for name, value in schema.items() if value is not None}}


def _echo(own: ResponseBody, body: Mapping[str, Any]) -> Json:
    text = own.text.model_dump(by_alias=True, exclude_none=True) if own.text else {}
    return {
        "background": bool(own.background),
        "instructions": own.instructions,
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": own.metadata or {},
        "parallel_tool_calls": own.parallel_tool_calls is not False,
        "previous_response_id": own.previous_response_id,
        "reasoning": {"effort": own.reasoning.effort if own.reasoning else None, "summary": None},
        "service_tier": "flex" if body.get("service_tier") == "flex" else "default",
        "store": own.store is not False,
        "temperature": body.get("temperature"),
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": own.tool_choice or "auto",
        "tools": tools_json(own.tools or ()),
        "top_logprobs": body.get("top_logprobs") or 0,
        "top_p": body.get("top_p"),
        "truncation": own.truncation or "disabled",
    }


def _messages(given: str | list[Json], history: Sequence[Json]) -> list[Json]:
    if isinstance(given, str):
        return [*history, {"role": "user", "content": given}]
    if not 0 < len(given) <= MAX_ITEMS:
        raise InvalidRequest(
            f"input must have 1 to {MAX_ITEMS} items, got {len(given)}",
            param="input",
            limit=MAX_ITEMS,
            value=len(given),
        )
    messages: list[Json] = [dict(message) for message in history]
    for place, item in enumerate(given):
        _add_item(messages, item, f"input[{place}]")
    return messages


def _add_item(messages: list[Json], item: Json, where: str) -> None:
    """Add an item to the conversation. Calls and reasoning belong to the assistant's message beside them."""
    kind = item.get("type", "message")
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind == "message":
        message = {"role": item.get("role"), "content": _content(item.get("content"), f"{where}.content")}
        if last is not None and message["role"] == "assistant" and not last.get("content"):
            last["content"] = message["content"]
        else:
            messages.append(message)
    elif kind == "function_call":
        if last is None:
            last = {"role": "assistant", "content": ""}
            messages.append(last)
        name = function_name(item.get("namespace"), item.get("name"))
        function = {"name": name, "arguments": item.get("arguments") or "{}"}
        last.setdefault("tool_calls", []).append(
            {"id": str(item.get("call_id", "")), "type": "function", "function": function}
        )
    elif kind == "function_call_output":
        output = item.get("output")
        text = output if isinstance(output, str) else _content(output, f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": text})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        if not isinstance(parts, list):
            raise InvalidRequest(
                f"{where} must have lists as content and summary, got {short_repr(parts)}",
                param=where,
                limit="a list",
                value=short_repr(parts),
            )
        text = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
        if text:
            messages.append({"role": "assistant", "content": "", "reasoning_content": text})
    else:
        raise UnsupportedParameter(
            f"{where}.type must be message, function_call, function_call_output or reasoning, got {short_repr(kind)}",
            param=f"{where}.type",
            limit="message, function_call, function_call_output, reasoning",
            value=short_repr(kind),
        )


def _content(content: Any, where: str) -> Any:
    """The content of a message as a chat has it: text parts have another type there."""
    if not isinstance(content, list):
        return content
    parts = []
    for place, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in ("input_text", "output_text", "text", "refusal"):
            kind = short_repr(part.get("type") if isinstance(part, dict) else part)
            raise UnsupportedParameter(
                f"{where}[{place}] must be text (this model reads text only), got {kind}",
                param=f"{where}[{place}]",
                limit="input_text",
                value=kind,
            )
        parts.append({"type": "text", "text": part.get("text", part.get("refusal"))})
    return parts
