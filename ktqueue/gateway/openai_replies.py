"""Deltas to OpenAI's response bodies and stream chunks, for chat and for completions.

Field names and their order of life follow OpenAI's description 2.3.0: one id, created and model for a
whole response; the role once per choice; exactly one chunk per choice with a finish reason. Pure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ktqueue.broker.jobs import JobRecord
from ktqueue.core.events import PositionLogprobs, TokenLogprob, Usage
from ktqueue.gateway.openai_choices import Delta, Position, alone

Json = dict[str, Any]


class Reply(Protocol):
    """How one endpoint speaks."""

    def chunks(self, delta: Delta) -> Iterator[Json]:
        """The stream chunks for what one choice newly said."""
        ...

    def usage_chunk(self, usage: Usage) -> Json:
        """The stream's last chunk, where usage was asked for."""
        ...

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Json:
        """The body of a response that is not streamed."""
        ...


def reply_to(record: JobRecord) -> Reply:
    """How the endpoint speaks that a job's request came in by. Raises NewerFormat."""
    request = record.readable_request()
    logprobs = request.sampling.logprobs is not None
    if request.messages is not None:
        return ChatReply(f"chatcmpl-{record.id}", int(record.created_at), record.model, logprobs)
    return CompletionReply(f"cmpl-{record.id}", int(record.created_at), record.model, logprobs)


def usage_json(usage: Usage) -> Json:
    """Token counts as OpenAI has them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


@dataclass(frozen=True, slots=True)
class ChatReply:
    """POST /v1/chat/completions. `logprobs` tells whether they were asked for; `created` in Unix seconds."""

    id: str
    created: int
    model: str
    logprobs: bool

    def _body(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _chunk(self, index: int, delta: Json, logprobs: Json | None = None, finish: str | None = None) -> Json:
        choice: Json = {"index": index, "delta": delta, "finish_reason": finish}
        if logprobs is not None:
            choice["logprobs"] = logprobs
        return self._body("chat.completion.chunk", [choice])

    def _logprobs(self, positions: Sequence[Position]) -> Json | None:
        if not self.logprobs or not positions:
            return None
        return {"content": [_chat_logprob(one) for one in positions], "refusal": None}

    def chunks(self, delta: Delta) -> Iterator[Json]:
        """The role first, then text, then the finish reason with the logprobs that no text carried."""
        if delta.first:
            yield self._chunk(delta.index, {"role": "assistant", "content": ""})
        logprobs = self._logprobs(delta.positions)
        if delta.text:
            yield self._chunk(delta.index, {"content": delta.text}, logprobs)
            logprobs = None
        if delta.finish_reason is not None:
            yield self._chunk(delta.index, {}, logprobs, delta.finish_reason)

    def usage_chunk(self, usage: Usage) -> Json:
        """No choices, only the counts."""
        return {**self._body("chat.completion.chunk", []), "usage": usage_json(usage)}

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Json:
        """The `chat.completion` object."""
        listed = [
            {
                "index": one.index,
                "message": {"role": "assistant", "content": one.text, "refusal": None},
                "logprobs": (self._logprobs(one.positions) or {"content": [], "refusal": None})
                if self.logprobs
                else None,
                "finish_reason": one.finish_reason,
            }
            for one in choices
        ]
        return {**self._body("chat.completion", listed), "usage": usage_json(usage)}


@dataclass(frozen=True, slots=True)
class CompletionReply:
    """POST /v1/completions. `logprobs` as in ChatReply."""

    id: str
    created: int
    model: str
    logprobs: bool

    def _body(self, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, index: int, text: str, positions: Sequence[Position], finish: str | None) -> Json:
        return {
            "index": index,
            "text": text,
            "logprobs": _completion_logprobs(positions) if self.logprobs else None,
            "finish_reason": finish,
        }

    def chunks(self, delta: Delta) -> Iterator[Json]:
        """Text, then the finish reason with the logprobs that no text carried."""
        positions = delta.positions
        if delta.text:
            yield self._body([self._choice(delta.index, delta.text, positions, None)])
            positions = ()
        if delta.finish_reason is not None:
            yield self._body([self._choice(delta.index, "", positions, delta.finish_reason)])

    def usage_chunk(self, usage: Usage) -> Json:
        """No choices, only the counts."""
        return {**self._body([]), "usage": usage_json(usage)}

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Json:
        """The `text_completion` object."""
        listed = [self._choice(one.index, one.text, one.positions, one.finish_reason) for one in choices]
        return {**self._body(listed), "usage": usage_json(usage)}


def _chat_token(token: TokenLogprob, text: str) -> Json:
    return {"token": text, "logprob": token.logprob, "bytes": list(token.token_bytes)}


def _chat_logprob(position: Position) -> Json:
    logprobs = position.logprobs
    return {
        **_chat_token(logprobs.chosen, position.token),
        "top_logprobs": [_chat_token(one, alone(one)) for one in logprobs.top],
    }


def _completion_logprobs(positions: Sequence[Position]) -> Json:
    return {
        "tokens": [one.token for one in positions],
        "token_logprobs": [one.logprobs.chosen.logprob for one in positions],
        "top_logprobs": [_top(one.logprobs) for one in positions],
        "text_offset": [one.offset for one in positions],
    }


def _top(logprobs: PositionLogprobs) -> dict[str, float]:
    """Likeliest tokens by text, and always the chosen one, as OpenAI and vLLM give them."""
    table: dict[str, float] = {}
    for one in (*logprobs.top, logprobs.chosen):
        table.setdefault(alone(one), one.logprob)
    return table
