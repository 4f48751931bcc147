"""Reader of a tool call whose arguments stand between tags, as Qwen3-Coder, GLM-4.5, MiniMax-M2 and others write it."""

import json
from collections.abc import Callable
from typing import Any

from ktqueue.answers.call_readers import NAME, CallReader, Emit, Types


class XmlReader(CallReader):
    """Parameters between tags. The type of a value is that of the function's schema, else what it looks like.

    `name_end` ends the name, which comes first. A parameter is `key_start` KEY `key_end` VALUE `value_end`, and the
    call ends with `end`.
    """

    def __init__(
        self, begin: Callable[[], Emit], types: Types, *, name_end: str, key_start: str, key_end: str, value_end: str,
        end: str, name_may_end_at: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self._begin = begin
        self._types = types
        self._name_ends = (name_end, *name_may_end_at)
        self._name_end = name_end
        self._key_start, self._key_end, self._value_end, self._end = key_start, key_end, value_end, end
        self._buffer = ""
        self._used = 0  # characters that are read for good
        self._name: str | None = None
        self._emit: Emit | None = None
        self._count = 0
        self._ended = False

    def push(self, text: str) -> int | None:
        before = len(self._buffer)
        self._buffer += text
        while True:
            step = self._name_step() if self._name is None else self._parameter_step()
            if step is None:
                return None
            if step:
                return self._used - before

    def _name_step(self) -> bool | None:
        found = [(at, mark) for mark in self._name_ends if (at := self._buffer.find(mark)) >= 0]
        if not found:
            return None
        place, mark = min(found)
        if not NAME.fullmatch(self._buffer[:place].strip()):  # it is no call
            self._used = place + len(mark)
            self._buffer = self._buffer[: self._used]
            return True
        self._used = place + (len(mark) if mark == self._name_end else 0)
        self._name = self._buffer[:place].strip()
        self._emit = self._begin()
        self._emit(self._name, "", "")
        return False

    def _parameter_step(self) -> bool | None:
        assert self._emit is not None and self._name is not None
        rest = self._buffer[self._used :]
        start, end = rest.find(self._key_start), rest.find(self._end)
        if end >= 0 and (start < 0 or end < start):
            body = rest[:end].strip()
            if self._count == 0:  # perhaps the arguments are JSON
                self._emit("", body if body.startswith("{") else "{}", "")
            else:
                self._emit("", "}", "")
            self._used += end + len(self._end)
            self._ended = True
            return True
        if start < 0:
            return None
        key_from = start + len(self._key_start)
        key_to = rest.find(self._key_end, key_from)
        value_to = rest.find(self._value_end, key_to + len(self._key_end)) if key_to >= 0 else -1
        if value_to < 0:
            return None
        key, attributes = _key_and_attributes(rest[key_from:key_to].partition("</")[0].strip())
        value = rest[key_to + len(self._key_end) : value_to]
        kind = attributes or self._types.get(self._name, {}).get(key, "")
        separator = "{" if self._count == 0 else ", "
        self._emit("", f"{separator}{json.dumps(key, ensure_ascii=False)}: {_json_of(value, kind)}", "")
        self._count += 1
        self._used += value_to + len(self._value_end)
        return False

    def finish(self) -> str:
        if self._name is None:
            return self._buffer
        assert self._emit is not None
        if self._ended:
            return ""
        rest = self._buffer[self._used :].strip()
        if rest:
            self._emit("", self._cut_parameter(rest), "")
        else:
            self._emit("", "}" if self._count else "{}", "")
        return ""

    def _cut_parameter(self, rest: str) -> str:
        """The beginning of JSON for a parameter that is not complete, or the text itself if it is none."""
        key, found, value = rest.removeprefix(self._key_start).partition(self._key_end)
        separator = ", " if self._count else "{"
        if not rest.startswith(self._key_start) or not found:
            return rest if rest.startswith("{") and not self._count else ""
        name, _ = _key_and_attributes(key.partition("</")[0].strip())
        return (
            f"{separator}{json.dumps(name, ensure_ascii=False)}: {json.dumps(value.lstrip(), ensure_ascii=False)[:-1]}"
        )


def _key_and_attributes(text: str) -> tuple[str, str]:
    """The key of a parameter, and the type that its tag names (`name" string="true`)."""
    key, _, attributes = text.partition('"')
    if 'string="true' in attributes:
        return key, "string"
    return key, "any" if 'string="false' in attributes else ""


def _json_of(value: str, kind: str) -> str:
    """A parameter's text as JSON. One line break at each end belongs to the tags."""
    text = value.removeprefix("\n").removesuffix("\n")
    if kind == "string":
        return json.dumps(text, ensure_ascii=False)
    try:
        parsed: Any = json.loads(text)
    except ValueError:
        words = {"True": "true", "False": "false", "None": "null"}
        return words.get(text.strip(), json.dumps(text, ensure_ascii=False))
    return json.dumps(parsed, ensure_ascii=False)
