"""Tests of the engine, over a model that reads its whole context back from the cache."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ktqueue.core.errors import ContextLengthExceeded, InvalidRequest
from ktqueue.core.events import FinishReason
from ktqueue.core.request import SamplingParams
from ktqueue.core.tenants import NOBODY, Owner
from ktqueue.engine.engine import Engine
from ktqueue.engine.outputs import EmittedChoice

PROMPT = [5, 9, 2, 44, 17, 3, 80, 21, 9]


@pytest.fixture(params=["host", "device"])
def parts(request: Any) -> Any:
    """Each test here runs with the parts of the host and with those of a device."""
    return request.param


@pytest.mark.parametrize("budget", [2, 3, 16, 512])
@pytest.mark.parametrize("caching", [True, False])
def test_greedy_tokens_do_not_depend_on_the_chunks(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any, budget: int, caching: bool
) -> None:
    engine = make_engine(
        model, vocabulary, max_num_seqs=8, max_num_batched_tokens=budget, enable_prefix_caching=caching
    )
    prompts = [PROMPT[: 1 + i] * (1 + i % 3) for i in range(8)]
    for i, prompt in enumerate(prompts):
        engine.add(f"r{i}", prompt, SamplingParams(temperature=0.0, max_tokens=12))
    results = run(engine)
    for i, prompt in enumerate(prompts):
        assert results[f"r{i}", 0].token_ids == greedy(prompt, 12)
        assert results[f"r{i}", 0].finish_reason is FinishReason.LENGTH
        assert results[f"r{i}", 0].usage.prompt_tokens == len(prompt)
        assert results[f"r{i}", 0].usage.completion_tokens == 12
    assert max(tokens for _, tokens in model.steps) <= budget


def test_a_prefix_is_reused_but_never_the_last_token(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any
) -> None:
    engine = make_engine(model, vocabulary)
    prompt = PROMPT[:8]  # exactly two pages
    for name, cached in (("first", 0), ("again", 4)):
        before = model.computed_tokens
        engine.add(name, prompt, SamplingParams(temperature=0.0, max_tokens=3))
        result = run(engine)[name, 0]
        assert result.token_ids == greedy(prompt, 3)
        assert result.usage.cached_tokens == cached
        assert model.computed_tokens - before == 8 - cached + 2
    longer = prompt + greedy(prompt, 3) + [1]
    engine.add("chat", longer, SamplingParams(temperature=0.0, max_tokens=3))
    result = run(engine)["chat", 0]
    assert result.token_ids == greedy(longer, 3)
    assert result.usage.cached_tokens == 8  # 10 were computed: two full pages


def test_pages_of_a_tenant_are_found_by_nobody_else(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any
) -> None:
    engine = make_engine(model, vocabulary)
    owners = (NOBODY, Owner("default"), Owner("a"), Owner("a", "another caller", 3), Owner("b"), Owner("a"), NOBODY)
    cached = []
    for number, owner in enumerate(owners):
        engine.add(f"r{number}", PROMPT[:9], SamplingParams(max_tokens=1), owner=owner)
        cached.append(run(engine)[f"r{number}", 0].usage.cached_tokens)
    assert cached == [0, 8, 0, 8, 0, 8, 8]


def test_equal_pages_of_different_prefixes_are_different(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any
) -> None:
    first, other = PROMPT[:4], PROMPT[4:8]
    engine = make_engine(model, vocabulary)
    for i, prompt in enumerate(([*first, *other, 7], [*other, *first, 7], [*first, *first, 7], [*other, *other, 7])):
        engine.add(f"r{i}", prompt, SamplingParams(temperature=0.0, max_tokens=3))
        result = run(engine)[f"r{i}", 0]
        assert result.token_ids == greedy(prompt, 3) and result.usage.cached_tokens == (0, 0, 4, 4)[i]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 4, 7, 8])
def test_choices_share_the_prompt(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, caching: bool, length: Any
) -> None:
    engine = make_engine(model, vocabulary, enable_prefix_caching=caching, max_num_batched_tokens=8)
    sampling = SamplingParams(temperature=1.0, seed=7, n=5, max_tokens=6)
    engine.add("many", PROMPT[:length], sampling)
    results = run(engine)
    assert model.computed_tokens == length + 5 * 5  # the prompt once, then all but the last token of each
    assert len({tuple(results["many", i].token_ids) for i in range(5)}) == 5
    usages = [results["many", i].usage for i in range(5)]
    assert [u for u in usages if u] == [u for u in usages if u][:1]
    (usage,) = [u for u in usages if u]
    assert (usage.prompt_tokens, usage.completion_tokens) == (length, 30)


def test_choices_do_not_depend_on_the_number_of_pages(
    make_model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any
) -> None:
    answers = []
    for pages, caching in ((200, False), (11, False), (11, True)):
        engine = make_engine(make_model(), vocabulary, num_pages=pages, enable_prefix_caching=caching)
        engine.add("a", PROMPT, SamplingParams(seed=3, n=4, max_tokens=20))
        engine.add("b", PROMPT, SamplingParams(seed=4, n=3, max_tokens=20))
        results = run(engine)
        answers.append({key: result.token_ids for key, result in results.items()})
        assert (engine.stats().preemptions > 0) == (pages == 11)
    assert answers[0] == answers[1] == answers[2]


def test_seeded_choices_repeat(make_model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any) -> None:
    alone = make_engine(make_model(), vocabulary)
    alone.add("x", PROMPT, SamplingParams(seed=-5, max_tokens=20, top_p=0.9, temperature=0.8))
    expected = run(alone)["x", 0]
    crowd = make_engine(make_model(), vocabulary, max_num_batched_tokens=40, num_pages=60)
    for i in range(31):
        crowd.add(f"o{i}", PROMPT[: 1 + i % 9], SamplingParams(seed=i, max_tokens=20, temperature=1.3, top_k=i))
    crowd.add("x", PROMPT, SamplingParams(seed=-5, max_tokens=20, top_p=0.9, temperature=0.8))
    found = run(crowd)["x", 0]
    assert crowd.stats().preemptions > 0
    assert found.token_ids == expected.token_ids and found.text == expected.text


def test_a_seed_is_drawn_when_none_is_given(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any
) -> None:
    engine = make_engine(model, vocabulary)
    for i in range(3):
        engine.add(f"r{i}", PROMPT, SamplingParams(max_tokens=20))
    assert len({tuple(result.token_ids) for result in run(engine).values()}) == 3


def test_a_stop_id_and_the_end_token_end_the_answer_without_text(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any, scores: Any
) -> None:
    expected = greedy(PROMPT, 20)
    end = expected[6]
    first = expected.index(end)

    def with_end(context: Any) -> Any:
        row = scores(context)
        if int(np.argmax(row)) == end:
            row[-1] = 99.0
        return row

    stop = SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=(end,))
    engine = make_engine(model, vocabulary)
    engine.add("stop id", PROMPT, stop)
    result = run(engine)["stop id", 0]
    assert result.token_ids == expected[: first + 1] and result.finish_reason is FinishReason.STOP
    assert result.text == "".join(vocabulary.token_bytes(t).decode() for t in expected[:first])

    model.scores = with_end
    engine.add("eos", PROMPT, SamplingParams(temperature=0.0, max_tokens=20))
    result = run(engine)["eos", 0]
    assert result.token_ids == [*expected[:first], 96] and result.finish_reason is FinishReason.STOP

    engine.add("ignored", PROMPT, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    result = run(engine)["ignored", 0]
    assert len(result.token_ids) == 20 and result.token_ids[: first + 1] == [*expected[:first], 96]

    engine.add("later", PROMPT, SamplingParams(temperature=0.0, max_tokens=20, min_tokens=first + 1))
    result = run(engine)["later", 0]
    assert result.token_ids[: first + 1] == expected[: first + 1], "the next most likely token is taken"

    engine.add("least", PROMPT, SamplingParams(temperature=0.0, max_tokens=20, min_tokens=20, stop_token_ids=(end,)))
    result = run(engine)["least", 0]
    assert len(result.token_ids) == 20 and not {96, end} & set(result.token_ids)


def test_stop_string_and_min_tokens(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any
) -> None:
    text = "".join(vocabulary.token_bytes(t).decode() for t in greedy(PROMPT, 20))
    stop = text[4:7]
    assert text.find(stop) == 4
    engine = make_engine(model, vocabulary)
    engine.add("x", PROMPT, SamplingParams(temperature=0.0, max_tokens=20, stop=(stop,)))
    engine.add("y", PROMPT, SamplingParams(temperature=0.0, max_tokens=20, stop=(stop,), min_tokens=6))
    engine.add("z", PROMPT, SamplingParams(temperature=0.0, max_tokens=20, stop=(stop,), min_tokens=7))
    results = run(engine)
    for name in ("x", "y"):
        assert results[name, 0].text == text[:4] and results[name, 0].finish_reason is FinishReason.STOP
        assert len(results[name, 0].token_ids) == 7
    assert results["z", 0].text == text and results["z", 0].finish_reason is FinishReason.LENGTH


def test_penalties_count_what_was_generated(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, scores: Any
) -> None:
    model.scores = lambda context: scores(context[-1:])  # without penalties the tokens repeat

    def expected(count: Any) -> Any:
        context = list(PROMPT)
        for _ in range(count):
            row = model.scores(context)
            for token in set(context):
                row[token] = row[token] / 1.1 if row[token] > 0 else row[token] * 1.1
            for token in context[len(PROMPT) :]:
                row[token] -= 0.7
            context.append(int(np.argmax(row)))
        return context[len(PROMPT) :]

    engine = make_engine(model, vocabulary, num_pages=13)
    sampling = SamplingParams(temperature=0.0, max_tokens=40, frequency_penalty=0.7, repetition_penalty=1.1)
    for name in ("a", "b"):
        engine.add(name, PROMPT, sampling)
    engine.add("plain", PROMPT, SamplingParams(temperature=0.0, max_tokens=40))
    results = run(engine)
    assert engine.stats().preemptions > 0
    assert results["a", 0].token_ids == results["b", 0].token_ids == expected(40)
    assert len(set(results["plain", 0].token_ids)) < len(set(expected(40)))


def test_held_back_text_comes_out_at_the_end(
    model: Any, make_vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any
) -> None:
    """The end of a choice, by length or by an end token, decides about a possible stop string and half a character."""
    expected = greedy(PROMPT, 7)
    assert len(set(expected)) == 7
    pieces = [b"-"] * 96 + [b""]
    for token, piece in zip(expected, (b"a", b"b", b"EN", b"c", b"E", b"\xe2\x82", b"."), strict=True):
        pieces[token] = piece
    engine = make_engine(model, make_vocabulary(pieces))
    for name, count, stop_ids in (("held", 5, ()), ("half", 6, ()), ("ended", 20, (expected[5],))):
        sampling = SamplingParams(temperature=0.0, max_tokens=count, stop=("END",), stop_token_ids=stop_ids)
        engine.add(name, PROMPT, sampling)
    results = run(engine)
    assert results["held", 0].text == "abENcE" and results["held", 0].outputs[-1].text == "E"
    assert results["half", 0].text == "abENcE\ufffd" and results["half", 0].finish_reason is FinishReason.LENGTH
    assert results["ended", 0].text == "abENcE" and results["ended", 0].finish_reason is FinishReason.STOP


def test_context_length_ends_a_choice(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any
) -> None:
    engine = make_engine(model, vocabulary, max_model_len=20)
    engine.add("x", PROMPT, SamplingParams(temperature=0.0))
    engine.add("y", PROMPT, SamplingParams(temperature=0.0, max_tokens=1000))
    engine.add("z", [1] * 19, SamplingParams(temperature=0.0))
    results = run(engine)
    assert results["x", 0].token_ids == results["y", 0].token_ids == greedy(PROMPT, 11)
    assert len(results["z", 0].token_ids) == 1
    assert {results[name, 0].finish_reason for name in "xyz"} == {FinishReason.LENGTH}


def test_refusals_change_nothing(model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any) -> None:
    engine = make_engine(model, vocabulary, max_model_len=20, max_num_seqs=4)
    for prompt, sampling, kind, param in (
        ([1] * 20, SamplingParams(), ContextLengthExceeded, "prompt"),
        ([], SamplingParams(), InvalidRequest, "prompt"),
        ([1, 97], SamplingParams(), InvalidRequest, "prompt"),
        ([1, -1], SamplingParams(), InvalidRequest, "prompt"),
        ([1], SamplingParams(n=5), InvalidRequest, "n"),
        ([1], SamplingParams(logit_bias={97: 1.0}), InvalidRequest, "logit_bias"),
    ):
        with pytest.raises(kind) as caught:
            engine.add("bad", prompt, sampling)
        assert caught.value.param == param and caught.value.limit is not None and caught.value.value is not None
        assert not engine.has_work
    with pytest.raises(InvalidRequest, match="emitted"):
        engine.add("bad", [1], SamplingParams(), emitted=[EmittedChoice(token_ids=(200,))])
    engine.add("good", [1], SamplingParams(max_tokens=1))
    with pytest.raises(InvalidRequest, match="already"):
        engine.add("good", [1], SamplingParams(max_tokens=1))
    assert run(engine)["good", 0].finish_reason is FinishReason.LENGTH


def test_logits_that_are_not_finite_end_one_sequence(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any
) -> None:
    other = [1, 2, 3]
    model.poison = lambda context: context[: len(PROMPT)] == PROMPT and len(context) == len(PROMPT) + 4
    engine = make_engine(model, vocabulary)
    engine.add("bad", PROMPT, SamplingParams(temperature=0.0, max_tokens=12, n=2))
    engine.add("good", other, SamplingParams(seed=1, max_tokens=12, temperature=0.0))
    results = run(engine)
    assert results["good", 0].token_ids == greedy(other, 12)
    for index in range(2):
        assert results["bad", index].token_ids == greedy(PROMPT, 4)
        assert results["bad", index].error.code == "engine_failure" and results["bad", index].finish_reason is None
    model.poison = lambda context: len(context) == 4
    engine.add("drawn", other, SamplingParams(seed=1, max_tokens=12, logprobs=3, logit_bias={3: 1.0}, top_p=0.5))
    engine.add("shared", [*other, 5], SamplingParams(seed=1, n=3))
    results = run(engine)
    assert len(results["drawn", 0].token_ids) == 1 and results["drawn", 0].error is not None
    assert all(results["shared", i].error is not None for i in range(3))


def test_a_sequence_that_can_never_fit_fails_without_the_others(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any
) -> None:
    engine = make_engine(model, vocabulary, num_pages=5, max_num_batched_tokens=8)  # 20 tokens
    engine.add("grows", PROMPT, SamplingParams(temperature=0.0, max_tokens=100))
    engine.add("small", [1, 2], SamplingParams(temperature=0.0, max_tokens=17))
    engine.add("huge", [3] * 30, SamplingParams(temperature=0.0, n=3))
    engine.add("last", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=17))
    results = run(engine)
    assert results["small", 0].token_ids == greedy([1, 2], 17)
    assert results["last", 0].token_ids == greedy([1, 2, 3], 17)
    assert results["grows", 0].token_ids == greedy(PROMPT, 12)
    assert results["grows", 0].error.code == "engine_failure" and results["grows", 0].error.limit == 20
    assert all(results["huge", i].error.value == 30 for i in range(3))


def test_an_abort_frees_all_pages_at_once(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any, gather_outputs: Any
) -> None:
    engine = make_engine(model, vocabulary, max_num_seqs=6, max_num_batched_tokens=6)
    engine.add("a", PROMPT, SamplingParams(temperature=0.0, max_tokens=9))
    engine.add("b", PROMPT * 3, SamplingParams(n=3))
    engine.add("c", PROMPT, SamplingParams(n=4))
    results: dict[Any, Any] = {}
    gather_outputs(results, engine.step())
    gather_outputs(results, engine.step())
    for name in ("b", "c", "never", "b"):
        engine.abort(name)
        engine.check()
    rest = run(engine)
    assert set(rest) == {("a", 0)}
    assert results["a", 0].token_ids + rest["a", 0].token_ids == greedy(PROMPT, 9)
    engine.add("x", PROMPT, SamplingParams(n=3))
    for _ in range(5):
        engine.step()
    engine.abort("x")
    assert not engine.has_work and engine.stats().free_pages == engine.stats().total_pages
    assert engine.step() == []


def test_logprobs_describe_the_unedited_distribution(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, scores: Any
) -> None:
    engine = make_engine(model, vocabulary)
    sampling = SamplingParams(
        seed=5, temperature=0.7, max_tokens=8, logprobs=4, logit_bias={7: 50.0}, repetition_penalty=2.0
    )
    engine.add("x", PROMPT, sampling)
    engine.add("zero", PROMPT, SamplingParams(temperature=0.0, max_tokens=2, logprobs=0))
    results = run(engine)
    context = list(PROMPT)
    assert len(results["x", 0].logprobs) == 8
    for token, logprobs in zip(results["x", 0].token_ids, results["x", 0].logprobs, strict=True):
        raw = scores(context).astype(np.float64)
        expected = raw - np.log(np.exp(raw).sum())
        assert logprobs.chosen.token_id == token and logprobs.chosen.token_bytes == vocabulary.token_bytes(token)
        assert logprobs.chosen.logprob == pytest.approx(expected[token], abs=1e-6)
        assert [alternative.token_id for alternative in logprobs.top] == np.argsort(-expected)[:4].tolist()
        assert [alternative.logprob for alternative in logprobs.top] == pytest.approx(
            np.sort(expected)[::-1][:4].tolist(), abs=1e-6
        )
        context.append(token)
    assert [logprob.top for logprob in results["zero", 0].logprobs] == [(), ()]


def test_an_error_of_the_model_reaches_the_caller(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine]
) -> None:
    def broken(context: Any) -> None:
        raise RuntimeError("device lost")

    model.scores = broken
    engine = make_engine(model, vocabulary)
    engine.add("x", PROMPT, SamplingParams())
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()


def test_columns_beyond_the_vocabulary_are_never_chosen(
    model: Any, make_vocabulary: Any, make_engine: Callable[..., Engine], run: Any
) -> None:
    small = make_vocabulary([bytes([65 + i]) for i in range(20)] + [b""])
    engine = make_engine(model, small)
    for i in range(10):
        engine.add(f"r{i}", [i], SamplingParams(seed=i, temperature=2.0 * (i % 2), max_tokens=20, ignore_eos=True))
    assert all(max(result.token_ids) <= 20 for result in run(engine).values())
