"""POST /api/chat and /api/generate: their bodies to a chat body or, for a raw prompt, to a completion body."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ktqueue.core.codec import Json
from ktqueue.core.errors import InvalidRequest, ModelNotFound
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import MAX_TOP_LOGPROBS, GenerationRequest
from ktqueue.core.short_repr import short_repr
from ktqueue.openai.chat import ChatBody, parse_chat
from ktqueue.openai.client_names import CHAT_NAMES, Names, client_name
from ktqueue.openai.common_fields import FreeObject, shallow
from ktqueue.openai.completions import CompletionBody, parse_completion
from ktqueue.openai.errors import UnsupportedParameter
from ktqueue.openai.foreign_fields import ALIASES, refused_fields
from ktqueue.openai.messages import MAX_MESSAGES, MAX_TOOL_CALLS, NotSupported
from ktqueue.openai.validation import StrictBody, must_be, parse

CHAT_PATH, GENERATE_PATH = "/api/chat", "/api/generate"
# Options of Ollama's own runner, which say how a model is loaded and change no answer.
LOADING = frozenset((
    "embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu", "num_keep",
    "num_thread", "numa", "use_mlock", "use_mmap", "vocab_only",
))  # fmt: skip


def _format(value: Any) -> Any:
    if value is None or value == "" or value == {}:
        return None
    if value != "json" and not isinstance(value, dict):
        raise must_be('"json" or a JSON schema', value)
    return shallow(value)


def _think(value: Any) -> Any:
    if not (value is None or isinstance(value, bool) or value in ("low", "medium", "high")):
        raise must_be('true, false, "low", "medium" or "high"', value)
    return value


class PastFunction(StrictBody):
    """The function that an earlier message called."""

    name: str
    arguments: FreeObject


class PastToolCall(StrictBody):
    """A tool call of an earlier message."""

    id: str = ""
    function: PastFunction


class OllamaMessage(StrictBody):
    """One message of a conversation. Images are refused."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: NotSupported = None
    tool_calls: list[PastToolCall] | None = Field(None, max_length=MAX_TOOL_CALLS)
    tool_name: str | None = None
    tool_call_id: str | None = None

    def chat(self) -> Json:
        """The same message in a chat body."""
        made: Json = {
            "role": self.role,
            "content": self.content or "",
            "reasoning_content": self.thinking,
            "name": self.tool_name,
            "tool_call_id": self.tool_call_id,
        }
        if self.tool_calls:
            made["tool_calls"] = [{**call.model_dump(), "type": "function"} for call in self.tool_calls]
        return {name: value for name, value in made.items() if value is not None}


class OllamaFields(StrictBody):
    """Fields of both endpoints. `keep_alive` changes nothing: workers decide which models are loaded."""

    model: str = Field(min_length=1, max_length=256)
    stream: bool | None = Field(None, description="Default true.")
    options: FreeObject | None = Field(
        None, description="Fields of /v1/chat/completions by Ollama's names. num_ctx must fit the model's context."
    )
    format: Annotated[Literal["json"] | dict[str, Any] | None, BeforeValidator(_format)] = Field(
        None, description='"json", or a JSON schema.'
    )
    think: Annotated[bool | Literal["low", "medium", "high"] | None, BeforeValidator(_think)] = Field(
        None, description="Passed to the chat template."
    )
    keep_alive: Any = None
    images: NotSupported = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    def shared_fields(self) -> Json:
        """The fields of a body of OpenAI's that mean the same."""
        options = {name: value for name, value in (self.options or {}).items() if name not in LOADING}
        if options.get("n") not in (None, 1):
            raise InvalidRequest("options.n must be 1", param="options.n", limit=1, value=short_repr(options["n"]))
        made: Json = {**options, "model": self.model, "stream": self.stream is not False}
        if self.format == "json":
            made["response_format"] = {"type": "json_object"}
        elif self.format is not None:
            made["response_format"] = {"type": "json_schema", "json_schema": {"schema": self.format}}
        return made

    def chat_fields(self) -> Json:
        """The fields of a chat body that a completion has in another form: log probabilities and thinking."""
        made: Json = {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        if self.think is None:
            return made
        on = self.think is not False
        made["chat_template_kwargs"] = {"enable_thinking": on, "thinking": on}  # names in Qwen's, DeepSeek's
        return {**made, "reasoning_effort": self.think} if isinstance(self.think, str) else made


class OllamaChatBody(OllamaFields):
    """The body of POST /api/chat. Without messages the answer says that the model is loaded."""

    messages: list[OllamaMessage] = Field(default_factory=list, max_length=MAX_MESSAGES)
    tools: list[FreeObject] | None = Field(None, max_length=128)

    def chat(self) -> Json | None:
        """The chat body that means the same; None without messages."""
        if not self.messages:
            return None
        made = {**self.shared_fields(), **self.chat_fields(), "messages": [message.chat() for message in self.messages]}
        if self.tools:
            made["tools"] = [{"type": "function", **tool} for tool in self.tools]
        return made


class OllamaGenerateBody(OllamaFields):
    """The body of POST /api/generate. Without a prompt the answer says that the model is loaded."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = Field(None, description="The prompt does not go through the chat template.")
    template: NotSupported = None
    context: NotSupported = None

    def chat(self) -> Json:
        """The chat body that means the same, for a prompt that is not `completes`."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": self.prompt}]
        return {**self.shared_fields(), **self.chat_fields(), "messages": messages}

    def completion(self) -> Json:
        """The completion body that means the same. Raises UnsupportedParameter."""
        if self.system:
            raise UnsupportedParameter(
                "system is not supported beside raw and suffix: there is no chat template",
                param="system",
                limit="left out",
            )
        made = {**self.shared_fields(), "prompt": self.prompt}
        if self.logprobs:
            made["logprobs"] = self.top_logprobs or 0
        return {**made, "suffix": self.suffix} if self.suffix else made

    @property
    def completes(self) -> bool:
        """Whether the prompt is continued as it is."""
        return bool(self.raw or self.suffix)


_OWN = {*OllamaChatBody.model_fields, *OllamaGenerateBody.model_fields}
_OPTIONS = {*ChatBody.model_fields, *CompletionBody.model_fields, *ALIASES, *refused_fields()} - _OWN
_NAMES: Names = (
    (r"response_format(\.json_schema)?(\.schema)?", "format"),
    (r"reasoning_effort|chat_template_kwargs\.\w+", "think"),
    (rf"({'|'.join(_OPTIONS)})(?!\w)", r"options.\1"),
)
OLLAMA_CHAT_NAMES: Names = (*CHAT_NAMES, *_NAMES)
GENERATE_NAMES: Names = ((r"messages.*", "prompt"), *_NAMES)


@dataclass(frozen=True, slots=True)
class ParsedOllama:
    """A validated body: `read` is Ollama's, and `inner` means the same; it is None if nothing is generated."""

    path: str
    read: OllamaFields
    inner: ChatBody | CompletionBody | None

    @property
    def stream(self) -> bool | None:
        """Whether the answer is streamed."""
        return self.inner is not None and self.inner.stream

    def requests(self, card: ModelCard | None) -> tuple[GenerationRequest, ...]:
        """One request, or none if there is nothing to generate. Raises InvalidRequest, ModelNotFound."""
        self._check_context(card)
        if self.inner is None:
            if card is None:
                name = self.read.model
                raise ModelNotFound(f"no worker serves the model {name!r}", param="model", value=name)
            return ()
        requests = self.inner.requests(card)
        return tuple(
            replace(request, endpoint=self.path, grammar_field=client_name(request.grammar_field, _NAMES))
            for request in requests
        )

    def wants_usage(self) -> bool:
        """Yes: the last line has the token counts."""
        return True

    def _check_context(self, card: ModelCard | None) -> None:
        wanted = (self.read.options or {}).get("num_ctx")
        if card is not None and isinstance(wanted, int) and wanted > card.max_model_len:
            raise UnsupportedParameter.must_be(
                "options.num_ctx",
                f"at most {card.max_model_len}, the context of {card.name}",
                wanted,
                limit=card.max_model_len,
            )


def parse_ollama_chat(body: Mapping[str, Any]) -> ParsedOllama:
    """A validated body of POST /api/chat. Raises InvalidRequest."""
    read = parse(OllamaChatBody, body)
    chat = read.chat()
    return ParsedOllama(CHAT_PATH, read, None if chat is None else parse_chat(chat))


def parse_ollama_generate(body: Mapping[str, Any]) -> ParsedOllama:
    """A validated body of POST /api/generate. Raises InvalidRequest."""
    read = parse(OllamaGenerateBody, body)
    if not read.prompt:
        return ParsedOllama(GENERATE_PATH, read, None)
    inner = parse_completion(read.completion()) if read.completes else parse_chat(read.chat())
    return ParsedOllama(GENERATE_PATH, read, inner)
