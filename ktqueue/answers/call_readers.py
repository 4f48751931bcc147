"""Readers of one tool call each: JSON objects, and a name before JSON. The other readers have files of their own.

A reader takes the text after the marker of the call, in pieces of any length. The result does not depend on how the
text is cut. None of them raises: what is not a call is given back as text.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Emit = Callable[[str, str, str], None]
"""Takes a new piece of the call: name, arguments, the model's own id of the call."""
Types = Mapping[str, Mapping[str, str]]
"""The JSON type of each parameter of each function, where its schema says one."""


_ARGUMENTS = ("arguments", "parameters", "args")  # keys with this meaning


class CallReader(ABC):
    """Reads calls until they end. `finish` is called once, then or at the end of the text."""

    @abstractmethod
    def push(self, text: str) -> int | None:
        """Read text. Returns how much of it belonged to the calls if they have ended, else None."""

    @abstractmethod
    def finish(self) -> str:
        """The text ends here. Returns what was held back and is no call."""


class JsonReader(CallReader):
    """A JSON object {"name": ..., "arguments": {...}}, or a list of such objects.

    Arguments are passed on as they are written. `parameters` and `args` mean the same as `arguments`. Arguments that
    come before the name wait for it. `name`: that of a call whose whole JSON is its arguments. `names_are_keys`: an
    object is {NAME: ARGUMENTS}.
    """

    def __init__(
        self, begin: Callable[[], Emit], name: str | None = None, call_id: str = "", *, names_are_keys: bool = False
    ) -> None:
        self._begin = begin
        self._names_are_keys = names_are_keys
        self._given_name = name
        self._given_id = call_id
        self._depth = 0
        self._in_list = False
        self._in_string = False
        self._escaped = False
        self._string: list[str] = []
        self._raw: list[str] = []  # what belongs to no call so far
        self._new_object()

    def _new_object(self) -> None:
        self._emit: Emit | None = None
        self._id = self._given_id
        self._key: str | None = None
        self._expects_key = True
        self._in_arguments = False
        self._arguments_begun = False
        self._arguments_closed = False  # they were an object or a list, which has ended
        self._arguments_are_text = False  # a string that holds JSON
        self._waiting: list[str] = []  # characters of arguments that cannot be passed on yet

    def push(self, text: str) -> int | None:
        for place, character in enumerate(text):
            if self._depth > 0:
                if self._is_broken_at(character):
                    return place
                self._take(character)
                if self._depth == 0 and not self._in_list:
                    return place + 1
            elif character == "{":
                self._begin_object()
                self._take(character)
            elif character == "]" and self._in_list:
                self._raw.append(character)
                return place + 1
            elif character.isspace() or character == ("," if self._in_list else "["):
                self._raw.append(character)
                self._in_list = self._in_list or character == "["
            else:
                return place
        return None

    def _is_broken_at(self, character: str) -> bool:
        """Whether the arguments are complete, but the object around them is neither continued nor closed."""
        is_complete = self._arguments_closed and self._in_arguments and self._depth == 1
        return is_complete and not character.isspace() and character not in ",}"

    def finish(self) -> str:
        if self._emit is None:
            return "".join(self._raw)
        self._pass_on("".join(self._waiting))
        self._waiting = []
        return ""

    def _begin_object(self) -> None:
        self._new_object()
        if self._given_name is not None:
            self._emit, self._raw = self._begin(), []
            self._emit(self._given_name, "", self._id)

    def _take(self, character: str) -> None:
        depth, was_in_string = self._depth, self._in_string
        if was_in_string:
            self._take_in_string(character)
        elif character == '"':
            self._in_string, self._string = True, []
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        if self._given_name is not None:
            self._pass_on(character)
            return
        if self._emit is None:
            self._raw.append(character)
        if self._in_arguments:
            self._take_argument(character, depth, was_in_string)
        elif depth == 1:
            self._take_member(character, was_in_string)

    def _take_in_string(self, character: str) -> None:
        self._in_string = self._escaped or character != '"'
        if self._in_string:
            self._string.append(character)
        self._escaped = character == "\\" and not self._escaped

    def _take_member(self, character: str, was_in_string: bool) -> None:
        closes_string = was_in_string and not self._in_string
        if closes_string and self._expects_key:
            self._key, self._expects_key = "".join(self._string), False
            if self._names_are_keys:
                self._emit, self._raw = self._begin(), []
                self._emit(_text_of(self._string), "", "")
        elif closes_string and self._key in ("name", "tool_name") and self._string and self._emit is None:
            self._emit, self._raw = self._begin(), []
            self._emit(_text_of(self._string), "", self._id)
            self._pass_on("".join(self._waiting))
            self._waiting = []
        elif closes_string and self._key == "id":
            self._id = _text_of(self._string)
        elif not was_in_string and character == ":" and (self._names_are_keys or self._key in _ARGUMENTS):
            self._in_arguments, self._arguments_begun, self._arguments_closed = True, False, False
        elif not was_in_string and character == ",":
            self._key, self._expects_key = None, True

    def _take_argument(self, character: str, depth: int, was_in_string: bool) -> None:
        if depth == 1 and not was_in_string and character in ",}":
            self._in_arguments = False
            self._key, self._expects_key = None, character == ","
            if self._arguments_are_text:
                self._waiting = [_arguments_in(_text_of(self._waiting))]
            if self._emit is not None:
                self._pass_on("".join(self._waiting))
                self._waiting = []
            return
        if depth == 2 and self._depth == 1:
            self._arguments_closed = True
        elif self._arguments_closed:
            return  # white space
        if not self._arguments_begun:
            if character.isspace():
                return
            self._arguments_begun, self._arguments_are_text = True, character == '"'
        if self._arguments_are_text:
            if was_in_string and self._in_string:
                self._waiting.append(character)
        elif self._emit is None:
            self._waiting.append(character)
        else:
            self._pass_on(character)

    def _pass_on(self, arguments: str) -> None:
        if arguments and self._emit is not None:
            self._emit("", arguments, "")


def _arguments_in(text: str) -> str:
    """The arguments that a model wrote as a string: JSON in most cases. Any other text is a JSON string."""
    return text if text.lstrip().startswith(("{", "[")) else to_json(text) if text else "{}"


def _text_of(escaped: list[str]) -> str:
    """The text of a JSON string without its quotation marks."""
    try:
        return clean(str(json.loads(f'"{"".join(escaped)}"', strict=False)))
    except ValueError:
        return "".join(escaped)


def clean(text: str) -> str:
    """The text with question marks for lone surrogates, which an escape can make and UTF-8 does not have."""
    return text.encode(errors="replace").decode()


def to_json(value: Any) -> str:
    """A value as JSON. Raises ValueError for what JSON does not have: infinity, NaN; TypeError for other types."""
    return clean(json.dumps(value, ensure_ascii=False, allow_nan=False))


def first_mark(text: str, marks: Iterable[str]) -> tuple[int, str] | None:
    """The place of the mark that comes first, and the mark; the longest one if several begin there."""
    found = [(place, -len(mark), mark) for mark in marks if (place := text.find(mark)) >= 0]
    return (min(found)[0], min(found)[2]) if found else None


def overlap(text: str, mark: str) -> int:
    """The length of the longest end of `text` that is a beginning of `mark`, but not the whole mark."""
    place = text.find(mark[:1], max(0, len(text) - len(mark) + 1))
    while place >= 0 and not mark.startswith(text[place:]):
        place = text.find(mark[:1], place + 1)
    return len(text) - place if place >= 0 else 0


class HeldText:
    """Collects text until one of `marks` is found. Each piece is looked at once, however long the text becomes."""

    def __init__(self, marks: Sequence[str]) -> None:
        self.mark = ""  # the one that was found
        self.after = ""  # the text behind it
        self.look_for(marks)

    def look_for(self, marks: Sequence[str]) -> None:
        """Begin anew with other marks."""
        self._marks = marks
        self._overlap = max(map(len, marks)) - 1
        self._pieces: list[str] = []
        self._end = ""  # of the text so far, where a mark may have begun

    def push(self, text: str) -> bool:
        """Add text. Returns whether a mark was found; then `take` returns the text before it."""
        window = self._end + text
        found = first_mark(window, self._marks)
        if found is None:
            self._pieces.append(text)
            self._end = window[max(len(window) - self._overlap, 0) :]
            return False
        place, self.mark = found
        self.after = window[place + len(self.mark) :]
        held = "".join(self._pieces)
        self._pieces = [held[: len(held) - len(self._end)] + window[:place]]
        return True

    def take(self) -> str:
        """The text before the mark, or all text if none was found."""
        return "".join(self._pieces)


class NamedReader(CallReader):
    """A name, perhaps with words around it, then the JSON object of its arguments.

    DeepSeek V3: `function<｜tool▁sep｜>NAME` and a fenced block of JSON. V3.1: `NAME<｜tool▁sep｜>{...}`. Kimi-K2:
    `functions.NAME:0<|tool_call_argument_begin|>{...}`. Mistral: `NAME[ARGS]{...}`. Without arguments, the call ends at
    one of `ends`. The first text has the name and what ends it.
    """

    def __init__(self, begin: Callable[[], Emit], ends: tuple[str, ...]) -> None:
        self._begin = begin
        self._ends = ("{", *ends)
        self._json: JsonReader | None = None
        self._refused = ""  # what is no call

    def push(self, text: str) -> int | None:
        if self._json is not None:
            return self._json.push(text)
        place, mark = first_mark(text, self._ends) or (len(text), "")
        name, call_id = _name_in(text[:place])
        if not name or not mark:
            self._refused = text[:place] if mark == "{" else text[: place + len(mark)]
            return len(self._refused)
        if mark != "{":
            self._begin()(name, "{}", call_id)
            return place + len(mark)
        self._json = JsonReader(self._begin, name, call_id)
        used = self._json.push(text[place:])
        return None if used is None else place + used

    def finish(self) -> str:
        return self._refused if self._json is None else self._json.finish()


NAME = re.compile(r"[\w.-]+")


def _name_in(header: str) -> tuple[str, str]:
    """The name of the function in the text before its arguments, and the model's id of the call."""
    pieces = [piece.strip() for piece in re.split(r"<｜tool▁sep｜>|<\|tool_call_argument_begin\|>|\[ARGS\]", header)]
    first = pieces[1] if pieces[0] in ("function", "") and len(pieces) > 1 else pieces[0]
    first, _, marked = first.partition("[CALL_ID]")
    lines = first.splitlines()
    head = lines[0].strip() if lines else ""
    if match := re.fullmatch(r"(?:functions\.)?([\w.-]+):(\d+)", head):
        return match[1], head
    name = head.removeprefix("functions.")
    is_name = NAME.fullmatch(name) is not None and not name.isdigit()
    return (name if is_name else ""), clean(marked.strip())
