"""The door to llguidance: errors name the place, forced text is cut into the right tokens, limits hold."""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import llguidance
import pytest

from ktqueue.answers import grammar as grammar_module
from ktqueue.answers.grammar import (
    GrammarCompiler,
    Matcher,
    _Bytes,
    byte_compiler,
    check,
    from_gbnf,
    library_tokenizer,
    regex_terminal,
)
from ktqueue.answers.grammar_errors import GrammarFailed, GrammarRefused, GrammarTooAmbiguous
from ktqueue.answers.grammar_memory import GrammarMemory, Lexer
from ktqueue.answers.grammar_process import GrammarProcesses, check_syntax
from ktqueue.core.errors import ErrorInfo
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer

BOMB = 'start: %json {"type": "integer", "multipleOf": 1999993}'  # half a minute


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("start: (", r"1\(9\): Expected token '\)'"),
        ('start: %json {"type": "strin"}', "Invalid type: strin"),
        ("start: other", 'unknown name: "?other'),
        ('begin: "a"', "start"),
        ("start: /(/", "regex"),
    ],
)
def test_a_wrong_grammar_is_refused_with_the_place(grammar: str, reason: str) -> None:
    with pytest.raises(GrammarRefused, match=reason):
        check(grammar)
    with pytest.raises(GrammarRefused, match=reason):
        byte_compiler().compile(grammar)


def test_a_grammar_without_texts_is_refused() -> None:
    for grammar in ("start: start", 'start: %json {"$ref": "#"}'):
        with pytest.raises(GrammarRefused, match="it allows no text"):
            byte_compiler().compile(grammar)


def test_a_limit_is_named_in_plain_words(monkeypatch: pytest.MonkeyPatch) -> None:
    hard = "start: A\nA: /(.*a.{2000})/ & /(.*b.{3000})/ & ~/.*ab.{300}c/"
    for words, limit in (
        ("its patterns take more than 5000000 steps", 5_000_000),
        ("more than 200000 symbols", 200_000),
    ):
        with pytest.raises(GrammarRefused, match=f"^grammar cannot be used: .*{words}") as refused:
            byte_compiler().compile(hard)
        assert refused.value.limit == limit
        few = llguidance.LLParserLimits(max_grammar_size=10)
        monkeypatch.setattr(grammar_module, "_limits", lambda few=few: few)
        hard = 'start: x{1,3000}\nx: "a" | "b"'
    monkeypatch.undo()
    matcher = byte_compiler().compile("start: /(?i)(straße|[à-ÿ]{1,2000}|\\w{1,4000}){1,3000}/")
    with pytest.raises(GrammarTooAmbiguous, match="its patterns take more than 200000 steps of work for a token"):
        for byte in b"ab" * 100:
            matcher.consume(byte)
            matcher.mask()


def test_gbnf_is_translated() -> None:
    lark = from_gbnf('root ::= "a" [0-9]+ ("x" | "y")?')
    matcher = byte_compiler().compile(lark)
    for byte in b"a12":
        matcher.consume(byte)
    assert matcher.is_accepting and not matcher.is_complete
    matcher.consume(ord("y"))
    assert matcher.is_complete
    with pytest.raises(GrammarRefused, match="Expected ::="):
        from_gbnf("root = 5")


def test_a_pattern_may_contain_slashes() -> None:
    matcher = byte_compiler().compile(f"start: {regex_terminal('a/b')}")
    for byte in b"a/b":
        matcher.consume(byte)
    assert matcher.is_complete


def test_forced_text_is_cut_as_the_tokenizer_cuts_it() -> None:
    tokenizer = load_tokenizer("demo")
    texts: list[str] = []

    def encode(text: str) -> list[int]:
        texts.append(text)
        return tokenizer.encode(text, add_special_tokens=False)

    compiler = GrammarCompiler(tokenizer, encode)
    text = "Once upon a time there was a fox."
    for _ in range(2):
        assert compiler.compile(f"start: {json.dumps(text)}").forced_tokens() == encode(text)
    assert texts.count(text) == 3  # once for both grammars, and twice here


def test_forced_text_never_becomes_a_special_token() -> None:
    tokenizer = load_tokenizer("demo")
    compiler = GrammarCompiler(tokenizer, lambda text: tokenizer.encode(text, add_special_tokens=False))
    forced = compiler.compile('start: "say <|im_end|> twice"').forced_tokens()
    assert b"".join(map(tokenizer.token_bytes, forced)) == b"say <|im_end|> twice"
    assert not set(forced) & tokenizer.eos_token_ids
    assert compiler.compile('start: <|im_end|> "x"').forced_tokens()[0] in tokenizer.eos_token_ids


@pytest.mark.parametrize("word", ["one two three ", "abc"])
def test_a_long_forced_text_is_cut_part_by_part(word: str) -> None:
    """All rows of a step wait for it. 400 kB take 0.2 seconds for each of them."""
    tokenizer = load_tokenizer("demo")
    longest = 0

    def encode(text: str) -> list[int]:
        nonlocal longest
        longest = max(longest, len(text))
        return tokenizer.encode(text, add_special_tokens=False)

    text = word * 1000
    matcher = GrammarCompiler(tokenizer, encode).compile(f"start: {json.dumps(text)}")
    written: list[int] = []
    while not matcher.is_complete:
        forced = matcher.forced_tokens()
        assert forced
        for token_id in forced:
            matcher.consume(token_id)
        written += forced
    assert b"".join(map(tokenizer.token_bytes, written)) == text.encode()
    assert 0 < longest <= 1024


def test_a_vocabulary_is_prepared_once() -> None:
    """So workers that are forked from one process have it, as soon as it has made it."""
    tokenizer = load_tokenizer("demo")
    prepared = library_tokenizer(tokenizer, tokenizer.encode_plain)
    compilers = [GrammarCompiler(tokenizer, tokenizer.encode_plain) for _ in range(2)]
    assert all(compiler._tokenizer is prepared for compiler in compilers)
    other = load_tokenizer("demo")
    assert GrammarCompiler(other, other.encode_plain)._tokenizer is not prepared


def test_compiled_grammars_are_kept_but_not_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer("demo")
    compiler = GrammarCompiler(tokenizer, tokenizer.encode)
    for number in range(40):
        compiler.compile(f'start: "{number}"')
    assert len(compiler._compiled) == 32
    monkeypatch.setattr(grammar_module, "KEPT_SECONDS", 0.0)  # the memory of a grammar grows with the time it took
    for _ in range(2):
        compiler.compile('start: "the latest"')
        assert list(compiler._compiled) == ['start: "the latest"']


def test_an_answer_that_reaches_a_limit_does_not_spoil_the_next() -> None:
    """The library counts the states of all copies together: without a new lexer, the next answer fails at once."""
    tokenizer = load_tokenizer("demo")
    compiler = GrammarCompiler(tokenizer, lambda text: tokenizer.encode(text, add_special_tokens=False))
    for first in (b"x", b"y"):
        matcher = compiler.compile("start: /[xy](abc ){100000}/")
        matcher.consume(tokenizer.encode(first.decode(), add_special_tokens=False)[0])
        forced = matcher.forced_tokens()
        assert forced
        with pytest.raises(GrammarFailed, match="more than 20000 states") as reached:
            matcher.consume(forced[0])
        assert reached.value.status == 400


def test_only_so_many_grammars_run_as_memory_has_room_for() -> None:
    compiler = GrammarCompiler(_Bytes(), lambda text: list(text.encode()), memory=GrammarMemory(100_000_000))
    running = [compiler.compile(f"start: /a{{{count}}}/") for count in (1, 2)]  # each may take 40 MB
    assert compiler.has_room(0) is False
    assert compiler.compile("start: /a{1}/") is not None
    del running[0]
    assert compiler.has_room(0) is True and compiler.has_room(1) is False
    running.clear()
    assert compiler.has_room(1) is True


def _error_of(row: Matcher) -> ErrorInfo | None:
    """Why the row's answer cannot go on with another byte."""
    try:
        row.consume(ord("a"))
    except GrammarTooAmbiguous as error:
        return error.info()
    return None


def test_answers_that_take_too_much_memory_fail_and_make_room_for_others() -> None:
    """Each byte adds some hundred items to an answer."""
    rules = [f"r{number}: A r{number}x\nr{number}x: A |" for number in range(200)]
    grammar = "\n".join([f"start: ({' | '.join(f'r{number}' for number in range(200))})*", "A: /[a-z]/", *rules])
    memory = GrammarMemory(100_000_000)
    compiler = GrammarCompiler(_Bytes(), lambda text: list(text.encode()), memory=memory)
    rows = {number: compiler.compile(grammar) for number in range(8)}
    errors: list[ErrorInfo] = []
    for _ in range(2000):
        for number in list(rows):
            error = _error_of(rows[number])
            if error is not None:
                errors.append(error)
                used = memory.used()
                del rows[number]
                assert memory.used() < used
        if errors:  # memory is estimated by time, so each machine comes here after another number of bytes
            break
    assert 0 < len(errors) < 8
    assert (errors[0].status, errors[0].limit) == (400, 100_000_000)
    assert "more than 95 MiB" in errors[0].message
    assert memory.used() <= 1.1 * memory.limit


def test_memory_is_counted_while_other_threads_compile() -> None:
    """Lexers come and go in their threads."""
    memory, ended = GrammarMemory(), Event()

    def compile_some() -> None:
        while not ended.is_set():
            kept = [Lexer(memory, 0.0) for _ in range(20)]
            del kept

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as threads:
            compiling = [threads.submit(compile_some) for _ in range(3)]
            try:
                for _ in range(3000):
                    assert memory.used() >= 0
            finally:
                ended.set()
        for each in compiling:
            each.result()
    finally:
        sys.setswitchinterval(interval)
    assert memory.used() == 0


def test_real_schemas_count_for_little() -> None:
    memory = GrammarMemory()
    compiler = GrammarCompiler(_Bytes(), lambda text: list(text.encode()), memory=memory)
    schema = {"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string"}}}}
    matcher = compiler.compile(f"start: %json {json.dumps(schema)}")
    before = memory.used()
    for byte in b"[" + b",".join([b'{"name":"some body"}'] * 200) + b"]":
        matcher.consume(byte)
    assert memory.used() - before < 2_000_000


def test_the_check_keeps_no_grammars() -> None:
    """Large ones would leave no memory for the next, which would then be refused for good."""
    byte_compiler().compile('start: "a"')
    assert not byte_compiler()._compiled


@pytest.mark.parametrize(
    "grammar",
    [
        'start: %json {"const": -9223372036854775807}',
        "start: a0\n" + "".join(f"a{number}: a{number + 1}\n" for number in range(8000)) + 'a8000: "a"',
        "start: a0\n" + "".join(f"a{number}: a{number + 1}\n" for number in range(600)) + 'a600: "a"',  # of 1 MiB
    ],
)
def test_a_grammar_that_overflows_the_stack_ends_another_process(grammar: str) -> None:
    for _ in range(2):
        with pytest.raises(GrammarRefused, match="more than 2 seconds"):
            check_syntax(grammar)
    deep: dict[str, object] = {"type": "null"}
    for _ in range(98):
        deep = {"type": "array", "items": deep}
    check_syntax(f"start: %json {json.dumps(deep)}")


def test_a_copy_goes_its_own_way() -> None:
    first = byte_compiler().compile('start: "ab" | "cd"')
    second = first.copy()
    first.consume(ord("a"))
    second.consume(ord("c"))
    assert (first.forced_tokens(), second.forced_tokens()) == ([ord("b")], [ord("d")])


def test_no_verdict_of_a_busy_machine_is_remembered() -> None:
    processes = GrammarProcesses(wall_seconds=0.0)
    try:
        with pytest.raises(GrammarRefused, match="it took more than 0 seconds"):
            processes.check('start: "a"')
        processes._wall_seconds = 100.0
        processes.check('start: "a"')
    finally:
        processes.close()


def test_a_grammar_that_takes_too_long_is_refused_once() -> None:
    processes = GrammarProcesses(wall_seconds=100.0)
    try:
        processes.check('start: "a"')
        began = time.monotonic()
        with pytest.raises(GrammarRefused, match="more than 2 seconds"):
            processes.check(BOMB)
        assert time.monotonic() - began < 60.0
        began = time.monotonic()
        with pytest.raises(GrammarRefused, match="more than 2 seconds"):
            processes.check(BOMB)
        assert time.monotonic() - began < 0.5  # remembered
        with pytest.raises(GrammarRefused, match="unknown name"):
            processes.check("start: other")
        processes.check("start: <|any_token|> %json {}")  # only a model's vocabulary has it
    finally:
        processes.close()
