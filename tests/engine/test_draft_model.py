"""Drafts of a small model change no answer, and its cache follows the pages of the engine: docs/adr/0064.

The models of these tests read all tokens back from their caches, and refuse a place that holds another position.
"""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_workload import outputs_of_steps, workload

from ktqueue.core.request import SamplingParams
from ktqueue.engine import draft_model
from ktqueue.engine.draft_model import DraftModel
from ktqueue.engine.drafts import Drafts
from ktqueue.engine.engine import Engine
from ktqueue.engine.step_costs import StepCosts

PROMPT = [41, 42, 50, 44, 41, 42, 50, 44, 41]


@pytest.fixture(params=["host", "device"])
def parts(request: pytest.FixtureRequest) -> str:
    """Each test on both sides."""
    return str(request.param)


@pytest.fixture
def make_draft(make_model: Any, scores: Any) -> Callable[..., Any]:
    """Make a model that often has the scores of the engine's model, and sometimes others."""

    def make(differs: Callable[[Any], bool] = lambda found: found[0] > 2) -> Any:
        def similar(context: Any) -> Any:
            found = scores(context)
            return np.roll(found, 1) if differs(found) else found

        model = make_model()
        model.scores = similar
        return model

    return make


@pytest.fixture
def drafting(
    model: Any,
    vocabulary: Any,
    make_engine: Callable[..., Engine],
    timeless_steps: None,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Engine]:
    """drafting(draft model, **options): an engine where steps of all sizes cost the same, and drafts nothing."""
    monkeypatch.setattr(StepCosts, "seconds", lambda *_: 1.0)
    monkeypatch.setattr(DraftModel, "pass_seconds", lambda *_: 0.0)
    return lambda draft, **options: make_engine(model, vocabulary, speculation="model", draft=draft, **options)


def exactly(tokens: int) -> SamplingParams:
    """A greedy answer of so many tokens."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def without_drafts() -> dict[tuple[int, str], Any]:
    """Answers and statistics of the next test without drafts, which know of no costs and do not depend on the pages."""
    return {}


@pytest.mark.parametrize("pages", [400, 18])
@pytest.mark.parametrize("seed", range(3))
def test_answers_stay_the_same(
    make_crowded: Any,
    make_draft: Callable[..., Any],
    gather_outputs: Any,
    compile_grammar: Any,
    timeless_steps: None,
    monkeypatch: pytest.MonkeyPatch,
    without_drafts: dict[tuple[int, str], Any],
    parts: str,
    seed: int,
    pages: int,
) -> None:
    """In any mix of requests: with stop strings, grammars, several choices, aborts, preemption and faults.

    With every number of pages, drafts cost nothing for some seeds, and something random for the others.
    """
    noise = random.Random(seed)
    are_free = (seed + (pages == 18)) % 2
    monkeypatch.setattr(StepCosts, "seconds", lambda *_: 1.0 if are_free else noise.random())
    monkeypatch.setattr(DraftModel, "pass_seconds", lambda *_: 0.0)
    monkeypatch.setattr(DraftModel, "reading_seconds", lambda *_: 0.0)
    turns = workload(seed)
    aborted = {name for aborts, _ in turns for name in aborts}

    def answer(speculation: str, draft: Any) -> Any:
        engine = make_crowded(seed, pages, speculation=speculation, draft=draft)
        results: dict[Any, Any] = {}
        for outputs in outputs_of_steps(engine, turns, compile_grammar):
            gather_outputs(results, outputs)
        answers = {
            key: (result.token_ids, result.text, result.logprobs, result.finish_reason, result.error)
            for key, result in results.items()
            if key[0] not in aborted
        }
        return answers, engine.stats()

    if (seed, parts) not in without_drafts:
        without_drafts[seed, parts] = answer("off", None)
    (expected, off), (found, on) = without_drafts[seed, parts], answer("model", make_draft())
    assert found == expected
    assert off.drafted_tokens == 0 < on.accepted_tokens < on.drafted_tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_is_the_same_is_always_right(
    drafting: Callable[..., Engine], make_model: Any, run: Any, temperature: float
) -> None:
    """Sampled tokens too, since a draft has the noise of its position. The draft model computes each token once."""
    draft = make_model()
    engine = drafting(draft, max_num_seqs=2)
    for name in ("a", "b"):
        engine.add(name, PROMPT, SamplingParams(temperature=temperature, seed=3, max_tokens=41, ignore_eos=True))
    run(engine)
    stats = engine.stats()
    assert stats.accepted_tokens == stats.drafted_tokens > 60 and stats.steps < 14
    assert draft.computed_tokens <= 2 * (len(PROMPT) + 40) + stats.steps


def test_wrong_drafts_are_overwritten_in_its_cache(
    drafting: Callable[..., Engine], make_draft: Callable[..., Any], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees the tokens of the answer, and after them no more than the drafts of one step. Some steps have none."""
    monkeypatch.setattr("ktqueue.engine.draft_costs.UNDRAFTED_EVERY", 3)
    draft = make_draft(lambda found: found[0] > 4)
    seen: list[list[int]] = []
    scores = draft.scores

    def noted(context: Any) -> Any:
        seen.append(list(context))
        return scores(context)

    draft.scores = noted
    engine = drafting(draft)
    for number in range(8):
        seen.clear()
        engine.add("x", PROMPT[number:], exactly(100))
        answer = PROMPT[number:] + run(engine)["x", 0].token_ids
        for context in seen:
            right = [token == known for token, known in zip(context, answer, strict=False)]
            assert len(context) - [*right, False].index(False) <= 8
    assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens


def test_a_model_that_is_never_right_is_not_asked(
    drafting: Callable[..., Engine], make_draft: Callable[..., Any], run: Any
) -> None:
    engine = drafting(make_draft(lambda _: True))
    for number in range(6):
        engine.add(str(number), PROMPT, exactly(100))
        run(engine)
    assert 0 < engine.stats().drafted_tokens < 400 and engine.stats().accepted_tokens < 10


def test_probes_do_not_tell_how_often_drafts_are_right(
    drafting: Callable[..., Engine], make_draft: Callable[..., Any], run: Any, scores: Any
) -> None:
    """Their texts are random."""
    draft = make_draft(lambda _: True)
    engine = drafting(draft)
    engine.drafts.probed = 4
    for number in range(4):
        engine.add(str(number), PROMPT, exactly(60))
        run(engine)
    engine.drafts.probed, draft.scores = 0, scores
    engine.reset_statistics()
    engine.add("x", PROMPT, exactly(60))
    run(engine)
    assert engine.stats().steps < 20


@pytest.mark.parametrize("launch_next", [lambda: True, lambda: False], ids=["ahead", "not ahead"])
def test_a_good_model_is_tried_where_only_good_ones_pay(
    drafting: Callable[..., Engine],
    make_draft: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    launch_next: Callable[[], bool],
) -> None:
    """A draft pays if it is right in nine of ten cases, but not in eight. So no step may be launched ahead of it."""
    monkeypatch.setattr(StepCosts, "seconds", lambda _, tokens: 100.0 + 77.0 * (tokens - 1) ** 2)
    engine = drafting(make_draft(lambda _: False))
    engine.add("x", PROMPT, exactly(60))
    while engine.has_work:
        engine.step(launch_next)
    assert engine.stats().accepted_tokens == engine.stats().drafted_tokens > 25


def test_a_sequence_is_drafted_again_after_wrong_drafts(
    drafting: Callable[..., Engine], make_draft: Callable[..., Any], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first draft is wrong, and all others are right."""
    monkeypatch.setattr(draft_model, "RECOVERY", 1 / 8)
    monkeypatch.setattr(draft_model, "LEARNING", 1.0)
    draft: Any = make_draft(lambda _: draft.computed_tokens <= 2 * len(PROMPT))
    engine = drafting(draft)
    engine.add("x", PROMPT, exactly(60))
    run(engine)
    stats = engine.stats()
    assert stats.accepted_tokens < stats.drafted_tokens <= stats.accepted_tokens + 8 and stats.steps < 30


def test_no_prompt_is_read_before_it_is_paid(
    drafting: Callable[..., Engine], make_draft: Callable[..., Any], run: Any
) -> None:
    """A reading lasts a step here, once the first has shown it."""
    engine = drafting(make_draft(lambda _: False))
    for longer, kept, drafts in ((6, 0.5, True), (1, 0.5, False), (1, 0.8, True)):
        engine.drafts.costs._kept, engine.drafts.costs._balance = kept, 1.0
        before = engine.stats().drafted_tokens
        engine.add("x", PROMPT * longer, exactly(40))
        run(engine)
        assert (engine.stats().drafted_tokens > before) == drafts


def test_few_known_tokens_are_part_of_what_drafts_cost(
    drafting: Callable[..., Engine], make_draft: Callable[..., Any], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they take a pass of their own. Only what is read before the first draft is paid before."""
    taken: list[tuple[float, float]] = []
    take = DraftModel.take_seconds

    def noted(model: DraftModel) -> tuple[float, float]:
        taken.append(take(model))
        return taken[-1]

    monkeypatch.setattr(DraftModel, "take_seconds", noted)
    monkeypatch.setattr(DraftModel, "joined", 0)
    engine = drafting(make_draft(lambda _: False))
    engine.add("x", PROMPT, exactly(41))
    run(engine)
    readings = [reading for making, reading in taken if making]
    assert len(readings) > 2 and readings[0] > 0.0 and not any(readings[1:])


def test_known_tokens_are_computed_beside_the_last_one(
    drafting: Callable[..., Engine], make_draft: Callable[..., Any], run: Any
) -> None:
    """The model's token after right drafts, and the last draft, take no pass of their own. So prompts alone do."""
    draft = make_draft(lambda _: False)
    engine = drafting(draft, max_num_seqs=2)
    captured = len(draft.steps)
    for name in ("a", "b"):
        engine.add(name, PROMPT, exactly(41))
    run(engine)
    passes = draft.steps[captured:]
    assert [step for step in passes if step[1] > step[0]] == [
        (1, len(PROMPT) + 1)
    ] * 2  # with the first token of the answer
    assert (4, 4) in passes and (2, 2) in passes
    if (made := engine.drafts._model) is not None and made._runner.replayed:
        assert made._runner.replayed == len(passes) - 2


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_device_begins_further_passes_before_the_host_has_their_tokens(
    drafting: Callable[..., Engine], make_model: Any, run: Any, parts: str, top_p: float
) -> None:
    """And drafts stay right, also where the host has to draw again."""
    engine = drafting(make_model(), max_num_seqs=2)
    assert engine.drafts._model is not None
    engine.drafts._model._selector._candidates = 2  # type: ignore[attr-defined]  # so that some tokens are drawn again
    runner = engine.drafts._model._runner
    execute, early = runner.execute, 0

    def counted(batch: Any, tokens: Any = None) -> Any:
        nonlocal early
        early += tokens is not None
        return execute(batch, tokens)

    runner.execute = counted  # type: ignore[method-assign]
    for seed in range(2):
        sampling = SamplingParams(temperature=1.0, top_p=top_p, seed=seed, max_tokens=40, ignore_eos=True)
        engine.add(str(seed), PROMPT, sampling)
    run(engine)
    stats = engine.stats()
    assert stats.accepted_tokens == stats.drafted_tokens > 60
    assert early == 0 if parts == "host" else early > 20


def test_the_seconds_of_drafts_are_those_of_passes() -> None:
    """Each pass adds a draft to some rows. Further ones are faster."""
    first, further = {1: 1.5, 2: 2.0, 3: 2.75}, {1: 1.0, 2: 1.5, 3: 2.25}
    model: Any = SimpleNamespace(pass_seconds=lambda rows, ahead: (further if ahead else first)[rows])
    a, b, c = "abc"
    wanted: Any = [a, b, a, a, c, b]
    assert Drafts._making_seconds(model, wanted) == [1.5, 2.0, 3.0, 4.0, 4.75, 5.25]


def test_a_sequence_is_drafted_as_far_as_the_draft_model_sees(
    drafting: Callable[..., Engine], make_draft: Callable[..., Any], run: Any
) -> None:
    engine = drafting(make_draft(), draft_length=20)
    engine.add("x", PROMPT, exactly(100))
    longest = 0
    draft = engine.drafts._model
    assert draft is not None
    inner = draft._batch

    def batch(rows: Any, **more: Any) -> Any:
        nonlocal longest
        longest = max(longest, *(first + len(token_ids) for _, first, token_ids in rows))
        return inner(rows, **more)

    draft._batch = batch  # type: ignore[method-assign]
    run(engine)
    assert 10 < longest <= 20 and engine.stats().steps > 80


def test_a_step_has_no_drafts_if_memory_runs_out_for_them(
    drafting: Callable[..., Engine], make_draft: Callable[..., Any], run: Any, greedy: Any
) -> None:
    draft = make_draft()
    scores, calls = draft.scores, 0

    def lacks(context: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise torch.OutOfMemoryError("as asked")
        return scores(context)

    engine = drafting(draft)
    draft.scores = lacks
    engine.drafts.probed = 2
    engine.add("x", PROMPT, exactly(60))
    assert run(engine)["x", 0].token_ids == greedy(PROMPT, 60)
    assert 0 < engine.stats().accepted_tokens < 40 < engine.stats().steps + engine.stats().accepted_tokens
