"""HarmonyParser: the channels of gpt-oss.

An answer is a list of messages: a header, `<|message|>`, a body, and a token that ends it. The channel in the header
says what the body is: analysis is reasoning, final is text, and commentary is a tool call if the header has a recipient
`to=functions.NAME`, else text. Source: https://cookbook.openai.com/articles/openai-harmony
"""

import re

from ktqueue.answers.call_readers import first_mark, overlap
from ktqueue.answers.parts import AnswerPart, AnswerReasoning, AnswerText, AnswerToolCall, joined

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_MAX_HEADER = 512  # characters; what is longer is text


class HarmonyParser:
    """Parses one choice of gpt-oss. Implements Parser."""

    def __init__(self, opening: str = "") -> None:
        self._buffer = opening
        self._in_body = False
        self._kind: type[AnswerText] | type[AnswerReasoning] | None = AnswerText
        self._calls = 0
        self._seen_marker = bool(opening)
        if opening:
            self.push("")

    @property
    def called(self) -> bool:
        return self._calls > 0

    @property
    def is_reasoning(self) -> bool:
        return self._in_body and self._kind is AnswerReasoning

    def push(self, text: str) -> tuple[AnswerPart, ...]:
        self._buffer += text
        parts: list[AnswerPart] = []
        while self._step(parts, final=False):
            pass
        return joined(parts)

    def finish(self) -> tuple[AnswerPart, ...]:
        parts: list[AnswerPart] = []
        while self._buffer and self._step(parts, final=True):
            pass
        return joined(parts)

    def _step(self, parts: list[AnswerPart], *, final: bool) -> bool:
        return self._read_body(parts, final=final) if self._in_body else self._read_header(parts, final=final)

    def _read_header(self, parts: list[AnswerPart], *, final: bool) -> bool:
        if not self._seen_marker and self._buffer and not _may_be_header(self._buffer):
            self._in_body = True  # plain text without channels
            return True
        header, marker, after = self._buffer.partition(_MESSAGE)
        if len(header) > _MAX_HEADER + (0 if marker else len(_MESSAGE)):
            self._in_body, self._kind = True, AnswerText
            return True
        if not marker:
            if final:
                if not _may_be_header(self._buffer):
                    parts.append(AnswerText(self._buffer))
                self._buffer = ""
            return False
        self._seen_marker = self._in_body = True
        self._buffer = after
        recipient = re.search(r"to=(?:functions\.)?([\w.-]+)", header)
        if recipient is not None:
            self._kind = None
            parts.append(AnswerToolCall(self._calls, recipient[1], ""))
            self._calls += 1
        else:
            self._kind = AnswerReasoning if "analysis" in header else AnswerText
        return True

    def _read_body(self, parts: list[AnswerPart], *, final: bool) -> bool:
        if found := first_mark(self._buffer, _ENDS):
            place, mark = found
            self._pass_on(parts, self._buffer[:place])
            self._buffer = self._buffer[place + len(mark) :]
            self._in_body = False
            self._seen_marker = True
            return bool(self._buffer)
        keep = 0 if final else max(overlap(self._buffer, mark) for mark in _ENDS)
        ready = len(self._buffer) - keep
        self._pass_on(parts, self._buffer[:ready])
        self._buffer = self._buffer[ready:]
        return False

    def _pass_on(self, parts: list[AnswerPart], text: str) -> None:
        if not text:
            return
        if self._kind is None:
            parts.append(AnswerToolCall(self._calls - 1, "", text))
        else:
            parts.append(self._kind(text))


def _may_be_header(text: str) -> bool:
    """Whether the text can be the beginning of a header."""
    words = text.lstrip()
    return any(
        words.startswith(mark) or mark.startswith(words) for mark in ("<|start|>", "<|channel|>", "assistant", "to=")
    )
