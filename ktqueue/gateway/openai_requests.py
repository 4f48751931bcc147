"""The bodies of POST /v1/chat/completions and /v1/completions, and their way into GenerationRequests.

Pure; knows no HTTP. What other fields there are is in `foreign_fields`, what both bodies share in `openai_fields`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, SkipValidation

from ktqueue.core.errors import InvalidRequest
from ktqueue.core.request import MAX_CHOICES, MAX_TOP_LOGPROBS, GenerationRequest, are_token_ids
from ktqueue.gateway.foreign_fields import translate
from ktqueue.gateway.openai_errors import must_be, parse
from ktqueue.gateway.openai_fields import MAX_ID, CommonFields, FreeObject
from ktqueue.gateway.openai_messages import MAX_MESSAGES, Message, Tool

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens on /v1/completions
Prompt = str | list[int]


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and are_token_ids(value)


def _prompt(value: Any) -> Any:
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value:
        raise must_be("a text, a list of token ids, or a list of these, and not empty", value)
    if _is_token_ids(value):
        return value
    if len(value) > MAX_CHOICES:
        raise must_be(f"at most {MAX_CHOICES} prompts", value)
    for one in value:
        if not (isinstance(one, str) and one) and not _is_token_ids(one):
            raise must_be("a text, a list of token ids, or a list of these, and not empty", one)
    return value


class CompletionBody(CommonFields):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        str | list[int] | list[str] | list[list[int]] | list[Prompt], SkipValidation, BeforeValidator(_prompt)
    ]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    def prompts(self) -> list[Prompt]:
        """The prompts, one for each job."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        # `_prompt` has looked at the list; here its first entry says what the others are.
        single = type(self.prompt[0]) is int
        return [cast(list[int], self.prompt)] if single else cast(list[Prompt], self.prompt)

    def requests(self) -> tuple[GenerationRequest, ...]:
        """One request for each prompt. Raises InvalidRequest."""
        prompts = self.prompts()
        if len(prompts) * (self.n or 1) > MAX_CHOICES:
            raise InvalidRequest(
                f"prompt times n must give at most {MAX_CHOICES} choices, got {len(prompts)} times {self.n}",
                param="n",
                limit=MAX_CHOICES,
                value=len(prompts) * (self.n or 1),
            )
        sampling = self.sampling(max_tokens=self.max_tokens or DEFAULT_COMPLETION_TOKENS, logprobs=self.logprobs)
        return tuple(
            GenerationRequest(
                model=self.model,
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_token_ids=None if isinstance(prompt, str) else tuple(prompt),
                sampling=sampling,
                job_class=self.class_of_job(),
                priority=self.priority or 0,
                expires_in=self.expires_in,
                user=self.user,
                metadata=self.metadata or {},
            )
            for prompt in prompts
        )


class ChatBody(CommonFields):
    """Body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_ID, description="Preferred over max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[Tool] | None = Field(None, max_length=128, description="Taken only with tool_choice: none.")
    tool_choice: Literal["none"] | None = None
    reasoning_effort: str | None = Field(None, max_length=32, description="Handed to the chat template.")
    chat_template_kwargs: FreeObject | None = None

    def request(self) -> GenerationRequest:
        """The one request that this body asks for. Raises InvalidRequest."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest(
                "top_logprobs is allowed only with logprobs: true",
                param="top_logprobs",
                limit="logprobs: true",
                value=self.top_logprobs,
            )
        extras = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            extras.setdefault("reasoning_effort", self.reasoning_effort)
        return GenerationRequest(
            model=self.model,
            messages=tuple(message.plain() for message in self.messages),
            sampling=self.sampling(
                max_tokens=self.max_completion_tokens or self.max_tokens,
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            ),
            job_class=self.class_of_job(),
            priority=self.priority or 0,
            expires_in=self.expires_in,
            chat_template_kwargs=extras,
            user=self.user,
            metadata=self.metadata or {},
        )


def parse_chat(body: Mapping[str, Any]) -> ChatBody:
    """A validated chat body. Raises InvalidRequest."""
    ours, names = translate(body, special_tokens=False)
    if names.get("max_tokens") and ours["max_tokens"] in (-1, -2):
        del ours["max_tokens"]  # llama.cpp's "without limit" and "to the end of the context", which is the default here
    return parse(ChatBody, ours, names)


def parse_completion(body: Mapping[str, Any]) -> CompletionBody:
    """A validated completion body. Raises InvalidRequest."""
    return parse(CompletionBody, *translate(body, special_tokens=True))


@dataclass(frozen=True, slots=True)
class Call:
    """What a body asks for: jobs, and how their answer is given."""

    generations: tuple[GenerationRequest, ...]
    stream: bool
    include_usage: bool


def chat_call(body: Mapping[str, Any]) -> Call:
    """What a chat body asks for. Raises InvalidRequest."""
    chat = parse_chat(body)
    return Call((chat.request(),), bool(chat.stream), chat.wants_usage())


def completion_call(body: Mapping[str, Any]) -> Call:
    """What a completion body asks for. Raises InvalidRequest."""
    completion = parse_completion(body)
    return Call(completion.requests(), bool(completion.stream), completion.wants_usage())
