"""POST /v1/messages and /v1/messages/count_tokens: their bodies to a chat body.

Fields that Anthropic does not name otherwise than OpenAI, and all of our own, are those of /v1/chat/completions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import Field

from ktqueue.anthropic.blocks import InputMessages, Text, chat_messages, text_parts
from ktqueue.anthropic.errors import ThreadUnsupported
from ktqueue.core.codec import Json
from ktqueue.core.errors import InvalidRequest
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest
from ktqueue.core.short_repr import short_repr
from ktqueue.openai.chat import ChatBody, parse_chat
from ktqueue.openai.client_names import CHAT_NAMES, Names, client_name
from ktqueue.openai.common_fields import MAX_ID, FreeObject
from ktqueue.openai.errors import UnsupportedParameter
from ktqueue.openai.prompt_endpoints import PromptCall
from ktqueue.openai.validation import StrictBody, parse

PATH = "/v1/messages"
NAMES: Names = (
    (r"response_format(\.json_schema)?", "output_config.format"),
    (r"(tools\.\d+)\.function\.parameters", r"\1.input_schema"),
    (r"(tools\.\d+)\.function", r"\1"),
    (r"reasoning_effort", "output_config.effort"),
    *CHAT_NAMES,
)
_REFUSED = {"mcp_servers": "tools are called by the client", "container": "there are no hosted tools"}


class ClientTool(StrictBody):
    """A tool that the client runs. Tools that Anthropic's servers run, such as web search, are refused."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    input_schema: FreeObject
    strict: bool | None = None


class ToolChoice(StrictBody):
    """Whether the model calls tools, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, min_length=1, max_length=128, description="For tool.")
    disable_parallel_tool_use: bool | None = None


class Thinking(StrictBody):
    """Whether the model thinks before it answers. `budget_tokens` changes nothing: max_tokens is the limit."""

    type: Literal["enabled", "disabled", "adaptive"]


class RequestMetadata(StrictBody):
    """What is stored with the job."""

    user_id: str | None = Field(None, max_length=512)


class OutputFormat(StrictBody):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: FreeObject = Field(alias="schema")


class OutputConfig(StrictBody):
    """How the answer is written."""

    format: OutputFormat | None = None
    effort: str | None = Field(None, max_length=32, description="Passed to the chat template as reasoning_effort.")


class CountBody(StrictBody):
    """The body of POST /v1/messages/count_tokens. Further fields are those of /v1/chat/completions."""

    messages: InputMessages
    system: Text | None = None
    tools: list[ClientTool] | None = Field(None, max_length=128)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    metadata: RequestMetadata | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="The older name of output_config.format.")

    def chat(self) -> Json:
        """The fields of a chat body that mean the same."""
        system = [] if self.system is None else [{"role": "system", "content": text_parts(self.system)}]
        made: Json = {"messages": [*system, *chat_messages(self.messages)]}
        if self.messages[-1].role == "assistant":
            made |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.tools is not None:
            made["tools"] = [_function(tool) for tool in self.tools]
        if self.tool_choice is not None:
            made |= _tool_choice(self.tool_choice)
        if self.thinking is not None:
            on = self.thinking.type != "disabled"
            made["chat_template_kwargs"] = {"enable_thinking": on, "thinking": on}  # names in Qwen's, DeepSeek's
        if self.metadata is not None:
            made["user"] = self.metadata.user_id
        config = self.output_config or OutputConfig.model_validate({})
        chosen = config.format or self.output_format
        if chosen is not None:
            made["response_format"] = {"type": "json_schema", "json_schema": {"schema": chosen.schema_}}
        if config.effort is not None:
            made["reasoning_effort"] = config.effort
        return made


class MessagesBody(CountBody):
    """The body of POST /v1/messages. Further fields are those of /v1/chat/completions."""

    max_tokens: int = Field(ge=1, le=MAX_ID)
    temperature: float | None = Field(None, ge=0, le=1)


@dataclass(frozen=True, slots=True)
class ParsedMessages:
    """A validated body of POST /v1/messages."""

    chat: ChatBody

    @property
    def stream(self) -> bool | None:
        """Whether the answer is streamed."""
        return self.chat.stream

    def requests(self, card: ModelCard | None) -> tuple[GenerationRequest, ...]:
        """One request. Its text has the stop string, since the answer names it. Raises InvalidRequest."""
        request = self.chat.request(card)
        stops = list(request.sampling.stop)
        return (
            replace(
                request,
                endpoint=PATH,
                grammar_field=client_name(request.grammar_field, NAMES),
                sampling=replace(request.sampling, logprobs=None, include_stop_str_in_output=bool(stops)),
                reply_options={**request.reply_options, **({"stops": stops} if stops else {})},
            ),
        )

    def wants_usage(self) -> bool:
        """Yes: the last events have the token counts."""
        return True


def parse_messages(body: Mapping[str, Any]) -> ParsedMessages:
    """A validated body. Raises InvalidRequest."""
    return ParsedMessages(_chat(body, parse(MessagesBody, body)))


def parse_count(body: Mapping[str, Any], card: ModelCard | None) -> PromptCall:
    """Messages to the number of tokens of their prompt. Raises InvalidRequest."""
    request = _chat(body, parse(CountBody, body)).request(card)
    return PromptCall(request, lambda prompt: {"input_tokens": len(prompt.token_ids)})


def _chat(body: Mapping[str, Any], read: CountBody) -> ChatBody:
    others = {name: value for name, value in body.items() if name not in CountBody.model_fields}
    if body.get("thread") is not None:
        raise ThreadUnsupported(
            "thread must be left out: this server keeps no conversations of /v1/messages, so send all messages",
            param="thread",
            value=short_repr(body["thread"]),
        )
    for name, advice in _REFUSED.items():
        if body.get(name):
            raise UnsupportedParameter(
                f"{name} is not supported: {advice}", param=name, limit=advice, value=short_repr(body[name])
            )
    if others.get("n") not in (None, 1):
        raise InvalidRequest("n must be 1: a message is one choice", param="n", limit=1, value=short_repr(others["n"]))
    if others.get("service_tier") == "standard_only":  # Anthropic's name
        others["service_tier"] = "default"
    return parse_chat({**others, **read.chat()})


def _function(tool: ClientTool) -> Json:
    function: Json = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> Json:
    made: Json = {"tool_choice": {"any": "required", "auto": "auto", "none": "none"}.get(choice.type)}
    if choice.type == "tool":
        made["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if choice.disable_parallel_tool_use is not None:
        made["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return made
