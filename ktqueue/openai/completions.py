"""POST /v1/completions: its body to GenerationRequests, one for each prompt, and deltas to its answers.

Answers follow OpenAI's description 2.3.0: one id, created and model for a whole response; exactly one chunk per choice
with a finish reason.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, Field, SkipValidation

from ktqueue.core.errors import InvalidRequest
from ktqueue.core.events import PositionLogprobs, Usage
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import MAX_CHOICES, MAX_TOP_LOGPROBS, GenerationRequest, are_token_ids
from ktqueue.openai.choices import Delta, Position, token_text
from ktqueue.openai.common_fields import CommonFields
from ktqueue.openai.endpoint import Json, ReplyHead
from ktqueue.openai.foreign_fields import translate
from ktqueue.openai.validation import must_be, parse

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for max_tokens of /v1/completions
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
    for prompt in value:
        if not (isinstance(prompt, str) and prompt) and not _is_token_ids(prompt):
            raise must_be("a text, a list of token ids, or a list of these, and not empty", prompt)
    return value


class CompletionBody(CommonFields):
    """The body of POST /v1/completions."""

    prompt: Annotated[
        str | list[int] | list[str] | list[list[int]] | list[Prompt], SkipValidation, BeforeValidator(_prompt)
    ]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    def prompts(self) -> list[Prompt]:
        """The prompts, one for each job."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        # `_prompt` has checked the list, so the type of its first entry is that of all.
        single = type(self.prompt[0]) is int
        return [cast(list[int], self.prompt)] if single else cast(list[Prompt], self.prompt)

    def requests(self, card: ModelCard | None) -> tuple[GenerationRequest, ...]:
        """One request for each prompt. `card`: of the model, if it is known. Raises InvalidRequest."""
        prompts = self.prompts()
        if len(prompts) * (self.n or 1) > MAX_CHOICES:
            raise InvalidRequest(
                f"prompt times n must give at most {MAX_CHOICES} choices, got {len(prompts)} times {self.n}",
                param="n",
                limit=MAX_CHOICES,
                value=len(prompts) * (self.n or 1),
            )
        sampling = self.sampling(card, max_tokens=self.max_tokens or DEFAULT_COMPLETION_TOKENS, logprobs=self.logprobs)
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
                reply_options=self.reply_options(),
            )
            for prompt in prompts
        )


def parse_completion(body: Mapping[str, Any]) -> CompletionBody:
    """A validated completion body. Raises InvalidRequest."""
    return parse(CompletionBody, *translate(body, special_tokens=True))


@dataclass(frozen=True, slots=True)
class CompletionReply:
    """Answers of POST /v1/completions."""

    head: ReplyHead

    def _body(self, choices: list[Json]) -> Json:
        return self.head.body("text_completion", choices)

    def _choice(self, index: int, text: str, positions: Sequence[Position], finish: str | None) -> Json:
        return {
            "index": index,
            "text": text,
            "logprobs": _completion_logprobs(positions) if self.head.logprobs else None,
            "finish_reason": finish,
        }

    def chunks(self, delta: Delta) -> Iterator[Json]:
        """Text, then the finish reason with logprobs that no text chunk had."""
        positions = delta.positions
        if delta.text:
            yield self._body([self._choice(delta.index, delta.text, positions, None)])
            positions = ()
        if delta.finish_reason is not None:
            yield self._body([self._choice(delta.index, "", positions, delta.finish_reason)])

    def usage_chunk(self, usage: Usage) -> Json:
        """A chunk with token counts and no choices."""
        return {**self._body([]), "usage": self.head.usage(usage)}

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Json:
        """The `text_completion` object."""
        listed = [self._choice(choice.index, choice.text, choice.positions, choice.finish_reason) for choice in choices]
        return {**self._body(listed), "usage": self.head.usage(usage)}


def _completion_logprobs(positions: Sequence[Position]) -> Json:
    return {
        "tokens": [position.token for position in positions],
        "token_logprobs": [position.logprobs.chosen.logprob for position in positions],
        "top_logprobs": [_top(position.logprobs) for position in positions],
        "text_offset": [position.offset for position in positions],
    }


def _top(logprobs: PositionLogprobs) -> dict[str, float]:
    """Logprobs of the likeliest tokens by text, always with the chosen one, as OpenAI and vLLM return them."""
    table: dict[str, float] = {}
    for token in (*logprobs.top, logprobs.chosen):
        table.setdefault(token_text(token), token.logprob)
    return table
