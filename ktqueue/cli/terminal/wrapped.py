"""Writes a stream of text to standard output, its lines broken between words."""

from ktqueue.cli.terminal.console import plain_text, write

LONGEST_LINE = 88  # columns: longer lines are hard to read


class Wrapped:
    """Whole words are written as soon as they are known to be whole. `width` is the terminal's, in columns."""

    def __init__(self, width: int) -> None:
        self._width = min(width - 1, LONGEST_LINE)
        self._column = 0
        self._spaces = 0  # not written yet: none at the end of a line
        self._word = ""
        self._paused = False  # the next line does not begin with a space

    def add(self, text: str) -> None:
        """Write the whole words of what has come."""
        out: list[str] = []
        for character in plain_text(text):
            if character == "\n":
                out.append(self._take() + "\n")
                self._column = self._spaces = 0
            elif character == " ":
                out.append(self._take())
                self._spaces += not self._paused
            else:
                self._paused = False
                self._word += character
        write("".join(out))

    def pause(self) -> None:
        """End the paragraph in the middle of a sentence, for something else to be written."""
        write(self._take() + "\n\n")
        self._column = self._spaces = 0
        self._paused = True

    def end(self) -> None:
        """Write the last word and end the line."""
        write(self._take() + "\n")
        self._column = self._spaces = 0

    def _take(self) -> str:
        """The word at hand, with what goes before it."""
        if not self._word:
            return ""
        if self._column and self._column + self._spaces + len(self._word) > self._width:
            before, self._column = "\n", 0
        else:
            before, self._column = " " * self._spaces, self._column + self._spaces
        word, self._word, self._spaces = self._word, "", 0
        self._column += len(word)
        return before + word
