"""Incremental text of one choice. It never gives out half a character, or text that may belong to a stop string.

Bytes that are not valid UTF-8 become U+FFFD, one for each maximal invalid part, as Unicode recommends (the error
handler "replace" of Python's codecs). Text that may be the beginning of a stop string is held back until that is
decided. The result depends on the text alone, not on how it is cut into tokens: a stop string is found at its last
character, and if several end there, the longest one wins. Knows nothing of sampling or end tokens.
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
    """Turns token ids into text. `stopped` is set once a stop string was found, after which there is no more text.

    `emitted` counts the characters given out so far. `keeps_stop`: whether the stop string is part of the text.
    """

    __slots__ = ("_held", "_keeps_stop", "_matched", "_open", "_stops", "_token_bytes", "_utf8", "emitted", "stopped")

    def __init__(
        self, token_bytes: Callable[[int], bytes], stops: StopStrings | None = None, *, keeps_stop: bool = False
    ) -> None:
        self._token_bytes = token_bytes
        self._stops = stops
        self._keeps_stop = keeps_stop
        self._utf8 = _decoder("replace")
        self._open = False  # whether the decoder holds part of a character
        self._held = ""
        self._matched = [0] * len(stops.texts) if stops else []
        self.emitted = 0
        self.stopped = False

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Add a token and return the text that is certain now. With `may_stop` False, stop strings are plain text."""
        data = self._token_bytes(token_id)
        if not self._open and data.isascii():
            text = data.decode("ascii")
        else:
            text = self._utf8.decode(data)
            self._open = bool(self._utf8.getstate()[0])
        if self._stops is None:
            self.emitted += len(text)
            return text
        return self._advance(text, may_stop)

    def finish(self) -> str:
        """Return the text that was held back; half a character becomes U+FFFD. Call it once, at the end."""
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
                        return whole[: end if self._keeps_stop else end - length]
                    length = table[length]
                matched[which] = length
        keep = len(whole) - max(matched)
        self._held = whole[keep:]
        return whole[:keep]
