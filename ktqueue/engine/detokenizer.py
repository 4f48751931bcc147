"""Incremental text of one choice: never half a character, never a character that may be a stop string's.

Bytes that can't become UTF-8 turn into U+FFFD as soon as that is decided (codecs' "replace", the
Unicode practice of one mark for each maximal part). Text that may be the beginning of a stop string
is held back until decided. The result depends on the tokens alone, not on how text is cut into
them: a stop string is seen at its last character, and of several that end there the longest wins.
Knows nothing of sampling or of end tokens.
"""

import codecs
from collections.abc import Callable, Iterable

_decoder = codecs.getincrementaldecoder("utf-8")


class StopStrings:
    """Stop strings with their failure tables (Knuth, Morris, Pratt 1977), shared by all choices of a request."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(sorted(set(texts), key=len, reverse=True))  # longest first
        self.tables = tuple(_failure_table(text) for text in self.texts)


def _failure_table(text: str) -> list[int]:
    """table[n]: length of the longest proper prefix of text[:n] that is also its suffix."""
    table = [0] * (len(text) + 1)
    length = 0
    for end in range(1, len(text)):
        while length and text[end] != text[length]:
            length = table[length]
        if text[end] == text[length]:
            length += 1
        table[end + 1] = length
    return table


class Detokenizer:
    """Bytes in, decided text out. `stopped` once a stop string was seen; nothing comes after it.

    `emitted` counts the characters given out so far.
    """

    __slots__ = ("_held", "_matched", "_open", "_stops", "_token_bytes", "_utf8", "emitted", "stopped")

    def __init__(self, token_bytes: Callable[[int], bytes], stops: StopStrings | None = None) -> None:
        self._token_bytes = token_bytes
        self._stops = stops
        self._utf8 = _decoder("replace")
        self._open = False  # the decoder holds part of a character
        self._held = ""
        self._matched = [0] * len(stops.texts) if stops else []
        self.emitted = 0
        self.stopped = False

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """The text that this token decides. With `may_stop` False a stop string that ends in it is plain text."""
        data = self._token_bytes(token_id)
        if not self._open and data.isascii():
            text = data.decode("ascii")
        else:
            text = self._utf8.decode(data)
            self._open = bool(self._utf8.getstate()[0])
        return self._advance(text, may_stop)

    def finish(self) -> str:
        """The rest: held back text is plain text now, half a character is U+FFFD. Call it once, at the end."""
        text = self._advance(self._utf8.decode(b"", final=True), may_stop=True)
        if not self.stopped:
            text += self._held
            self.emitted += len(self._held)
            self._held = ""
        return text

    def _advance(self, text: str, may_stop: bool) -> str:
        if self._stops is not None and text:
            text = self._filter(self._stops, text, may_stop)
        self.emitted += len(text)
        return text

    def _filter(self, stops: StopStrings, text: str, may_stop: bool) -> str:
        if self.stopped:
            return ""
        matched = self._matched
        whole = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            for which, stop in enumerate(stops.texts):
                table = stops.tables[which]
                length = matched[which]
                while length and stop[length] != character:
                    length = table[length]
                if stop[length] == character:
                    length += 1
                if length == len(stop):
                    if may_stop:
                        self.stopped = True
                        self._held = ""
                        return whole[: end - length]
                    length = table[length]
                matched[which] = length
        keep = len(whole) - max(matched)
        self._held = whole[keep:]
        return whole[:keep]
