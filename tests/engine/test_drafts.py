"""Drafts that are verified beside the last token change no answer: docs/adr/0059.

The model of most tests repeats itself, but not always, so some drafts are right and others are wrong. Each token hangs
on all that is in the cache.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from engine_workload import outputs_of_steps, workload

from ktqueue.core.request import SamplingParams
from ktqueue.engine.draft_costs import DraftCosts
from ktqueue.engine.engine import Engine
from ktqueue.engine.outputs import EmittedChoice
from ktqueue.engine.step_costs import StepCosts

PROMPT = [41, 42, 50, 44, 41, 42, 50, 44, 41]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=24, n=2, ignore_eos=True)


@pytest.fixture
def repeating(make_model: Any, scores: Any) -> Callable[[], Any]:
    """Make a model whose next token mostly depends on the last one, and sometimes on all before it."""

    def repeat(context: Any) -> Any:
        found = scores(context)
        if found[0] > -4:
            found[40 + (3 * int(context[-1]) + 1) % 7] += 12
        if found[1] > 7:
            found[96] = 30
        return found

    def make() -> Any:
        model = make_model()
        model.scores = repeat
        return model

    return make


def answers_of(results: Any, aborted: Any = ()) -> Any:
    """What a client sees of each choice, and the usage of each request.

    Cached tokens are left out, because they depend on what else had run.
    """
    usage = {name: result.usage for (name, _), result in results.items() if result.usage and name not in aborted}
    tokens = {name: (used.prompt_tokens, used.completion_tokens) for name, used in usage.items()}
    return tokens, {
        key: (
            result.token_ids,
            result.text,
            result.logprobs,
            result.finish_reason,
            result.error,
            [output.token_ids for output in result.outputs if output.token_ids],
        )
        for key, result in results.items()
        if key[0] not in aborted
    }


def longer(turns: Any) -> Any:
    """The workload with answers that are long enough to repeat themselves."""
    return [
        (
            aborts,
            [
                (name, prompt, replace(sampling, max_tokens=3 * sampling.max_tokens), *more)
                for name, prompt, sampling, *more in adds
            ],
        )
        for aborts, adds in turns
    ]


@pytest.fixture(scope="module")
def without_drafts() -> dict[tuple[int, str], Any]:
    """Answers and statistics of the next test without drafts, which know of no costs and do not depend on the pages."""
    return {}


@pytest.mark.parametrize("pages", [400, 18])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["host", "device"])
def test_answers_stay_the_same(
    make_crowded: Any,
    gather_outputs: Any,
    compile_grammar: Any,
    repeating: Any,
    any_chance: None,
    without_drafts: dict[tuple[int, str], Any],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    pages: int,
    kind: str,
) -> None:
    """In any mix of requests: with stop strings, grammars, several choices, aborts, preemption and faults.

    With every number of pages, drafts cost nothing for some seeds, and something random for the others. On a device,
    steps without drafts are launched ahead.
    """
    noise = random.Random(seed)
    are_free = (seed + (pages == 18)) % 2
    monkeypatch.setattr(StepCosts, "seconds", lambda *_: 1.0 if are_free else noise.random())
    turns = longer(workload(seed))
    aborted = {name for aborts, _ in turns for name in aborts}

    def answer(speculation: str) -> Any:
        engine = make_crowded(seed, pages, model=repeating(), speculation=speculation)
        results: dict[Any, Any] = {}
        for outputs in outputs_of_steps(engine, turns, compile_grammar, lambda: True):
            gather_outputs(results, outputs)
        return answers_of(results, aborted), engine.stats()

    if (seed, kind) not in without_drafts:
        without_drafts[seed, kind] = answer("off")
    (expected, off), (found, on) = without_drafts[seed, kind], answer("lookup")
    assert found == expected
    assert off.drafted_tokens == off.accepted_tokens == 0 < on.accepted_tokens < on.drafted_tokens
    assert (on.steps_ahead > 0) == (kind == "device" and seed % 3 < 2)


@pytest.mark.parametrize(
    ("kind", "temperature", "pages"),  # each pair of them once
    [("host", 0.0, 400), ("host", 1.0, 24), ("device", 0.0, 24), ("device", 1.0, 400)],
)
def test_answers_with_a_grammar_stay_the_same(
    repeating: Any,
    vocabulary: Any,
    make_engine: Callable[..., Engine],
    run: Any,
    compile_grammar: Any,
    any_chance: None,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    temperature: float,
    pages: int,
) -> None:
    """Drafts that the grammar does not allow are not tried. Tokens that it forces may stand in the place of drafts."""
    noise = random.Random(0)
    monkeypatch.setattr(StepCosts, "seconds", lambda *_: noise.choice([1.0, 1.0, 1.0, 3.0]))
    grammars = [
        'start: ("[" /[A-D]{2,3}/ ("yes" | "maybe")? "]")+',
        "start: /[G-N]{40,}/",
        'start: ("-" /[A-C]/ "withoutchoice")+',
    ]
    answers, stats = [], []
    for speculation in ("off", "lookup"):
        engine = make_engine(
            repeating(), vocabulary, speculation=speculation, max_num_seqs=4, num_pages=pages, cuda_graphs=pages == 400
        )
        for number in range(9):
            sampling = SamplingParams(
                temperature=temperature, seed=number, max_tokens=60, n=1 + (number % 2), stop=("CC]",)
            )
            matcher = compile_grammar(grammars[number % 3])
            engine.add(str(number), PROMPT, sampling if temperature else replace(sampling, n=1), matcher=matcher)
        answers.append(answers_of(run(engine)))
        stats.append(engine.stats())
    off, on = stats
    assert answers[0] == answers[1]
    assert off.drafted_tokens == 0 and on.accepted_tokens > 20 and on.drafted_tokens > on.accepted_tokens
    assert (on.preemptions > 0) == (pages == 24) and on.steps < off.steps


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("first", ["off", "lookup"])
def test_another_worker_continues_at_any_token(
    repeating: Any,
    vocabulary: Any,
    make_engine: Callable[..., Engine],
    run: Any,
    gather_outputs: Any,
    free_drafts: None,
    first: str,
    sampling: SamplingParams,
) -> None:
    """A job may move between workers with and without speculation after each event."""
    second = {"off": "lookup", "lookup": "off"}[first]
    begun = make_engine(repeating(), vocabulary, speculation=first)
    begun.add("x", PROMPT, sampling)
    outputs = []
    while begun.has_work:
        outputs += begun.step()
    expected: dict[Any, Any] = {}
    gather_outputs(expected, outputs)
    for cut in range(len(outputs)):
        journal: dict[Any, Any] = {}
        gather_outputs(journal, outputs[:cut])
        emitted = [
            EmittedChoice(
                token_ids=tuple(result.token_ids), text_length=len(result.text), finish_reason=result.finish_reason
            )
            if (result := journal.get(("x", index)))
            else EmittedChoice()
            for index in range(sampling.n)
        ]
        engine = make_engine(repeating(), vocabulary, speculation=second)
        engine.add("x", PROMPT, sampling, emitted=emitted)
        gather_outputs(journal, [output for result in run(engine).values() for output in result.outputs])
        for index in range(sampling.n):
            result, whole = journal["x", index], expected["x", index]
            assert (result.token_ids, result.text) == (whole.token_ids, whole.text)
            assert result.finish_reason == whole.finish_reason


def test_the_prefix_cache_knows_what_it_knows_without_drafts(
    repeating: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, free_drafts: None
) -> None:
    """Each request continues a part of the last answer, from the same number of cached tokens."""
    found = []
    for speculation in ("off", "lookup"):
        engine = make_engine(repeating(), vocabulary, speculation=speculation, page_size=2)
        text, answers = PROMPT, []
        for number in range(30):
            engine.add(str(number), text, SamplingParams(temperature=1.0, seed=number, max_tokens=20))
            result = run(engine)[str(number), 0]
            answers.append((result.token_ids, result.finish_reason, result.usage))
            text = (text + result.token_ids)[: 60 - number]
        found.append(answers)
    assert found[0] == found[1]
    assert engine.stats().accepted_tokens < engine.stats().drafted_tokens


@pytest.mark.parametrize("size", [1, 3, 16, 40])
def test_drafts_save_steps_and_stay_within_the_budget(
    repeating: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, free_drafts: None, size: int
) -> None:
    """Drafts take only tokens that no other row wants."""
    stats = []
    for speculation in ("off", "lookup"):
        model = repeating()
        engine = make_engine(model, vocabulary, speculation=speculation, max_num_batched_tokens=size, max_num_seqs=2)
        for name in ("a", "b"):
            engine.add(name, PROMPT, GREEDY)
        run(engine)
        assert max(tokens for _, tokens in model.steps) <= size
        stats.append(engine.stats())
    off, on = stats
    assert (on.drafted_tokens > 0) == (size > 1) and on.generation_tokens == off.generation_tokens == 48
    assert on.steps < 0.8 * off.steps or size < 16


def test_a_step_has_drafts_only_where_they_pay(
    repeating: Any,
    vocabulary: Any,
    make_engine: Callable[..., Engine],
    run: Any,
    timeless_steps: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If each token of a step costs the same, no draft is worth it. The larger a step is anyway, the more are."""
    drafted = []
    for each in (1.0, 0.1, 0.0):
        monkeypatch.setattr(StepCosts, "seconds", lambda _, tokens, each=each: 1.0 + each * tokens)
        engine = make_engine(repeating(), vocabulary, speculation="lookup")
        engine.add("x", PROMPT, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
        run(engine)
        drafted.append(engine.stats().drafted_tokens)
    assert drafted[0] < drafted[1] < drafted[2]
    monkeypatch.setattr(StepCosts, "seconds", lambda _, tokens: float(tokens))
    engine = make_engine(repeating(), vocabulary, speculation="lookup")
    engine.add("x", PROMPT, GREEDY)
    run(engine)
    assert engine.stats().drafted_tokens == 0


def test_drafts_stop_where_they_turn_out_to_lose(
    repeating: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with drafts take longer than the costs say. So only few are tried, and later one of some hundred."""
    monkeypatch.setattr(StepCosts, "seconds", lambda *_: 1e-9)
    for host_time in ("_seconds_between", "_seconds_before_drafts"):
        monkeypatch.setattr(DraftCosts, host_time, lambda _: 0.0)
    engine = make_engine(repeating(), vocabulary, speculation="lookup", max_draft_tokens=2)
    for number in range(4):
        engine.add(str(number), PROMPT, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
        run(engine)
    stats = engine.stats()
    assert 0 < stats.drafted_tokens <= 2 * 6 < stats.steps - 300


@pytest.mark.parametrize("kind", ["device"])
def test_a_device_replays_steps_with_drafts_and_launches_the_others_ahead(
    repeating: Any,
    vocabulary: Any,
    make_engine: Callable[..., Engine],
    run: Any,
    any_chance: None,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Each draft is a row of its own, so such a step is a decode step.

    Where no draft pays, nothing waits for drafts.
    """
    stats = []
    for each in (0.0, 1.0):
        monkeypatch.setattr(StepCosts, "seconds", lambda _, tokens, each=each: 1.0 + each * tokens * tokens)
        model = repeating()
        engine = make_engine(model, vocabulary, speculation="lookup", max_num_seqs=2)
        engine.add("x", PROMPT, GREEDY)
        while engine.has_work:
            engine.step(lambda: True)
        stats.append(engine.stats())
        assert stats[-1].replayed_steps == stats[-1].steps - 1
        assert max(rows for rows, _ in model.steps) == (1 if each else 9)
    free, dear = stats
    assert free.accepted_tokens > 0 and free.steps < 24 and free.steps_ahead < free.steps - 1
    assert dear.drafted_tokens == 0 and dear.steps == 24 and dear.steps_ahead == 23


@pytest.mark.parametrize(
    "more",
    [{"logprobs": 1}, {"presence_penalty": 0.1}, {"min_tokens": 30}, {"logit_bias": {3: 1.0}}],
    ids=lambda more: next(iter(more)),
)
def test_requests_that_want_more_than_tokens_have_no_drafts(
    repeating: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, free_drafts: None, more: Any
) -> None:
    engine = make_engine(repeating(), vocabulary, speculation="lookup")
    engine.add("x", PROMPT, SamplingParams(temperature=0.0, max_tokens=30, **more))
    run(engine)
    assert engine.stats().drafted_tokens == 0


@pytest.mark.parametrize("batch_invariant", [False, None])
def test_drafts_need_a_cpu_that_computes_tokens_alike(
    repeating: Any,
    vocabulary: Any,
    make_engine: Callable[..., Engine],
    run: Any,
    free_drafts: None,
    batch_invariant: bool | None,
) -> None:
    engine = make_engine(repeating(), vocabulary, speculation="lookup", batch_invariant=batch_invariant)
    engine.add("x", PROMPT, GREEDY)
    run(engine)
    assert (engine.stats().drafted_tokens > 0) == (batch_invariant is None)


@pytest.fixture
def parts(request: pytest.FixtureRequest) -> str:
    callspec = getattr(request.node, "callspec", None)
    return str(callspec.params.get("kind", "host")) if callspec else "host"
