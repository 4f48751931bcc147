"""Grammars that an answer must match. The only module that imports llguidance.

A grammar is a text in llguidance's dialect of Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).
`check` reads it without a vocabulary. A `GrammarCompiler` makes a `Matcher` of it, which follows one answer token by
token and says which tokens may come next. Reasons for the library and for the limits: docs/adr/0039.
"""

import functools
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Lock, Thread

import llguidance
from llguidance import gbnf_to_lark as gbnf

from ktqueue.answers.grammar_errors import (
    COMPILE_STEPS,
    LIMITS,
    MAX_STATES,
    MAX_SYMBOLS,
    TOKEN_STEPS,
    GrammarFailed,
    GrammarRefused,
    GrammarTooAmbiguous,
    plain_reason,
)
from ktqueue.answers.grammar_memory import FREE_SECONDS, GrammarMemory, Lexer
from ktqueue.core.vocabulary import Vocabulary

KEPT_GRAMMARS = 32
KEPT_SECONDS = 2.0  # of CPU time to compile those that are kept: a second leaves up to 200 MB
CACHED_TEXTS = 4096  # forced texts, of which a grammar has the same ones again and again
MAX_CACHED_TEXT = 64  # characters
MAX_FORCED_TEXT = 1024  # characters that are cut into tokens at once, in a step, for which all rows wait
MAX_THREADS = 8
_LIMIT_REACHED = re.compile(r"[Tt]oo many|; max is")  # the library's words


def _limits() -> llguidance.LLParserLimits:
    """Limits of one grammar."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=COMPILE_STEPS,
        step_lexer_fuel=TOKEN_STEPS,
        step_max_items=50_000,
        max_lexer_states=MAX_STATES,
        max_grammar_size=MAX_SYMBOLS,
        verbose_errors=False,
    )


def check(grammar: str) -> None:
    """Read a grammar without a vocabulary, which takes a millisecond. Raises GrammarRefused."""
    message = llguidance.LLMatcher.validate_grammar(grammar, limits=_limits())
    if message and not message.startswith("WARNING"):
        raise GrammarRefused(plain_reason(message))


def from_gbnf(text: str) -> str:
    """Translate a grammar in llama.cpp's GBNF (also called EBNF) to Lark. Raises GrammarRefused."""
    try:
        return gbnf.gbnf_to_lark(text)
    except RecursionError:
        raise GrammarRefused("its groups are nested too deeply") from None
    except Exception as error:  # the library raises several plain types
        raise GrammarRefused(plain_reason(str(error) or type(error).__name__)) from None


def is_lark(text: str) -> bool:
    """Whether a grammar is written in Lark rather than in GBNF."""
    return "::=" not in text or gbnf.is_lark_syntax(text)


def regex_terminal(pattern: str) -> str:
    """A pattern of the Rust crate `regex` as a terminal of a grammar, such as `/[a-z]+/`."""
    return f"/{llguidance.regex_to_lark(pattern, use_ascii='')}/"


class Matcher:
    """Follows one answer through a grammar. Not safe to use from several threads at once."""

    __slots__ = ("_accepted", "_lexer", "_matcher", "_seconds", "_takes_too_much")

    def __init__(self, matcher: llguidance.LLMatcher, lexer: Lexer, seconds: float = 0.0) -> None:
        self._matcher = matcher
        self._lexer = lexer
        self._accepted = -1  # the token that `consume` has still to be called with
        self._seconds = seconds  # of tokens that took long, for the memory of this answer
        self._takes_too_much = False
        lexer.answers += 1
        lexer.seconds += seconds

    def __del__(self) -> None:
        self._lexer.answers -= 1
        self._lexer.seconds -= self._seconds

    def copy(self) -> "Matcher":
        """A matcher in the same state that continues on its own."""
        return Matcher(self._matcher.deep_copy(), self._lexer, self._seconds)

    def consume(self, token_id: int) -> None:
        """Add the next token of the answer. Raises GrammarFailed, after which the matcher must not be used."""
        if self._accepted >= 0:
            assert token_id == self._accepted
            self._accepted = -1
            self._check_memory()
            return
        began = time.thread_time()
        consumed = self._matcher.consume_token(token_id)
        self._count(began)
        self._check_memory()
        if not consumed or self._matcher.is_error():
            error = self._matcher.get_error()
            reason = plain_reason(error) or "it allows no such token"
            if not _LIMIT_REACHED.search(error.partition("\n")[0]):
                raise GrammarFailed(f"the grammar failed at the token {token_id}: {reason}", param="grammar")
            self._lexer.has_reached_limit = True
            message = f"the grammar failed in the middle of the answer: {reason}"
            raise GrammarTooAmbiguous(message, param="grammar", limit=LIMITS.get(reason))

    def _count(self, began: float) -> None:
        seconds = time.thread_time() - began
        if seconds > FREE_SECONDS:
            self._seconds += seconds
            self._lexer.seconds += seconds
            self._takes_too_much = self._lexer.memory.is_exceeded_by(self._seconds)

    def _check_memory(self) -> None:
        if self._takes_too_much:
            raise self._lexer.memory.error()

    @property
    def has_reached_limit(self) -> bool:
        """Whether a copy has reached a limit, so that others would reach it soon."""
        return self._lexer.has_reached_limit

    @property
    def is_accepting(self) -> bool:
        """Whether the answer could end here."""
        return self._matcher.is_accepting()

    @property
    def is_complete(self) -> bool:
        """Whether the answer must end here: the grammar allows no further token."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def forced_tokens(self) -> list[int]:
        """The tokens that must come next because the grammar leaves no choice, perhaps none. They are not consumed."""
        return self._matcher.compute_ff_tokens()

    def accept(self, token_id: int) -> bool:
        """Whether this token may come next. If so, `consume` must be called with it, which then has no more work.

        If the grammar fails, `consume` says why.
        """
        began = time.thread_time()
        if self._matcher.try_consume_tokens([token_id]) == 1:
            self._count(began)
            self._accepted = token_id
            return True
        return self._matcher.is_error()

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens may come next, one after the other. None is consumed."""
        return self._matcher.deep_copy().validate_tokens(list(token_ids))

    def after(self, token_ids: Sequence[int]) -> list["Matcher"]:
        """Copies after the first of these tokens, after the first two and so on, which the grammar allows.

        This matcher stays as it is, also if a limit is reached. The copies from there on have no meaning, since
        `consume` would fail at the same token.
        """
        copies, state = [], self
        for token_id in token_ids:
            state = state.copy()
            if not state._matcher.consume_token(token_id):
                state = self
            copies.append(state)
        return copies

    def mask(self) -> bytes:
        """Which tokens may come next: bit i % 8 of byte i // 8 is set for token i."""
        return self._matcher.compute_bitmask()


class MaskWriter:
    """Writes the masks of many matchers, in the background one list of them at a time.

    A mask has ceil(vocabulary / 32) words of 32 bits, with the lowest token in the lowest bit. The threads are few
    because a mask takes microseconds and the model needs the CPUs.
    """

    def __init__(self) -> None:
        self._executor = llguidance.LLExecutor(max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 4)))
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._results: SimpleQueue[Exception | None] = SimpleQueue()
        self._started = False
        self._thread = Thread(target=self._run, name="masks", daemon=True)
        self._thread.start()

    def write(self, matchers: Sequence[Matcher], address: int, row_bytes: int) -> None:
        """Write a mask for each matcher to `address`, one row of `row_bytes` after the other, in this thread.

        For few masks this is faster than waking another thread.
        """
        self.wait()
        for row, matcher in enumerate(matchers):
            matcher._matcher.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)

    def task(
        self, matchers: Sequence[Matcher], address: int, row_bytes: int, then: Callable[[], None]
    ) -> Callable[[], None]:
        """What `start` takes: writes masks as `write` does, then calls `then`, both in the background.

        A task can be started again, when the matchers have consumed more.
        """
        pairs = [(matcher._matcher, row) for row, matcher in enumerate(matchers)]

        def task() -> None:
            self._executor.unsafe_compute_mask_ptr(pairs, address, row_bytes, len(pairs))  # without the global lock
            then()

        return task

    def start(self, task: Callable[[], None]) -> None:
        """Start to write masks, once those before are written.

        Their matchers and their memory must not be touched before `wait` or the next `start` returns.
        """
        self.wait()
        self._tasks.put(task)
        self._started = True

    def wait(self) -> None:
        """Wait until the masks are written."""
        if self._started:
            self._started = False
            error = self._results.get()
            if error is not None:
                raise error

    def close(self) -> None:
        """End the thread."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
                error = None
            except Exception as fault:
                error = fault
            del task  # it refers to the matchers
            self._results.put(error)


class GrammarCompiler:
    """Compiles grammars for one vocabulary, and keeps the last of them. Safe to call from several threads.

    At most `kept` are kept, and fewer if they took more than KEPT_SECONDS together.

    `encode` tokenises plain text as the model's tokenizer does. Forced text is cut into tokens with it. `memory` counts
    the grammars.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        encode: Callable[[str], list[int]],
        kept: int = KEPT_GRAMMARS,
        memory: GrammarMemory | None = None,
    ) -> None:
        self._memory = memory or GrammarMemory()
        self._tokenizer = library_tokenizer(vocabulary, encode)  # type: ignore[arg-type]  # it has a hash
        self._kept = kept
        self._compiled: OrderedDict[str, tuple[Matcher, float]] = OrderedDict()  # with the seconds that each took
        self._seconds = 0.0
        self._gate = Lock()

    def compile(self, grammar: str) -> Matcher:
        """A matcher at the beginning of an answer. Raises GrammarRefused.

        The first mask is computed here, because it is the slowest one and must not delay a step.
        """
        with self._gate:
            known = self._compiled.get(grammar)
            if known is not None and not known[0].has_reached_limit:
                self._compiled.move_to_end(grammar)
                return known[0].copy()
        start = time.thread_time()
        compiled = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits())
        if not compiled.is_error():
            compiled.compute_bitmask()
        if compiled.is_error():
            raise GrammarRefused(plain_reason(compiled.get_error()))
        seconds = time.thread_time() - start
        matcher = Matcher(compiled, Lexer(self._memory, seconds))
        with self._gate:
            self._keep(grammar, matcher, seconds)
        return matcher.copy()

    def has_room(self, compiling: int) -> bool:
        """Whether a grammar may be compiled beside `compiling` others. Otherwise those that are kept are forgotten."""
        if self._memory.has_room(compiling):
            return True
        with self._gate:
            self._compiled.clear()
            self._seconds = 0.0
        return self._memory.has_room(compiling)

    def _keep(self, grammar: str, matcher: Matcher, seconds: float) -> None:
        self._seconds += seconds - self._compiled.pop(grammar, (matcher, 0.0))[1]
        self._compiled[grammar] = matcher, seconds
        while len(self._compiled) > self._kept or (len(self._compiled) > 1 and self._seconds > KEPT_SECONDS):
            _, (_, oldest) = self._compiled.popitem(last=False)
            self._seconds -= oldest


class _Tokenizer:
    """What llguidance asks of a tokenizer: the bytes of every token, and how text is cut into tokens."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]]) -> None:
        self._token_bytes = vocabulary.token_bytes
        self._encode = encode
        self._cut_again = functools.lru_cache(CACHED_TEXTS)(self._cut)
        self.greedy: Callable[[str], list[int]] | None = None
        self.tokens = [vocabulary.special_token_bytes(token_id) for token_id in range(vocabulary.size)]
        self.special_token_ids = [token_id for token_id in range(vocabulary.size) if not self._token_bytes(token_id)]
        self.eos_token_id = min(vocabulary.eos_token_ids, default=0)
        self.bos_token_id = None

    def __call__(self, text: str | bytes) -> list[int]:
        """Cut text into tokens that spell exactly this text, or the beginning of a text of more than MAX_FORCED_TEXT.

        A tokenizer may add a space at the beginning, or take a part of the text for a special token or one that the
        model does not have. Then the text is cut greedily instead.
        """
        if isinstance(text, bytes):
            text = text.decode()
        if len(text) > MAX_FORCED_TEXT:  # the rest is forced again, after these tokens
            end = text.rfind(" ", 1, MAX_FORCED_TEXT)
            text = text[: end if end > 0 else MAX_FORCED_TEXT]
        is_cached = self.greedy is not None and len(text) <= MAX_CACHED_TEXT
        return self._cut_again(text) if is_cached else self._cut(text)

    def _cut(self, text: str) -> list[int]:
        ids = self._encode(text)
        spells = max(ids, default=0) < len(self.tokens) and b"".join(map(self._token_bytes, ids)) == text.encode()
        return ids if spells or self.greedy is None else self.greedy(text)


@functools.lru_cache(2)  # with 150,000 tokens it takes 0.3 s, which forks save if it is made before them
def library_tokenizer(vocabulary: Vocabulary, encode: Callable[[str], list[int]]) -> llguidance.LLTokenizer:
    """What all compilers of a vocabulary share. It does not change, but for texts that are cut again."""
    wrapped = _Tokenizer(vocabulary, encode)
    tokenizer = llguidance.LLTokenizer(
        wrapped,  # type: ignore[arg-type]  # it has all that the library reads of its own wrapper
        n_vocab=vocabulary.size,
        eos_token=sorted(vocabulary.eos_token_ids) or None,
    )
    wrapped.greedy = tokenizer.greedy_tokenize
    return tokenizer


@functools.cache
def byte_compiler() -> GrammarCompiler:
    """A compiler for a vocabulary of single bytes, which finds grammars that take too long. It keeps none."""
    return GrammarCompiler(_Bytes(), lambda text: list(text.encode()), kept=0)


class _Bytes:
    """The 256 bytes, and an end token."""

    size = 257
    eos_token_ids = frozenset({256})

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def special_token_bytes(self, token_id: int) -> bytes:
        return self.token_bytes(token_id) or b"<|end|>"
