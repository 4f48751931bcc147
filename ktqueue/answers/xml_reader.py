"""Reader of a tool call whose arguments stand between tags, as Qwen3-Coder, GLM-4.5, MiniMax-M2 and others write it."""

import json
import re
from collections.abc import Callable, Mapping

from ktqueue.answers.call_readers import NAME, CallReader, Emit, HeldText, Types, first_mark, to_json

NULLABLE = "string or null"
_CDATA = ("<![CDATA[", "]]>")  # XML's marks around a text


class XmlReader(CallReader):
    """Parameters between tags. The type of a value is that of the function's schema, else what it looks like.

    `name_end` ends the name, which the first text has whole. A parameter is `key_start` KEY `key_end` VALUE
    `value_end`, and the call ends with `end`. Models forget `value_end`: a value also ends before a line that begins
    another parameter of the function, and before lines with `end` and one of `closings`, which follow calls.
    `cdata`: a text may stand in XML's `<![CDATA[...]]>`.
    """

    def __init__(
        self, begin: Callable[[], Emit], types: Types, *, name_end: str, key_start: str, key_end: str, value_end: str,
        end: str, name_may_end_at: tuple[str, ...] = (), closings: tuple[str, ...] = (),
        cdata: bool = False,
    ) -> None:  # fmt: skip
        self._begin = begin
        self._types = types
        self._name_ends = (name_end, *name_may_end_at)
        self._name_end = name_end
        self._key_start, self._key_end, self._value_end, self._end = key_start, key_end, value_end, end
        self._value_ends = (value_end, *(f"\n{end}\n{closing}" for closing in closings))
        self._next_key = re.compile(f"\n({re.escape(key_start)})([^<>\n]+){re.escape(key_end)}")
        self._held = HeldText((key_start, end))
        self._cdata = cdata
        self._begun = ""  # of a parameter, before the text that is held
        self._text_begun = ""  # of a value in CDATA that has the mark of a value's end
        self._key = ""
        self._name: str | None = None
        self._emit: Emit | None = None
        self._count = 0
        self._ended = False
        self._refused = ""  # what is no call

    def push(self, text: str) -> int | None:
        rest = text
        if self._emit is None:
            rest = self._read_name(text)
            if self._emit is None:
                return len(text) - len(rest)
        while self._held.push(rest):
            rest = self._held.after
            self._read_held(self._held.mark, self._held.take(), self._emit)
            if self._ended:
                return len(text) - len(rest)
        return None

    def _read_name(self, text: str) -> str:
        """Begin the call if the text begins with a name. Returns the text behind it, or behind what is no call."""
        place, mark = first_mark(text, self._name_ends) or (len(text), "")
        name = text[:place].strip()
        if not mark or not NAME.fullmatch(name):
            self._refused = text[: place + len(mark)]
            return text[place + len(mark) :]
        self._name = name
        self._emit = self._begin()
        self._emit(name, "", "")
        return text[place + (len(mark) if mark == self._name_end else 0) :]

    def _read_held(self, mark: str, held: str, emit: Emit) -> None:
        if mark == self._end:
            body = held.strip()
            if self._count == 0:  # perhaps the arguments are JSON
                emit("", body if body.startswith("{") else "{}", "")
            else:
                emit("", "}", "")
            self._ended = True
        elif mark == self._key_start:
            self._begun = mark
            self._held.look_for((self._key_end,))
        elif mark == self._key_end:
            self._key = held
            self._begun += held + mark
            self._held.look_for(self._value_ends)
        elif self._cdata and mark == self._value_end and _opens_cdata(held):
            self._text_begun = held + mark  # this mark is part of the text, which ends later
            self._begun += self._text_begun
            self._held.look_for(tuple(f"{_CDATA[1]}{space}{mark}" for space in ("", "\n")))
        else:
            if mark.startswith(_CDATA[1]):
                held, mark = self._text_begun + held + _CDATA[1], self._value_end
            self._emit_parameters(held, emit)
            self._begun = ""
            self._held.look_for((self._key_start, self._end))
            if mark != self._value_end:
                emit("", "}", "")
                self._ended = True

    def _emit_parameters(self, held: str, emit: Emit) -> None:
        """Emit the parameter whose value is held, and those that begin in it because it has no end."""
        types = self._types.get(self._name or "", {})
        tag, start = self._key, 0
        if self._cdata and held.lstrip().startswith(_CDATA[0]) and held.rstrip().endswith(_CDATA[1]):
            self._emit_parameter(tag, held.strip(), types, emit)
            return
        for found in self._next_key.finditer(held):
            if types and _key_and_attributes(found[2])[0] not in types:
                continue  # a value may have such a line
            self._emit_parameter(tag, held[start : found.start()], types, emit)
            tag, start = found[2], found.end()
        self._emit_parameter(tag, held[start:], types, emit)

    def _emit_parameter(self, tag: str, value: str, types: Mapping[str, str], emit: Emit) -> None:
        key, attributes = _key_and_attributes(tag)
        kind = attributes or types.get(key, "")
        if self._cdata and value.startswith(_CDATA[0]) and value.endswith(_CDATA[1]):
            value, kind = value.removeprefix(_CDATA[0]).removesuffix(_CDATA[1]), kind or "string"
        emit("", f"{', ' if self._count else '{'}{to_json(key)}: {_json_of(value, kind)}", "")
        self._count += 1

    def finish(self) -> str:
        if self._emit is None:
            return self._refused
        if self._ended:
            return ""
        held = self._held.take()
        if self._begun.endswith(self._key_end) and held.rstrip().endswith(f"\n{self._end}"):
            self._emit_parameters(held.rstrip().removesuffix(f"\n{self._end}"), self._emit)
            self._emit("", "}", "")
            return ""
        rest = (self._begun + held).strip()
        if rest:
            self._emit("", self._cut_parameter(rest), "")
        else:
            self._emit("", "}" if self._count else "{}", "")
        return ""

    def _cut_parameter(self, rest: str) -> str:
        """The beginning of JSON for a parameter that is not complete, or the text itself if it is none."""
        key, found, value = rest.removeprefix(self._key_start).partition(self._key_end)
        if not rest.startswith(self._key_start) or not found:
            return rest if rest.startswith("{") and not self._count else ""
        name, _ = _key_and_attributes(key)
        text = value.lstrip().removeprefix(_CDATA[0]) if self._cdata else value.lstrip()
        return f"{', ' if self._count else '{'}{to_json(name)}: {to_json(text)[:-1]}"


def _opens_cdata(value: str) -> bool:
    """Whether a value begins a text in CDATA that it does not end."""
    return value.lstrip().startswith(_CDATA[0]) and not value.rstrip().endswith(_CDATA[1])


def _key_and_attributes(text: str) -> tuple[str, str]:
    """The key of a parameter, and the type that its tag names (`name" string="true`)."""
    key, _, attributes = text.partition("</")[0].strip().partition('"')
    if 'string="true' in attributes:
        return key, "string"
    return key, "any" if 'string="false' in attributes else ""


def _json_of(value: str, kind: str) -> str:
    """A parameter's text as JSON. A line break at its beginning belongs to the tags, and then one at its end too."""
    text = value[1:].removesuffix("\n") if value.startswith("\n") else value
    if kind == "string" or (kind == NULLABLE and text.strip() not in ("null", "None")):
        return to_json(text)
    try:
        return to_json(json.loads(text))
    except (ValueError, RecursionError):
        words = {"True": "true", "False": "false", "None": "null"}
        return words.get(text.strip(), to_json(text))
