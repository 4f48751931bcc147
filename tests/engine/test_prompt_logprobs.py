"""Log probabilities of prompts, and requests that generate nothing, with the parts of the host and of a device."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from ktqueue.core.events import FinishReason, PositionLogprobs
from ktqueue.core.request import SamplingParams
from ktqueue.engine.engine import Engine

PROMPT = [5, 9, 2, 44, 17, 3, 80, 21, 9, 33, 1, 60, 7]
NOTHING = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=2)


@pytest.fixture(params=["host", "device"])
def parts(request: Any) -> Any:
    """Each test here runs with the parts of the host and with those of a device."""
    return request.param


@pytest.fixture
def expected(scores: Callable[..., np.ndarray]) -> Callable[[Sequence[int]], list[Any]]:
    """For each token of a prompt: its id, its log probability and the two likeliest ids, computed without a cache."""

    def compute(prompt: Sequence[int]) -> list[Any]:
        entries: list[Any] = [None]
        for place in range(1, len(prompt)):
            logits = scores(prompt[:place]).astype(np.float64)
            logprobs = logits - np.log(np.exp(logits).sum())
            entries.append((prompt[place], pytest.approx(logprobs[prompt[place]]), np.argsort(-logprobs)[:2].tolist()))
        return entries

    return compute


def plain(entries: Sequence[PositionLogprobs | None]) -> list[Any]:
    return [
        None
        if entry is None
        else (entry.chosen.token_id, entry.chosen.logprob, [token.token_id for token in entry.top])
        for entry in entries
    ]


@pytest.mark.parametrize("budget", [2, 5, 512])
@pytest.mark.parametrize("rows", [1, 3, 256])
def test_each_token_of_the_prompt_has_its_log_probability(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any, expected: Any,
    budget: int, rows: int,
) -> None:  # fmt: skip
    engine = make_engine(model, vocabulary, max_num_seqs=8, max_num_batched_tokens=budget, max_prompt_rows=rows)
    engine.add("plain", PROMPT, SamplingParams(temperature=0.0, max_tokens=9))
    engine.step()
    for length in (1, 2, 4, 13):
        engine.add(f"r{length}", PROMPT[:length], SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=2))
    results = run(engine)
    assert results["plain", 0].prompt_logprobs == []
    for length in (1, 2, 4, 13):
        result = results[f"r{length}", 0]
        assert plain(result.prompt_logprobs) == expected(PROMPT[:length])
        assert result.token_ids == greedy(PROMPT[:length], 4)
        assert result.usage.cached_tokens == 0  # the plain request's pages would hide logits


@pytest.mark.parametrize("caching", [True, False])
def test_nothing_is_generated(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, expected: Any, caching: bool
) -> None:
    engine = make_engine(model, vocabulary, enable_prefix_caching=caching)
    engine.add("scored", PROMPT, NOTHING)
    engine.add("many", PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=2, n=3))
    engine.add("empty", PROMPT, SamplingParams(max_tokens=0))
    results = run(engine)
    assert plain(results["scored", 0].prompt_logprobs) == expected(PROMPT)
    assert [entry for i in range(3) for entry in plain(results["many", i].prompt_logprobs)] == expected(PROMPT)
    for result in results.values():
        assert (result.finish_reason, result.token_ids, result.text) == (FinishReason.LENGTH, [], "")
    assert results["scored", 0].usage.prompt_tokens == len(PROMPT)
    assert results["scored", 0].usage.completion_tokens == 0


def test_a_preempted_prompt_gives_each_entry_once(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any, expected: Any,
) -> None:  # fmt: skip
    engine = make_engine(model, vocabulary, num_pages=8, max_num_seqs=4, max_prompt_rows=1)
    engine.add("grows", PROMPT[:4], SamplingParams(temperature=0.0, max_tokens=24))
    engine.add("scored", PROMPT + PROMPT[:7], NOTHING)
    results = run(engine)
    assert engine.stats().preemptions
    assert results["grows", 0].token_ids == greedy(PROMPT[:4], 24)
    assert plain(results["scored", 0].prompt_logprobs) == expected(PROMPT + PROMPT[:7])


@pytest.mark.parametrize("entries", [0, 1, 2, 5, 9, 13])
@pytest.mark.parametrize("cached", [True, False])
def test_a_resumed_prompt_goes_on_at_the_next_entry(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any, expected: Any,
    entries: int, cached: bool,
) -> None:  # fmt: skip
    engine = make_engine(model, vocabulary)
    if cached:
        engine.add("before", PROMPT, SamplingParams(temperature=0.0, max_tokens=1))
        run(engine)
    engine.add("r", PROMPT, SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2), prompt_entries=entries)
    result = run(engine)["r", 0]
    assert plain(result.prompt_logprobs) == expected(PROMPT)[entries:]
    assert result.token_ids == greedy(PROMPT, 3)
    assert (result.usage.cached_tokens > 0) == (cached and entries > 4)  # a page has four tokens


def test_logits_of_a_step_are_limited(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any
) -> None:
    widest = 0

    def watched(*, logits_to_keep: Any, **arguments: Any) -> Any:
        nonlocal widest
        widest = max(widest, len(logits_to_keep))
        return model(logits_to_keep=logits_to_keep, **arguments)

    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "cuda_graphs": False, "max_prompt_rows": 6}
    engine = make_engine(watched, vocabulary, **limits)
    for name in "abcd":
        engine.add(name, [ord(name) - 60, *PROMPT], NOTHING)
    run(engine)
    assert widest == 6  # a request that generates nothing needs no other logits


def test_logits_that_are_not_finite_end_their_request_only(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, expected: Any
) -> None:
    model.poison = lambda context: list(context) == [1, 2, 3]
    engine = make_engine(model, vocabulary)
    engine.add("bad", [1, 2, 3, 4, 5], SamplingParams(max_tokens=3, prompt_logprobs=0, n=2))
    engine.add("good", PROMPT, NOTHING)
    results = run(engine)
    for index in range(2):
        assert results["bad", index].error.code == "engine_failure"
        assert "prompt" in results["bad", index].error.message and results["bad", index].token_ids == []
    assert plain(results["good", 0].prompt_logprobs) == expected(PROMPT)
