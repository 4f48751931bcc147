"""Errors of grammars, and of answers that must match one. They name the limits of a grammar in plain words."""

from ktqueue.core.errors import EngineFailure, InvalidRequest

COMPILE_STEPS = 5_000_000  # of work on patterns before an answer: the library's fuel, about 14,000 in a millisecond
TOKEN_STEPS = 200_000  # and for one token
MAX_STATES = 20_000  # of a grammar's lexer, about 2 kB each
MAX_SYMBOLS = 200_000
MAX_ERROR = 300  # characters of the library's message

TOO_COMPLEX = "its patterns and lengths together are too complex: simplify a pattern, or repeat less"
# What the library says where a grammar exceeds a limit; what a client is told; the limit.
_BEYOND: tuple[tuple[str, str, int | None], ...] = (
    ("Unable to determine if regex is empty", TOO_COMPLEX, None),
    *(
        (words, f"its patterns take more than {steps} steps of work{where}: simplify them, or repeat less", steps)
        for words, where, steps in (
            ("fuel exhausted", "", COMPILE_STEPS),
            ("initial lexer configuration (grammar) too big", "", COMPILE_STEPS),
            ("too many expressions constructed", " for a token", TOKEN_STEPS),
        )
    ),
    ("too many states", f"its patterns need more than {MAX_STATES} states: simplify them, or repeat less", MAX_STATES),
    ("grammar size (number of symbols)", f"its rules have more than {MAX_SYMBOLS} symbols", MAX_SYMBOLS),
)
LIMITS = {plain: limit for _, plain, limit in _BEYOND}


class GrammarRefused(InvalidRequest):
    """A grammar is wrong, or it exceeds a limit. The message names the place in the grammar if there is one."""

    def __init__(self, reason: str, param: str = "grammar") -> None:
        limit = LIMITS.get(reason) or "a grammar that can be compiled"
        super().__init__(f"{param} cannot be used: {reason}", param=param, limit=limit)
        self.reason = reason


class GrammarFailed(EngineFailure):
    """A token does not match the grammar, or a limit was reached in the middle of an answer."""


class GrammarTooAmbiguous(GrammarFailed):
    """A limit was reached in the middle of an answer. The request asks for too much, so it would fail again."""

    code = InvalidRequest.code
    status = InvalidRequest.status


def plain_reason(message: str) -> str:
    """The essence of the library's message, without the grammar that it quotes."""
    lines = [line.strip() for line in message.strip().splitlines()] or [""]
    first = lines[0].removeprefix("ERROR: ").replace("NoExtensionBias", "it allows no text")
    for words, plain, _ in _BEYOND:
        if words in first:
            return plain
    if first.endswith(":"):  # such as "regex parse error:", where the problem follows the quoted pattern
        first += "".join(f" {line[7:]}" for line in lines if line.startswith("error: "))
    return first if len(first) <= MAX_ERROR else first[:MAX_ERROR] + "..."
