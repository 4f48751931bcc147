"""Requests in the form of OpenAI's API, and how their streamed answers are read."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from time import perf_counter
from typing import Any

from ktqueue.bench.serving.event_stream import EventStream
from ktqueue.bench.serving.http_client import RequestFailure
from ktqueue.core.codec import CodecError, dumps, loads

LONGEST_MESSAGE = 300  # characters of a server's error that are kept
MAX_ERROR_BYTES = 64 << 10
_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")  # parts of a chat's delta


class Backend(StrEnum):
    """Which endpoint is asked, by vLLM's names."""

    OPENAI = "openai"
    OPENAI_CHAT = "openai-chat"

    @property
    def endpoint(self) -> str:
        """The path of the endpoint."""
        return "/v1/completions" if self is Backend.OPENAI else "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class RequestForm:
    """What all requests of a run have in common. A field of `extra` replaces another; null removes it."""

    backend: Backend
    model: str
    ignore_eos: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, prompt: str, max_tokens: int, *, stream: bool = True) -> bytes:
        """Write the body of a request as JSON."""
        value: dict[str, Any] = {"model": self.model}
        if self.backend is Backend.OPENAI:
            value["prompt"] = prompt
        else:
            value["messages"] = [{"role": "user", "content": prompt}]
        value |= {"max_tokens": max_tokens, "stream": stream}
        if stream:
            value["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            value["ignore_eos"] = True
        value |= self.extra
        return dumps({name: part for name, part in value.items() if part is not None})


class StreamedAnswer:
    """Reads a streamed answer, and notes when its parts arrived. Moments are those of `perf_counter`."""

    def __init__(self, sent_at: float) -> None:
        self.sent_at = sent_at
        self.first_at: float | None = None
        self.ended_at = sent_at
        self.gaps = array("d")  # seconds between chunks with output
        self.prompt_tokens: int | None = None  # as the server counts them
        self.completion_tokens: int | None = None
        self.finish_reason: str | None = None
        self._stream = EventStream()
        self._last_at = sent_at
        self._done = False
        self._status = 0
        self._error = bytearray()  # beginning of a body that is not a stream

    @property
    def chunks(self) -> int:
        """Number of chunks with output."""
        return 0 if self.first_at is None else len(self.gaps) + 1

    @property
    def output_tokens(self) -> int:
        """Number of tokens by the server's count, or of chunks if it does not tell."""
        return self.chunks if self.completion_tokens is None else self.completion_tokens

    def receive(self, status: int, piece: bytes) -> bool:
        """Take a piece of the body. Returns True after the stream's last event. Raises RequestFailure."""
        now = perf_counter()
        self.ended_at = now
        self._status = status
        if status != 200:
            self._error += piece[: MAX_ERROR_BYTES - len(self._error)]
            return False
        try:
            for data in self._stream.feed(piece):
                if data == b"[DONE]":
                    self._done = True
                    return True
                if data:
                    self._take(loads(data), now)
        except (ValueError, CodecError) as error:
            raise RequestFailure("invalid event", str(error)) from error
        return False

    def check(self) -> None:
        """Raise RequestFailure unless the answer is complete and has output."""
        if self._status != 200:
            raise refusal(self._status, bytes(self._error))
        if not self._done and self.finish_reason is None:
            raise RequestFailure("incomplete stream", "the stream ended without a finish_reason or [DONE]")
        if self.first_at is None:
            raise RequestFailure("no output", f"the answer is empty, finish_reason {self.finish_reason!r}")

    def _take(self, chunk: Any, now: float) -> None:
        if not isinstance(chunk, dict):
            raise ValueError(f"not an object: {str(chunk)[:LONGEST_MESSAGE]}")
        if error := chunk.get("error"):
            raise RequestFailure("error in stream", _message(error))
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self.prompt_tokens = _count(usage, "prompt_tokens", self.prompt_tokens)
            self.completion_tokens = _count(usage, "completion_tokens", self.completion_tokens)
        choices = chunk.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            return
        choice = choices[0]
        delta = choice.get("delta")
        has_output = choice.get("text") or (isinstance(delta, dict) and any(delta.get(name) for name in _TEXTS))
        if has_output:
            if self.first_at is None:
                self.first_at = now
            else:
                self.gaps.append(now - self._last_at)
            self._last_at = now
        if choice.get("finish_reason"):
            self.finish_reason = str(choice["finish_reason"])


def refusal(status: int, body: bytes) -> RequestFailure:
    """The failure for an answer with this status, with the message of its body."""
    try:
        value = loads(body)
        message = _message(value.get("error", value)) if isinstance(value, dict) else str(value)
    except CodecError:
        message = _printable(body.decode(errors="replace"))
    return RequestFailure(f"HTTP {status}", message or "no message")


def _message(error: Any) -> str:
    """The message of an error object, in the forms that servers give it."""
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return _printable(str(error))


def _printable(text: str) -> str:
    """The beginning of a server's text, without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in text[:LONGEST_MESSAGE]).strip()


def _count(usage: Mapping[str, Any], name: str, known: int | None) -> int | None:
    value = usage.get(name)
    return value if isinstance(value, int) and value >= 0 else known
