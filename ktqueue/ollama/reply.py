"""Deltas to the answers of POST /api/chat and /api/generate: one object, or lines of which the last is `done`."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from ktqueue.answers.parts import AnswerPart, AnswerReasoning, AnswerText, AnswerToolCall, joined
from ktqueue.core.codec import Json
from ktqueue.core.events import FinishReason, Usage
from ktqueue.openai.chat import logprob_json
from ktqueue.openai.choices import Delta, Position
from ktqueue.openai.endpoint import ReplyHead
from ktqueue.openai.tool_calls import call_arguments, call_id

NANOSECONDS = 1_000_000_000


class OllamaChatReply:
    """Answers of POST /api/chat. A tool call is sent whole, so its pieces are kept until it ends."""

    def __init__(self, head: ReplyHead) -> None:
        self._head = head
        self._call: list[AnswerToolCall] = []  # pieces of the call that is being written
        self._finish: FinishReason | None = None
        self._positions: list[Position] = []  # whose log probabilities no line had

    def chunks(self, delta: Delta) -> Iterator[Json]:
        """A line for each new part."""
        self._positions += delta.positions
        for part in delta.parts:
            if self._call and not (isinstance(part, AnswerToolCall) and part.place == self._call[0].place):
                yield self._line(self._ended_call())
            if isinstance(part, AnswerToolCall):
                self._call.append(part)
            else:
                yield self._line([part])
        if delta.finish_reason is not None:
            if self._call:
                yield self._line(self._ended_call())
            self._finish = delta.finish_reason

    def last_chunks(self, usage: Usage) -> Iterator[Json]:
        """The last line, with the token counts."""
        yield {**self._line([]), **_ending(self._finish, usage)}

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Json:
        """The answer as one object."""
        self._positions += choices[0].positions
        return {**self._line(choices[0].parts), **_ending(choices[0].finish_reason, usage)}

    def content(self, parts: Sequence[AnswerPart]) -> Json:
        """The fields that contain these parts."""
        message: Json = {"role": "assistant", "content": _text(parts), **_thinking(parts)}
        calls = [part for part in parts if isinstance(part, AnswerToolCall)]
        if calls:
            message["tool_calls"] = [self._tool_call(call) for call in calls]
        return {"message": message}

    def _line(self, parts: Sequence[AnswerPart]) -> Json:
        head: Json = {"model": self._head.model, "created_at": timestamp(self._head.created)}
        if self._positions and self._head.logprobs:
            head["logprobs"] = [logprob_json(self._head, position) for position in self._positions]
        self._positions = []
        return {**head, **self.content(parts), "done": False}

    def _ended_call(self) -> Sequence[AnswerPart]:
        call = joined(self._call)
        self._call = []
        return call

    def _tool_call(self, call: AnswerToolCall) -> Json:
        function = {"index": call.place, "name": call.name, "arguments": call_arguments(call.arguments)}
        return {"id": call_id(self._head.id, 0, call), "function": function}


class OllamaGenerateReply(OllamaChatReply):
    """Answers of POST /api/generate, where no tools are called."""

    def content(self, parts: Sequence[AnswerPart]) -> Json:
        """The fields that contain these parts."""
        return {"response": _text(parts), **_thinking(parts)}


def timestamp(seconds: float) -> str:
    """Unix seconds as RFC 3339 has them."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _text(parts: Sequence[AnswerPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, AnswerText))


def _thinking(parts: Sequence[AnswerPart]) -> Json:
    text = "".join(part.text for part in parts if isinstance(part, AnswerReasoning))
    return {"thinking": text} if text else {}


def _ending(finish: FinishReason | None, usage: Usage) -> Json:
    """Why the answer ended, token counts, and durations in nanoseconds if they are known."""
    ending: Json = {
        "done": True,
        "done_reason": finish or FinishReason.STOP,
        "prompt_eval_count": usage.prompt_tokens,
        "eval_count": usage.completion_tokens,
    }
    if usage.timings is not None:
        spent = usage.timings
        seconds = {
            "total_duration": spent.queue + spent.tokenise + spent.prefill + spent.decode,
            "load_duration": 0.0,
            "prompt_eval_duration": spent.prefill,
            "eval_duration": spent.decode,
        }
        ending |= {name: round(value * NANOSECONDS) for name, value in seconds.items()}
    return ending
