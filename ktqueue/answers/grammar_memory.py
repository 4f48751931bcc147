"""Estimates the memory of the grammars that run, because llguidance does not tell it, and limits it.

The lexer of a grammar, which its answers share, takes up to STATES_BYTES. All else grows with the time that the library
computes: measured were up to 200 MB in a second, in which a grammar is compiled or tokens are added to an answer.
"""

from threading import Lock
from weakref import WeakSet

from ktqueue.answers.grammar_errors import GrammarTooAmbiguous

STATES_BYTES = 40_000_000
BYTES_PER_SECOND = 200e6
FREE_SECONDS = 20e-6  # of a token, which are not counted; with real schemas a token takes a few microseconds
LEAST_BYTES = 1_000_000  # of an answer that is looked at
DEFAULT_BYTES = 4 << 30


class Lexer:
    """What all answers of a compiled grammar share. The library counts the states together, and never forgets one.

    seconds: that it took to compile the grammar and to add tokens to the answers that run. answers: their number.
    """

    __slots__ = ("__weakref__", "answers", "has_reached_limit", "memory", "seconds")

    def __init__(self, memory: "GrammarMemory", seconds: float) -> None:
        self.memory = memory
        self.seconds = seconds
        self.answers = 0
        self.has_reached_limit = False
        memory.add(self)


class GrammarMemory:
    """The grammars of one compiler. `limit`: in bytes, of all together."""

    def __init__(self, limit: int = DEFAULT_BYTES) -> None:
        self.limit = limit
        self._lexers: WeakSet[Lexer] = WeakSet()
        self._lock = Lock()  # threads compile while others add tokens

    def add(self, lexer: Lexer) -> None:
        """Count a lexer while it lives."""
        with self._lock:
            self._lexers.add(lexer)

    def lexers(self) -> list[Lexer]:
        """Those that live."""
        with self._lock:
            return list(self._lexers)

    def used(self) -> float:
        """Bytes that the grammars take at most."""
        lexers = self.lexers()
        return STATES_BYTES * len(lexers) + BYTES_PER_SECOND * sum(lexer.seconds for lexer in lexers)

    def has_room(self, compiling: int) -> bool:
        """Whether a grammar may be compiled, beside `compiling` others."""
        return not (compiling or self.lexers()) or self.used() + STATES_BYTES * (compiling + 1) <= self.limit

    def is_exceeded_by(self, seconds: float) -> bool:
        """Whether the limit is exceeded, and an answer that took `seconds` takes more of it than others."""
        size = seconds * BYTES_PER_SECOND
        if size < LEAST_BYTES or self.used() <= self.limit:
            return False
        return size * sum(lexer.answers for lexer in self.lexers()) > self.limit / 2

    def error(self) -> GrammarTooAmbiguous:
        """The error of an answer that takes too much."""
        return GrammarTooAmbiguous(
            f"the grammar failed: it and others need more than {self.limit >> 20} MiB in the middle of their answers; "
            "ask for a shorter answer, or use a less ambiguous grammar",
            param="grammar",
            limit=self.limit,
        )
