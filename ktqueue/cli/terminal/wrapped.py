"""Writes streamed text to standard output and breaks lines between words."""

from ktqueue.cli.terminal.console import plain_text, write

LONGEST_LINE = 88  # columns: longer lines are hard to read


class Wrapped:
    """Writes each word as soon as it is complete. `width` is the terminal's, in columns."""

    def __init__(self, width: int) -> None:
        self._width = min(width - 1, LONGEST_LINE)
        self._column = 0
        self._spaces = 0  # not written yet, because none are written at the end of a line
        self._word = ""
        self._paused = False  # if so, the next line does not begin with a space

    def add(self, text: str) -> None:
        """Add text, and write the words that are complete."""
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
        """End the paragraph in the middle of a sentence, so that something else can be written."""
        write(self._take() + "\n\n")
        self._column = self._spaces = 0
        self._paused = True

    def end(self) -> None:
        """Write the last word and end the line."""
        write(self._take() + "\n")
        self._column = self._spaces = 0

    def _take(self) -> str:
        """Return the current word, with the spaces or line break before it."""
        if not self._word:
            return ""
        if self._column and self._column + self._spaces + len(self._word) > self._width:
            before, self._column = "\n", 0
        else:
            before, self._column = " " * self._spaces, self._column + self._spaces
        word, self._word, self._spaces = self._word, "", 0
        self._column += len(word)
        return before + word
