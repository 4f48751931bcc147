"""Reader of the calls of FunctionGemma and Gemma 4: `NAME{key:<escape>text<escape>,other:[1,true]}`.

Keys have no quotation marks, and texts have marks of their own. Source: the chat templates of these models.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from ktqueue.answers.call_readers import NAME, CallReader, Emit, HeldText, to_json

_DEEPEST = 100  # values inside values
_WORDS = {"true": True, "false": False, "null": None, "None": None, "True": True, "False": False}


class GemmaReader(CallReader):
    """One call, up to one of `ends`. It is read once it is complete. `quote`: the mark around texts."""

    def __init__(self, begin: Callable[[], Emit], quote: str, ends: Sequence[str]) -> None:
        self._begin = begin
        self._quote = quote
        self._held = HeldText(ends)
        self._ended = False

    def push(self, text: str) -> int | None:
        if not self._held.push(text):
            return None
        self._ended = True
        return len(text) - len(self._held.after)

    def finish(self) -> str:
        """Emit the call. Text that is none is given back, with the marker that ended it."""
        text = self._held.take()
        name, brace, rest = text.partition("{")
        if not brace or not NAME.fullmatch(name.strip()):
            return text + self._held.mark
        try:
            arguments = to_json(_Values(brace + rest, self._quote).read())
        except ValueError:
            if self._ended:
                return text + self._held.mark
            arguments = "{"  # the text ends inside the call
        self._begin()(name.strip(), arguments, "")
        return ""


class _Values:
    """Reads one value. Raises ValueError if there is none, or if values are too deep in each other."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote
        self._place = 0

    def read(self, depth: int = 0) -> Any:
        if depth > _DEEPEST:
            raise ValueError("values are too deep in each other")
        self._skip_space()
        if self._take("{"):
            pairs = {}
            while not self._take("}"):
                key = self._key()
                pairs[key] = self.read(depth + 1)
                self._take(",")
            return pairs
        if self._take("["):
            items = []
            while not self._take("]"):
                begin = self._place
                items.append(self.read(depth + 1))
                if not self._take(",") and self._place == begin:
                    raise ValueError("a list has no end")
            return items
        if self._take(self._quote):
            text = self._up_to(self._quote)
            return _plain(text) if self._quote == "<escape>" else text
        return _plain(self._word(",}]"))

    def _key(self) -> str:
        self._skip_space()
        key = self._up_to(self._quote) if self._take(self._quote) else self._word(":").strip()
        if not self._take(":"):
            raise ValueError("a key has no value")
        return key

    def _word(self, ends: str) -> str:
        begin = self._place
        while self._place < len(self._text) and self._text[self._place] not in ends:
            self._place += 1
        if self._place == len(self._text):
            raise ValueError("the text ends inside a value")
        return self._text[begin : self._place]

    def _up_to(self, mark: str) -> str:
        place = self._text.find(mark, self._place)
        if place < 0:
            raise ValueError("a text has no end")
        text, self._place = self._text[self._place : place], place + len(mark)
        return text

    def _take(self, mark: str) -> bool:
        self._skip_space()
        found = self._text.startswith(mark, self._place)
        self._place += len(mark) if found else 0
        return found

    def _skip_space(self) -> None:
        while self._place < len(self._text) and self._text[self._place].isspace():
            self._place += 1


def _plain(word: str) -> Any:
    """A number or a word of JSON, else the text itself."""
    text = word.strip()
    if text in _WORDS:
        return _WORDS[text]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return word
    return value if isinstance(value, int | float) and not isinstance(value, bool) else word
