"""Deltas to the answers of POST /v1/messages: one message, or events that build it block by block."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ktqueue.answers.parts import AnswerPart, AnswerReasoning, AnswerText, AnswerToolCall
from ktqueue.core.codec import Json
from ktqueue.core.events import FinishReason, Usage
from ktqueue.openai.choices import Delta
from ktqueue.openai.endpoint import ReplyHead
from ktqueue.openai.tool_calls import call_arguments, call_id

_NO_USAGE = Usage(prompt_tokens=0, completion_tokens=0)


class MessageReply:
    """Answers of POST /v1/messages. A stream's events depend on those before: it has one block open at a time."""

    def __init__(self, head: ReplyHead) -> None:
        self._head = head
        self._stops: Sequence[str] = head.request.reply_options.get("stops") or ()
        self._block = -1  # place of the last block that was begun
        self._open: tuple[type[AnswerPart], int] | None = None  # kind of that block, and place of its tool call
        self._ending: Json = {"stop_reason": "end_turn", "stop_sequence": None}

    def chunks(self, delta: Delta) -> Iterator[Json]:
        """The events for new parts. The event with the stop reason comes later, beside the token counts."""
        if delta.first:
            message = {**self._message([], _NO_USAGE), "stop_reason": None, "stop_sequence": None}
            yield {"type": "message_start", "message": message}
        parts, ending = self._cut(delta)
        for part in parts:
            yield from self._piece(part)
        if delta.finish_reason is not None:
            yield from self._close()
            self._ending = ending

    def last_chunks(self, usage: Usage) -> Iterator[Json]:
        """The stop reason with all token counts, and the end of the message."""
        yield {"type": "message_delta", "delta": self._ending, "usage": _usage(usage)}
        yield {"type": "message_stop"}

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Json:
        """The message."""
        parts, ending = self._cut(choices[0])
        return {**self._message([self._block_of(part) for part in parts], usage), **ending}

    def _message(self, content: list[Json], usage: Usage) -> Json:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "usage": _usage(usage),
        }

    def _cut(self, delta: Delta) -> tuple[tuple[AnswerPart, ...], Json]:
        """The parts without the stop sequence that ends them, and why the answer ends."""
        if delta.finish_reason is FinishReason.LENGTH:
            return delta.parts, {"stop_reason": "max_tokens", "stop_sequence": None}
        last = delta.parts[-1] if delta.parts else None
        if delta.finish_reason is not None and isinstance(last, AnswerText | AnswerReasoning):
            for stop in self._stops:
                if last.text.endswith(stop):
                    rest = last.text.removesuffix(stop)
                    parts = delta.parts[:-1] + ((replace(last, text=rest),) if rest else ())
                    return parts, {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return delta.parts, {"stop_reason": "tool_use" if delta.called else "end_turn", "stop_sequence": None}

    def _piece(self, part: AnswerPart) -> Iterator[Json]:
        """A piece of the open block, or the end of that block and the beginning of another."""
        opened = (type(part), part.place if isinstance(part, AnswerToolCall) else 0)
        if self._open != opened:
            yield from self._close()
            self._open = opened
            self._block += 1
            yield {"type": "content_block_start", "index": self._block, "content_block": self._begun(part)}
        delta = _block_delta(part)
        if delta is not None:
            yield {"type": "content_block_delta", "index": self._block, "delta": delta}

    def _close(self) -> Iterator[Json]:
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._block}

    def _begun(self, part: AnswerPart) -> Json:
        if isinstance(part, AnswerToolCall):
            return self._tool_use(part, {})
        if isinstance(part, AnswerReasoning):
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "text", "text": ""}

    def _block_of(self, part: AnswerPart) -> Json:
        if isinstance(part, AnswerToolCall):
            return self._tool_use(part, call_arguments(part.arguments))
        if isinstance(part, AnswerReasoning):
            return {"type": "thinking", "thinking": part.text, "signature": ""}
        return {"type": "text", "text": part.text}

    def _tool_use(self, call: AnswerToolCall, arguments: Any) -> Json:
        return {"type": "tool_use", "id": call_id(self._head.id, 0, call), "name": call.name, "input": arguments}


def _block_delta(part: AnswerPart) -> Json | None:
    if isinstance(part, AnswerToolCall):
        return {"type": "input_json_delta", "partial_json": part.arguments} if part.arguments else None
    if isinstance(part, AnswerReasoning):
        return {"type": "thinking_delta", "thinking": part.text}
    return {"type": "text_delta", "text": part.text}


def _usage(usage: Usage) -> Json:
    """Token counts. `input_tokens` are those that were not in the prefix cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
    }
