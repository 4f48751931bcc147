"""The body of POST /v1/jobs: a GenerationRequest as JSON, or a chat body.

A body with `sampling`, `prompt` or `prompt_token_ids` is a GenerationRequest. There an unknown field is an error, since
only ktqueue defines its fields. Any other body is read as a chat body.
"""

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SkipValidation

from ktqueue.core.errors import InvalidRequest
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import (
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_PRIORITY,
    MAX_SEED,
    MAX_STOP_LENGTH,
    MAX_TOP_LOGPROBS,
    GenerationRequest,
    JobClass,
    SamplingParams,
    are_token_ids,
)
from ktqueue.core.webhook import MAX_URL, Webhook
from ktqueue.openai.chat import parse_chat
from ktqueue.openai.common_fields import MAX_ID, FreeObject, LogitBias, Metadata, Stop, TokenId
from ktqueue.openai.constraints import check_lark
from ktqueue.openai.messages import MAX_MESSAGES, Message, Tool
from ktqueue.openai.validation import must_be, parse

_GENERATION_FIELDS = frozenset({"sampling", "prompt", "prompt_token_ids"})
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def _token_ids(value: Any) -> Any:
    # Faster than pydantic, which would also collect an error for each of a million wrong entries.
    if value is None or (isinstance(value, list) and value and are_token_ids(value)):
        return value
    wrong = next((entry for entry in value if not are_token_ids([entry])), value) if isinstance(value, list) else value
    raise must_be("a list of at least one token id, 0 or a positive integer each", wrong)


class SamplingBody(BaseModel):
    """SamplingParams as JSON, with the same ranges."""

    model_config = _STRICT

    temperature: float = Field(1.0, ge=0, le=100)
    top_k: int = Field(0, ge=0, le=MAX_ID)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: LogitBias = None
    seed: int | None = Field(None, ge=-MAX_SEED - 1, le=MAX_SEED)
    stop: Stop = None
    stop_token_ids: list[TokenId] = Field([], max_length=MAX_LOGIT_BIAS)
    min_tokens: int = Field(0, ge=0, le=MAX_ID)
    max_tokens: int | None = Field(None, ge=0, le=MAX_ID)
    ignore_eos: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    bad_words: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]] = Field(
        [], max_length=MAX_BAD_WORDS
    )
    allowed_token_ids: list[TokenId] = Field([], max_length=MAX_LOGIT_BIAS)
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def params(self) -> SamplingParams:
        """The SamplingParams. Raises InvalidRequest."""
        lists = ("stop_token_ids", "bad_words", "allowed_token_ids")
        values = self.model_dump(exclude={"logit_bias", "stop", *lists})
        return SamplingParams(
            logit_bias={int(token_id): bias for token_id, bias in (self.logit_bias or {}).items()},
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids),
            bad_words=tuple(self.bad_words),
            allowed_token_ids=tuple(self.allowed_token_ids),
            **values,
        )


class WebhookBody(BaseModel):
    """Webhook as JSON."""

    model_config = _STRICT

    url: str = Field(max_length=MAX_URL)
    events: list[Literal["completed", "failed"]] = Field(["completed", "failed"], min_length=1, max_length=2)


class GenerationBody(BaseModel):
    """GenerationRequest as JSON."""

    model_config = _STRICT

    model: str = Field(min_length=1, max_length=256)
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    prompt: Annotated[str, Field(min_length=1)] | None = None
    prompt_token_ids: Annotated[list[TokenId] | None, SkipValidation, BeforeValidator(_token_ids)] = Field(
        None, min_length=1
    )
    sampling: SamplingBody | None = None
    job_class: Literal["interactive", "batch"] = "interactive"
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    expires_in: float | None = Field(None, ge=0.001, le=366 * 86400)
    tools: list[Tool] = Field([], max_length=128)
    chat_template_kwargs: FreeObject = {}
    user: str | None = None
    metadata: Metadata = None
    webhook: WebhookBody | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=1, le=MAX_ID)
    return_prompt: bool = Field(False, description="The first events have the prompt's text and tokens.")
    prompt_only: bool = Field(False, description="The answer is the prompt as text and tokens.")
    grammar: str | None = Field(None, description="In Lark; chat bodies have response_format and its kin instead.")

    def request(self) -> GenerationRequest:
        """The GenerationRequest. Raises InvalidRequest."""
        ids = self.prompt_token_ids
        return GenerationRequest(
            model=self.model,
            messages=None if self.messages is None else tuple(message.plain() for message in self.messages),
            prompt=self.prompt,
            prompt_token_ids=None if ids is None else tuple(ids),
            sampling=(self.sampling or SamplingBody.model_validate({})).params(),
            job_class=JobClass(self.job_class),
            priority=self.priority,
            expires_in=self.expires_in,
            tools=tuple(tool.model_dump(exclude_none=True) for tool in self.tools),
            chat_template_kwargs=dict(self.chat_template_kwargs),
            user=self.user,
            metadata=self.metadata or {},
            webhook=None if self.webhook is None else Webhook.of(self.webhook.model_dump()),
            suffix=self.suffix,
            add_special_tokens=self.add_special_tokens,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            return_prompt=self.return_prompt,
            prompt_only=self.prompt_only,
            grammar=None if self.grammar is None else check_lark(self.grammar, "grammar"),
        )


class _WithWebhook(BaseModel):
    webhook: WebhookBody


def parse_job(body: Mapping[str, Any], card: ModelCard | None) -> GenerationRequest:
    """The request of a job. `card`: of its model, if that is known. Raises InvalidRequest."""
    if not _GENERATION_FIELDS & body.keys():
        chat = parse_chat(body)
        chat.wants_usage()
        fields = body.get("webhook")
        webhook = None if fields is None else Webhook.of(parse(_WithWebhook, {"webhook": fields}).webhook.model_dump())
        return replace(chat.request(card), webhook=webhook)
    _check_names("", body, GenerationBody)
    if isinstance(body.get("sampling"), dict):
        _check_names("sampling.", body["sampling"], SamplingBody)
    return parse(GenerationBody, dict(body)).request()


def _check_names(prefix: str, body: Mapping[str, Any], kind: type[BaseModel]) -> None:
    known = [*kind.model_fields, *(f"sampling.{name}" for name in SamplingBody.model_fields if not prefix)]
    for name in body:
        if name not in kind.model_fields:
            inside = [field for field in known if field == f"sampling.{name}"]
            near = inside or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f" (did you mean {prefix}{near[0]}?)" if near else ""
            raise InvalidRequest(f"unknown field {prefix}{name[:80]}{hint}", param=f"{prefix}{name[:80]}")
