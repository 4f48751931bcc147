"""Choices whose answer must match a grammar: masks, forced tokens, the end, resuming, and errors in mid-answer."""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from ktqueue.answers.grammar_errors import GrammarFailed
from ktqueue.core.events import FinishReason
from ktqueue.core.request import SamplingParams
from ktqueue.engine.engine import Engine
from ktqueue.engine.outputs import EmittedChoice

PROMPT = [5, 9, 2, 44, 17, 3, 80, 21, 9]
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["fox", "crow"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": -99, "maximum": 999}, "maxItems": 3},
        "in_the_woods": {"type": "boolean"},
    },
    "required": ["kind", "sizes", "in_the_woods"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = f"start: %json {json.dumps(SCHEMA)}"
SAMPLED = SamplingParams(seed=11, temperature=1.2, n=2, max_tokens=90, logprobs=3, repetition_penalty=1.1, min_tokens=4)


@pytest.fixture(params=["host", "device"])
def parts(request: pytest.FixtureRequest) -> str:
    """The engine's parts: those of the host, and those of a device, which is the CPU here."""
    part: str = request.param
    return part


def test_answers_match_the_schema(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, compile_grammar: Any
) -> None:
    engine = make_engine(model, vocabulary)
    for seed in range(12):
        engine.add(str(seed), PROMPT, dataclasses.replace(SAMPLED, seed=seed), matcher=compile_grammar(JSON))
    engine.add("plain", PROMPT, SamplingParams(temperature=0.0, max_tokens=20))
    results = run(engine)
    for (name, _), result in results.items():
        if name != "plain":
            assert result.finish_reason is FinishReason.STOP and result.error is None
            jsonschema.validate(json.loads(result.text), SCHEMA)
    assert len({result.text for result in results.values()}) > 12
    assert engine.stats().steps < 100  # forced tokens take no steps of their own


def test_checking_greedy_tokens_instead_of_masking_changes_nothing(
    make_model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, compile_grammar: Any, parts: str
) -> None:
    if parts == "device":
        return  # its tokens are not on the host when they are chosen
    answers = []
    for check_greedy in (True, False):
        change = functools.partial(dataclasses.replace, check_greedy=check_greedy)
        engine = make_engine(make_model(), vocabulary, change_parts=change)
        for number in range(9):
            changes: list[dict[str, Any]] = [{}, {"ignore_eos": True}, {"logprobs": 1}, {"temperature": 1.0}]
            sampling = SamplingParams(**{"temperature": 0.0, "seed": 3, "max_tokens": 60, **changes[number % 4]})
            engine.add(str(number), PROMPT[: 3 + number], sampling, matcher=compile_grammar(JSON))
        answers.append({key: (one.token_ids, one.text, one.logprobs) for key, one in run(engine).items()})
    assert answers[0] == answers[1]


def test_rows_with_and_without_a_grammar_share_a_step(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any, compile_grammar: Any
) -> None:
    engine = make_engine(model, vocabulary)
    plain = SamplingParams(temperature=0.0, max_tokens=30)
    engine.add("before", PROMPT, plain)
    engine.add("json", PROMPT, dataclasses.replace(SAMPLED, n=1), matcher=compile_grammar(JSON))
    engine.add("after", PROMPT[:4], plain)
    engine.add("word", PROMPT, plain, matcher=compile_grammar('start: "fox" | "crow"'))
    results = run(engine)
    assert results["before", 0].token_ids == greedy(PROMPT, 30)
    assert results["after", 0].token_ids == greedy(PROMPT[:4], 30)
    assert results["word", 0].text in ("fox", "crow")
    jsonschema.validate(json.loads(results["json", 0].text), SCHEMA)


def test_resume_after_every_step(
    make_model: Any,
    vocabulary: Any,
    make_engine: Callable[..., Engine],
    run: Any,
    gather_outputs: Any,
    compile_grammar: Any,
) -> None:
    whole = make_engine(make_model(), vocabulary)
    whole.add("x", PROMPT, SAMPLED, matcher=compile_grammar(JSON))
    expected = run(whole)
    for cut in range(whole.stats().steps):
        first = make_engine(make_model(), vocabulary)
        first.add("x", PROMPT, SAMPLED, matcher=compile_grammar(JSON))
        journal: dict[Any, Any] = {}
        for _ in range(cut):
            gather_outputs(journal, first.step())
        emitted = [
            EmittedChoice(token_ids=tuple(one.token_ids), text_length=len(one.text), finish_reason=one.finish_reason)
            if (one := journal.get(("x", index)))
            else EmittedChoice()
            for index in range(2)
        ]
        second = make_engine(make_model(), vocabulary, max_num_batched_tokens=6)
        second.add("x", PROMPT, SAMPLED, emitted=emitted, matcher=compile_grammar(JSON))
        rest = run(second)
        for index in range(2):
            old, new, want = journal.get(("x", index)), rest.get(("x", index)), expected["x", index]
            both = [one for one in (old, new) if one is not None]
            assert [token for one in both for token in one.token_ids] == want.token_ids
            assert "".join(one.text for one in both) == want.text
            assert [place for one in both for place in one.logprobs] == want.logprobs


def test_logprobs_are_those_of_the_allowed_tokens(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, compile_grammar: Any
) -> None:
    engine = make_engine(model, vocabulary)
    sampling = SamplingParams(temperature=0.0, max_tokens=20, logprobs=5)
    engine.add("x", PROMPT, sampling, matcher=compile_grammar('start: ("a" | "b") "common" ("x" | "y" | "z")'))
    result = run(engine)["x", 0]
    assert len(result.logprobs) == len(result.token_ids) == 8
    first, *forced, last = result.logprobs
    assert {token.token_bytes for token in first.top} == {b"a", b"b"} and first.top[0].logprob > -0.7
    assert [place.chosen.logprob for place in forced] == [0.0] * 6 and all(len(place.top) == 1 for place in forced)
    assert {token.token_bytes for token in last.top} == {b"x", b"y", b"z"}


@pytest.mark.parametrize(
    ("grammar", "more", "length"),
    [
        ("start: /a+/", {"ignore_eos": True}, 30),
        ("start: /a{2,7}/", {"ignore_eos": True}, 7),
        ("start: /a{2,7}/", {"min_tokens": 5}, None),
        ("start: /a{2,3}/", {"min_tokens": 20}, 3),
        ('start: "a" <[96]>', {"ignore_eos": True, "min_tokens": 9}, 2),
    ],
)
def test_the_end_is_postponed_only_while_the_grammar_allows_more(
    model: Any,
    vocabulary: Any,
    make_engine: Callable[..., Engine],
    run: Any,
    compile_grammar: Any,
    grammar: str,
    more: Any,
    length: int | None,
) -> None:
    engine = make_engine(model, vocabulary)
    sampling = SamplingParams(max_tokens=30, logit_bias={96: 60.0}, seed=5, **more)  # the end token is the likeliest
    engine.add("x", PROMPT, sampling, matcher=compile_grammar(grammar))
    result = run(engine)["x", 0]
    assert result.error is None
    assert set(result.text) == {"a"}
    if length is None:
        assert len(result.text) == 5
    else:
        assert len(result.token_ids) == length
    assert result.finish_reason is (FinishReason.LENGTH if length == 30 else FinishReason.STOP)


def test_an_answer_ends_if_the_vocabulary_has_no_other_token(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, compile_grammar: Any
) -> None:
    engine = make_engine(model, vocabulary)
    sampling = SamplingParams(max_tokens=30, ignore_eos=True, min_tokens=20, seed=5)
    engine.add("x", PROMPT, sampling, matcher=compile_grammar("start: /a( b)?/"))  # no token has a space
    result = run(engine)["x", 0]
    assert (result.text, result.finish_reason, result.error) == ("a", FinishReason.STOP, None)


def test_the_end_token_is_allowed_where_the_grammar_accepts(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, compile_grammar: Any
) -> None:
    engine = make_engine(model, vocabulary)
    sampling = SamplingParams(max_tokens=30, logit_bias={96: 60.0}, seed=5)
    engine.add("x", PROMPT, sampling, matcher=compile_grammar("start: /a{3}/ /b+/"))
    result = run(engine)["x", 0]
    assert (result.text, result.finish_reason) == ("aaab", FinishReason.STOP)


def test_an_answer_that_is_cut_is_a_beginning(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, compile_grammar: Any
) -> None:
    whole = make_engine(model, vocabulary)
    sampling = dataclasses.replace(SAMPLED, n=1)
    whole.add("x", PROMPT, sampling, matcher=compile_grammar(JSON))
    expected = run(whole)["x", 0]
    for limit in range(4, len(expected.token_ids)):
        engine = make_engine(model, vocabulary)
        engine.add("x", PROMPT, dataclasses.replace(sampling, max_tokens=limit), matcher=compile_grammar(JSON))
        result = run(engine)["x", 0]
        assert result.token_ids == expected.token_ids[:limit]
        assert result.finish_reason is FinishReason.LENGTH


def test_a_stop_string_ends_a_forced_run(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, compile_grammar: Any
) -> None:
    engine = make_engine(model, vocabulary)
    sampling = SamplingParams(temperature=0.0, max_tokens=50, stop=("mon",))
    engine.add("x", PROMPT, sampling, matcher=compile_grammar('start: ("a" | "b") "common" ("x" | "y")'))
    result = run(engine)["x", 0]
    assert result.text in ("acom", "bcom") and result.finish_reason is FinishReason.STOP
    assert len(result.token_ids) == 7


def test_constraints_that_contradict_each_other_end_one_sequence(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any, compile_grammar: Any
) -> None:
    """They are a fault of the request. One that finds no finite logits where they allow some is not."""
    engine = make_engine(model, vocabulary)
    model.scores = lambda context: _only_z(context)
    plain = SamplingParams(temperature=0.0, max_tokens=9)
    only_b = dataclasses.replace(plain, allowed_token_ids=(ord("b") - 33,))
    engine.add("x", PROMPT, only_b, matcher=compile_grammar('start: "a"'))
    engine.add("y", PROMPT, plain)
    engine.add("z", PROMPT, only_b, matcher=compile_grammar('start: "b" "c"'))
    results = run(engine)
    error = results["x", 0].error
    assert "bad_words and allowed_token_ids together allow no token" in error.message
    assert (error.code, error.status, error.param) == ("invalid_value", 400, "grammar")
    assert results["y", 0].token_ids == [ord("z") - 33] * 9
    assert (results["z", 0].error.code, results["z", 0].error.status) == ("engine_failure", 500)


def _only_z(context: Any) -> Any:
    import numpy as np

    scores = np.full(97, -np.inf, dtype=np.float32)
    scores[ord("z") - 33] = 1.0
    return scores


def test_a_limit_in_the_middle_of_an_answer_ends_that_sequence(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any, compile_grammar: Any
) -> None:
    engine = make_engine(model, vocabulary)
    rules = [
        f'r{i}: "a" r{i} | "a" r{i} "b" | "a" | "c"' for i in range(60)
    ]  # each row of the parser has 60 items more
    hard = "\n".join([f"start: {' | '.join(f'r{i}' for i in range(60))}", *rules])
    bias = {ord("a") - 33: 50.0}
    engine.add("x", PROMPT, SamplingParams(seed=1, max_tokens=100, logit_bias=bias), matcher=compile_grammar(hard))
    engine.add("y", PROMPT, SamplingParams(temperature=0.0, max_tokens=20))
    results = run(engine)
    assert results["y", 0].token_ids == greedy(PROMPT, 20)
    assert 5 < len(results["x", 0].token_ids) < 50
    error = results["x", 0].error
    assert "the grammar failed" in error.message and "max is 2000" in error.message
    assert (error.code, error.status) == ("invalid_value", 400)  # a client that tried again would fail again


def test_a_journal_that_does_not_match_is_refused(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, compile_grammar: Any
) -> None:
    engine = make_engine(model, vocabulary)
    with pytest.raises(GrammarFailed) as refused:
        engine.add("x", PROMPT, SAMPLED, emitted=[EmittedChoice(token_ids=(1,))], matcher=compile_grammar(JSON))
    assert refused.value.status == 500 and not engine.has_work
    engine.add("x", PROMPT, SAMPLED, matcher=compile_grammar(JSON))
    assert run(engine)["x", 0].finish_reason is FinishReason.STOP


def test_a_preempted_answer_goes_on(
    make_model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, compile_grammar: Any
) -> None:
    roomy, tight = make_engine(make_model(), vocabulary), make_engine(make_model(), vocabulary, num_pages=24)
    for engine in (roomy, tight):
        for seed in range(4):
            sampling = dataclasses.replace(SAMPLED, n=1, seed=seed)
            engine.add(str(seed), PROMPT, sampling, matcher=compile_grammar(JSON))
    expected, results = run(roomy), run(tight)
    assert tight.stats().preemptions and not roomy.stats().preemptions
    assert {key: one.text for key, one in results.items()} == {key: one.text for key, one in expected.items()}
