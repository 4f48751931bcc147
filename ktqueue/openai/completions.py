"""POST /v1/completions: its body to GenerationRequests, one for each prompt, and deltas to its answers.

Answers follow OpenAI's description 2.3.0: one id, created and model for a whole response; exactly one chunk per choice
with a finish reason.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, Field, SkipValidation

from ktqueue.core.codec import Json
from ktqueue.core.errors import InvalidRequest
from ktqueue.core.events import PositionLogprobs, Usage
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import MAX_CHOICES, MAX_TOP_LOGPROBS, GenerationRequest, are_token_ids
from ktqueue.openai.choices import Delta
from ktqueue.openai.common_fields import CommonFields
from ktqueue.openai.endpoint import ReplyHead
from ktqueue.openai.errors import UnsupportedParameter
from ktqueue.openai.foreign_fields import translate
from ktqueue.openai.prompt_reply import prompt_ids, prompt_logprobs, prompt_positions
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
    echo: bool | None = Field(None, description="Begin the text with the prompt, and logprobs with the prompt's.")
    best_of: int | None = Field(
        None, ge=1, le=MAX_CHOICES, description="Generate as many choices and return the n likeliest. Not in streams."
    )
    suffix: str | None = Field(
        None, description="The text after the answer, for models with tokens for filling in the middle."
    )

    def prompts(self) -> list[Prompt]:
        """The prompts, one for each job."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        # `_prompt` has checked the list, so the type of its first entry is that of all.
        single = type(self.prompt[0]) is int
        return [cast(list[int], self.prompt)] if single else cast(list[Prompt], self.prompt)

    def _choices(self) -> int:
        """Number of choices that are generated for each prompt. Raises InvalidRequest."""
        n = self.n or 1
        if self.best_of is None or self.best_of == n:
            return n
        if self.best_of < n:
            raise InvalidRequest.must_be("best_of", f"at least n ({n})", self.best_of, limit=n)
        if self.stream:
            raise UnsupportedParameter(
                f"best_of must be equal to n ({n}) with stream: true, since the best choice is known at the end",
                param="best_of",
                limit=n,
                value=self.best_of,
            )
        return self.best_of

    def reply_options(self) -> dict[str, Any]:
        """See CommonFields. `best`: number of choices that are returned, if more are generated."""
        options = super().reply_options()
        if self.echo:
            options["echo"] = True
        if self._choices() > (self.n or 1):
            options["best"] = self.n or 1
            if self.logprobs is None:
                options["hidden_logprobs"] = True
        return options

    def requests(self, card: ModelCard | None) -> tuple[GenerationRequest, ...]:
        """One request for each prompt. `card`: of the model, if it is known. Raises InvalidRequest."""
        prompts, choices = self.prompts(), self._choices()
        if len(prompts) * choices > MAX_CHOICES:
            raise InvalidRequest(
                f"prompt times n must give at most {MAX_CHOICES} choices, got {len(prompts)} times {choices}",
                param="n",
                limit=MAX_CHOICES,
                value=len(prompts) * choices,
            )
        max_tokens = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        ranks = choices > (self.n or 1)
        sampling = self.sampling(
            card,
            max_tokens=max_tokens,
            logprobs=0 if ranks and self.logprobs is None else self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )
        if choices != sampling.n:
            sampling = replace(sampling, n=choices)
        grammar = self.answer_grammar()
        options, in_list = self.reply_options(), prompts is self.prompt
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
                suffix=self.suffix,
                add_special_tokens=self.add_special_tokens,
                truncate_prompt_tokens=self.truncation(card, max_tokens),
                return_prompt=bool(self.echo or self.return_token_ids),
                grammar=grammar,
                grammar_field=self.grammar_field,
                reply_options={**options, "prompt_field": f"prompt[{place}]"} if in_list else options,
            )
            for place, prompt in enumerate(prompts)
        )


def parse_completion(body: Mapping[str, Any]) -> CompletionBody:
    """A validated completion body. Raises InvalidRequest."""
    return parse(CompletionBody, *translate(body, chat=False))


@dataclass(frozen=True, slots=True)
class CompletionReply:
    """Answers of POST /v1/completions. `echoed`: length in characters of the prompt that each choice began with."""

    head: ReplyHead
    echoed: dict[int, int] = field(default_factory=dict)

    def _body(self, choices: list[Json]) -> Json:
        return self.head.body("text_completion", choices)

    def _choice(self, delta: Delta, text: str, finish: str | None, *, rest: bool = True) -> Json:
        """One choice. `rest`: it has everything of the delta besides text, else that was in the chunk before."""
        prompt = delta.prompt if rest else None
        token_ids = {"token_ids": delta.token_ids if rest else ()} if self.head.wants("token_ids") else {}
        return {
            "index": delta.index,
            "text": text,
            "logprobs": self._logprobs(delta if rest else replace(delta, positions=(), prompt=None)),
            "finish_reason": finish,
            **prompt_ids(self.head, prompt),
            **prompt_logprobs(self.head, prompt),
            **token_ids,
        }

    def _logprobs(self, delta: Delta) -> Json | None:
        """Four lists of equal length, which begin with the prompt if it is part of the text."""
        if not self.head.logprobs:
            return None
        entries: list[tuple[str, int, PositionLogprobs | None]] = []
        if delta.prompt is not None and self.head.wants("echo"):
            entries += prompt_positions(self.head, delta.prompt)
        begin = self.echoed.get(delta.index, 0)
        entries += [
            (self.head.token_name(position.logprobs.chosen, position.token), begin + position.offset, position.logprobs)
            for position in delta.positions
        ]
        return {
            "tokens": [text for text, _, _ in entries],
            "token_logprobs": [None if entry is None else entry.chosen.logprob for _, _, entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for _, _, entry in entries],
            "text_offset": [offset for _, offset, _ in entries],
        }

    def _top(self, logprobs: PositionLogprobs) -> dict[str, float]:
        """Logprobs of the likeliest tokens by text, always with the chosen one, as OpenAI and vLLM return them."""
        table: dict[str, float] = {}
        for token in (*logprobs.top, logprobs.chosen):
            table.setdefault(self.head.token_name(token), token.logprob)
        return table

    def _text(self, delta: Delta) -> str:
        """The delta's text, after the prompt in the first delta if that is wanted."""
        if delta.prompt is None or not self.head.wants("echo"):
            return delta.text
        self.echoed[delta.index] = len(delta.prompt.text)
        return delta.prompt.text + delta.text

    def chunks(self, delta: Delta) -> Iterator[Json]:
        """Text, then the finish reason with all that no text chunk had."""
        text = self._text(delta)
        if text:
            yield self._body([self._choice(delta, text, None)])
        if delta.finish_reason is not None:
            yield self._body([self._choice(delta, "", delta.finish_reason, rest=not text)])

    def last_chunks(self, usage: Usage) -> Iterator[Json]:
        """A chunk with token counts and no choices."""
        yield {**self._body([]), "usage": self.head.usage(usage)}

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Json:
        """The `text_completion` object."""
        listed = [self._choice(choice, self._text(choice), choice.finish_reason) for choice in self._best(choices)]
        return {**self._body(listed), "usage": self.head.usage(usage)}

    def _best(self, choices: Sequence[Delta]) -> Sequence[Delta]:
        """The choices that are returned: all, or of each prompt those with the highest mean log probability."""
        kept = self.head.request.reply_options.get("best")
        if not kept:
            return choices
        best: list[Delta] = []
        generated = self.head.request.sampling.n
        for first in range(0, len(choices), generated):
            ranked = sorted(choices[first : first + generated], key=_mean_logprob, reverse=True)[:kept]
            best += [replace(choice, index=len(best) + place) for place, choice in enumerate(ranked)]
        return best


def _mean_logprob(choice: Delta) -> float:
    """Mean log probability of a choice's tokens, which is minus infinity for a choice without tokens."""
    values = [position.logprobs.chosen.logprob for position in choice.positions]
    return sum(values) / len(values) if values else -math.inf
