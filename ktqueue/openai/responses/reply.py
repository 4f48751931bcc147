"""Answers of POST /v1/responses: the response object, and the events of its stream.

The parts of an answer become items: reasoning, messages and function calls. Events are numbered from 0, and the same
journal always gives the same events, so a reader can continue after any of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ktqueue.answers.parts import AnswerPart, AnswerReasoning, AnswerText, AnswerToolCall
from ktqueue.core.codec import Json
from ktqueue.core.events import FinishReason, Usage
from ktqueue.openai.chat import logprob_json
from ktqueue.openai.choices import Delta
from ktqueue.openai.endpoint import ReplyHead
from ktqueue.openai.responses.tools import called_function, function_name
from ktqueue.openai.tool_calls import call_id


class ResponseReply:
    """Writes the answer to one call. `echo`: the fields of the request that the answer repeats."""

    def __init__(self, head: ReplyHead, echo: Mapping[str, Any]) -> None:
        self._head = head
        self._echo = echo
        self._number = 0
        self._items: list[Json] = []
        self._open_part: AnswerPart | None = None  # the kind of item that is being written
        self._finish: FinishReason | None = None
        self._logprobs: dict[int, list[Json]] = {}  # of each message's tokens that no event had
        self._message = -1  # the number of the last message

    def response(self, status: str, usage: Usage | None = None, error: Json | None = None) -> Json:
        """The response object with the items so far."""
        cut = status == "incomplete"
        user = self._head.request.user
        return {
            **self._echo,
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "completed_at": None,
            "model": self._head.model,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [dict(item) for item in self._items],
            **({} if usage is None else {"usage": _usage(usage)}),
            **({} if user is None else {"user": user}),
        }

    def chunks(self, delta: Delta) -> Iterator[Json]:
        """The events for the new parts of the answer."""
        if delta.first:
            yield self._event("response.created", response=self.response("in_progress"))
            yield self._event("response.in_progress", response=self.response("in_progress"))
        if self._head.logprobs:
            for run, position in delta.text_positions:
                self._logprobs.setdefault(run, []).append(logprob_json(self._head, position))
        for part in delta.parts:
            yield from self._part(part)
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason
            yield from self._close_item()

    def last_chunks(self, usage: Usage) -> Iterator[Json]:
        """The last event, with the whole response."""
        status = self._status()
        yield self._event(f"response.{status}", response=self.response(status, usage))

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Json:
        """The response object of an answer that has ended."""
        for _ in self.chunks(choices[0]):
            pass
        return self.response(self._status(), usage)

    def _status(self) -> str:
        return "incomplete" if self._finish is FinishReason.LENGTH else "completed"

    def _event(self, kind: str, **fields: Any) -> Json:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _part(self, part: AnswerPart) -> Iterator[Json]:
        former = self._open_part
        is_same = type(former) is type(part) and (
            not isinstance(part, AnswerToolCall) or (isinstance(former, AnswerToolCall) and former.place == part.place)
        )
        if not is_same:
            yield from self._close_item()
            yield from self._open_item(part)
        place, item = len(self._items) - 1, self._items[-1]
        if isinstance(part, AnswerToolCall):
            item["arguments"] += part.arguments
            if part.arguments:
                kind, fields = "response.function_call_arguments.delta", {"delta": part.arguments}
                yield self._event(kind, item_id=item["id"], output_index=place, **fields)
            return
        item["content"][0]["text"] += part.text
        where: Json = {"item_id": item["id"], "output_index": place, "content_index": 0, "delta": part.text}
        if isinstance(part, AnswerText):
            yield self._event("response.output_text.delta", **where, logprobs=self._take_logprobs())
        else:
            yield self._event("response.reasoning_text.delta", **where)

    def _take_logprobs(self) -> list[Json]:
        """Add the new log probabilities to the open message, and return them."""
        new = self._logprobs.pop(self._message, [])
        self._items[-1]["content"][0]["logprobs"] += new
        return new

    def _open_item(self, part: AnswerPart) -> Iterator[Json]:
        place = len(self._items)
        name = f"{self._head.id.removeprefix('resp_')}_{place}"
        item: Json
        if isinstance(part, AnswerToolCall):
            function = called_function(self._echo.get("tools", ()), part.name)
            item = {"id": f"fc_{name}", "type": "function_call", **function, "arguments": ""}
            item["call_id"] = call_id(self._head.id, 0, part)
        elif isinstance(part, AnswerReasoning):
            item = {"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": []}
        else:
            item = {"id": f"msg_{name}", "type": "message", "role": "assistant", "content": []}
        item["status"] = "in_progress"
        self._items.append(item)
        self._open_part = part
        yield self._event("response.output_item.added", output_index=place, item=dict(item))
        if isinstance(part, AnswerToolCall):
            return
        kind = "output_text" if isinstance(part, AnswerText) else "reasoning_text"
        content: Json = {"type": kind, "text": ""}
        if isinstance(part, AnswerText):
            content |= {"annotations": [], "logprobs": []}
        item["content"] = [content]
        yield self._event(
            "response.content_part.added", item_id=item["id"], output_index=place, content_index=0, part=dict(content)
        )
        if isinstance(part, AnswerText):
            self._message += 1
            content["logprobs"] = []  # a list of its own, which the event does not share

    def _close_item(self) -> Iterator[Json]:
        part, self._open_part = self._open_part, None
        if part is None:
            return
        place, item = len(self._items) - 1, self._items[-1]
        item["status"] = "incomplete" if self._finish is FinishReason.LENGTH else "completed"
        where: Json = {"item_id": item["id"], "output_index": place}
        if isinstance(part, AnswerToolCall):
            yield self._event(
                "response.function_call_arguments.done", **where, name=item["name"], arguments=item["arguments"]
            )
        else:
            content = item["content"][0]
            if isinstance(part, AnswerText):
                self._take_logprobs()
                yield self._event(
                    "response.output_text.done",
                    **where,
                    content_index=0,
                    text=content["text"],
                    logprobs=list(content["logprobs"]),
                )
            else:
                yield self._event("response.reasoning_text.done", **where, content_index=0, text=content["text"])
            yield self._event("response.content_part.done", **where, content_index=0, part=dict(content))
        yield self._event("response.output_item.done", output_index=place, item=dict(item))


def assistant_message(response: Mapping[str, Any]) -> Json:
    """The message that a response adds to its conversation, as a chat body has it."""
    text = "".join(
        content["text"] for item in response["output"] if item["type"] == "message" for content in item["content"]
    )
    message: Json = {"role": "assistant", "content": text}
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    if calls:
        message["tool_calls"] = [
            {
                "id": item["call_id"],
                "type": "function",
                "function": {
                    "name": function_name(item.get("namespace"), item["name"]),
                    "arguments": item["arguments"],
                },
            }
            for item in calls
        ]
    return message


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
