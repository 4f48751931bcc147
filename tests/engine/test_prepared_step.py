"""Steps that are prepared while the device is at the one before: when they are, and that nobody can tell."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from ktqueue.core.request import JobClass, SamplingParams
from ktqueue.engine.engine import Engine
from ktqueue.engine.outputs import EmittedChoice

PROMPT = [5, 9, 2, 44, 17, 3, 80, 21, 9]


@pytest.fixture
def parts() -> Any:
    return "device"


def greedily(count: Any, **more: Any) -> Any:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **more)


def prepared(engine: Any, steps: Any = 1) -> Any:
    """How many of the next steps were prepared."""
    before = engine.stats().prepared_steps
    for _ in range(steps):
        engine.step()
    return engine.stats().prepared_steps - before


def random_sampling(noise: Any, name: Any) -> Any:
    """Any mix of what may end, edit, fork or tell of a choice."""
    given = {"temperature": noise.choice([0.0, 0.7, 1.0]), "max_tokens": noise.randint(3, 20), "seed": name}
    for chance, more in (
        (0.2, {"stop": ("5", "AB")}),
        (0.3, {"stop_token_ids": tuple(noise.sample(range(96), 8))}),
        (0.2, {"top_p": 0.8, "top_k": 9}),
        (0.2, {"min_tokens": 3, "logit_bias": {7: 4.0, 96: 6.0}}),
        (0.2, {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}),
        (0.2, {"logprobs": 2}),
        (0.5, {"ignore_eos": True}),
    ):
        if noise.random() < chance:
            given |= more
    if given["temperature"]:
        given["n"] = noise.choice([1, 1, 2, 3])
    return SamplingParams(**given)


def workload(seed: Any) -> Any:
    """What happens before each step: names to abort, requests to add. In bursts, resumed ones among them."""
    noise = random.Random(seed)
    stems = [[noise.randrange(96) for _ in range(25)] for _ in range(3)]
    turns, names = [], list(range(20))
    while names:
        adds = []
        while names and noise.random() < 0.25:
            prompt = noise.choice(stems)[: noise.randint(0, 25)] + [noise.randrange(96) for _ in range(3)]
            sampling = random_sampling(noise, names[0])
            emitted: list[EmittedChoice] = []
            if noise.random() < 0.2 and sampling.max_tokens > 4:
                emitted = [EmittedChoice(token_ids=(1, 2, 3)) for _ in range(noise.randint(1, sampling.n))]
            kind = noise.choice([JobClass.BATCH, JobClass.INTERACTIVE, JobClass.INTERACTIVE])
            adds.append((str(names.pop(0)), prompt, sampling, kind, emitted))
        turns.append(([str(noise.randrange(20))] if noise.random() < 0.06 else [], adds))
    return turns


def lives(engine: Any, turns: Any, go_on: Any = lambda: False) -> Any:
    """Every step's outputs."""
    told = []
    turns = list(turns)
    while turns or engine.has_work:
        aborts, adds = turns.pop(0) if turns else ((), ())
        for name in aborts:
            engine.abort(name)
        for name, prompt, sampling, kind, emitted in adds:
            engine.add(name, prompt, sampling, job_class=kind, emitted=emitted)
        told.append(engine.step(go_on))
        engine.check()
    stats = engine.stats()
    assert stats.free_pages == stats.total_pages and stats.running == stats.waiting == 0
    return told


@pytest.fixture
def make_crowded(make_model: Any, vocabulary: Any, make_engine: Callable[..., Engine]) -> Any:
    """An engine for a workload, over a model that gives some of its contexts no numbers."""

    def make(seed: Any, pages: Any) -> Any:
        model = make_model()
        model.poison = lambda context: len(context) > 9 and context[-1] in (9 + seed, 50 + seed)
        return make_engine(
            model,
            vocabulary,
            num_pages=pages,
            max_model_len=60,
            max_num_seqs=7,
            max_num_batched_tokens=16,
            cuda_graphs=seed % 3 < 2,
            enable_prefix_caching=seed % 2 == 0,
        )

    return make


@pytest.mark.parametrize("pages", [400, 18])
@pytest.mark.parametrize("seed", range(4))
def test_nobody_can_tell(make_crowded: Any, monkeypatch: pytest.MonkeyPatch, seed: int, pages: int) -> None:
    """Step by step the same tokens, text, log probabilities and ends, in the same order."""
    answers = []
    for ahead in (True, False):
        engine = make_crowded(seed, pages)
        if not ahead:
            monkeypatch.setattr(engine, "_prepare_next_step", lambda: None)
        told = lives(engine, workload(seed))
        stats = engine.stats()
        answers.append((told, stats.steps, stats.preemptions, stats.prefix_hits))
        assert (stats.prepared_steps > 2) == ahead
        assert stats.preemptions > 0 or pages == 400
    assert answers[0] == answers[1]


@pytest.mark.parametrize("pages", [400, 18])
@pytest.mark.parametrize("seed", [0, 1, 3])  # those with graphs
def test_steps_that_are_launched_early_give_the_same(
    make_crowded: Any, gather_outputs: Any, seed: int, pages: int
) -> None:
    """Who comes meanwhile joins a step later, so steps differ; what each request gets does not."""
    turns = workload(seed)
    aborted = {name for aborts, _ in turns for name in aborts}
    noise, answers = random.Random(seed), []
    for go_on in (lambda: False, lambda: True, lambda: noise.random() < 0.5):
        results: dict[Any, Any] = {}
        for outputs in lives(make_crowded(seed, pages), turns, go_on):
            gather_outputs(results, outputs)
        answers.append(
            {
                key: (one.token_ids, one.text, one.logprobs, one.finish_reason, one.error)
                for key, one in results.items()
                if key[0] not in aborted
            }
        )
    assert answers[0] == answers[1] == answers[2]
    assert any(one[-1] is not None for one in answers[0].values())


def test_all_steps_that_only_decode_are_prepared(
    model: Any,
    vocabulary: Any,
    make_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    run: Any,
    greedy: Any,
) -> None:
    """Also that behind a prefill, and those that take new pages, be they free or kept for later; none in vain."""
    engine = make_engine(model, vocabulary, num_pages=24, max_num_seqs=4, max_num_batched_tokens=16)
    made: list[Any] = []
    prepare = engine._runner.prepare

    def recorded(batch: Any) -> Any:
        made.append(batch)
        return prepare(batch)

    monkeypatch.setattr(engine._runner, "prepare", recorded)
    for turn in range(3):
        for i in range(3):
            engine.add(f"r{i}", [turn, i, 7], greedily(20))
        results = run(engine)
        assert all(results[f"r{i}", 0].token_ids == greedy([turn, i, 7], 20) for i in range(3))
    stats = engine.stats()
    assert stats.steps == 60 and stats.prepared_steps == stats.replayed_steps == len(made) == 57


def test_who_comes_or_goes_changes_the_next_step(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any
) -> None:
    engine = make_engine(model, vocabulary, max_num_seqs=4)
    engine.add("a", PROMPT, greedily(30))
    engine.add("b", PROMPT[:5], greedily(30))
    engine.step()
    assert prepared(engine, 3) == 3
    engine.add("c", PROMPT[:3], greedily(30))
    assert prepared(engine) == 0 and prepared(engine, 2) == 2
    engine.abort("b")
    assert prepared(engine) == 0 and prepared(engine, 2) == 2
    assert model.steps[-4:] == [(3, 3), (2, 2), (2, 2), (2, 2)]
    engine.abort("unknown")
    assert prepared(engine) == 1
    results = run(engine)
    assert results["a", 0].token_ids == greedy(PROMPT, 30)[-len(results["a", 0].token_ids) :]
    assert results["c", 0].token_ids == greedy(PROMPT[:3], 30)[-len(results["c", 0].token_ids) :]


def test_a_stop_string_ends_a_row_that_was_prepared(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any
) -> None:
    text = "".join(vocabulary.token_bytes(token).decode() for token in greedy(PROMPT, 9))
    engine = make_engine(model, vocabulary)
    engine.add("ends", PROMPT, greedily(30, stop=(text[6:9],)))
    engine.add("stays", PROMPT[:4], greedily(12))
    results = run(engine)
    assert results["ends", 0].text == text[:6] and len(results["ends", 0].token_ids) == 9
    assert results["stays", 0].token_ids == greedy(PROMPT[:4], 12)
    assert engine.stats().prepared_steps == 12 - 1 - 1  # not the prompts', not the one behind the stop


def test_who_waits_for_a_seat_holds_nothing_up(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any
) -> None:
    engine = make_engine(model, vocabulary, max_num_seqs=2)
    for i in range(4):
        engine.add(f"r{i}", [i], greedily(9))
    engine.step()
    assert prepared(engine, 5) == 5
    run(engine)


def test_what_needs_more_than_a_free_page_is_not_prepared(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any
) -> None:
    """Two rows have all pages; then one has to give way, which only the scheduler itself decides."""
    engine = make_engine(model, vocabulary, num_pages=6, enable_prefix_caching=False)
    for i in range(2):
        engine.add(f"r{i}", [i, 1, 2, 3], greedily(16))
    results = run(engine)
    assert engine.stats().preemptions > 0
    assert all(results[f"r{i}", 0].token_ids == greedy([i, 1, 2, 3], 16) for i in range(2))


@pytest.mark.parametrize("parts", ["host"])
def test_the_host_s_parts_prepare_nothing(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, parts: str
) -> None:
    engine = make_engine(model, vocabulary)
    engine.add("x", PROMPT, greedily(9))
    run(engine)
    assert engine.stats().prepared_steps == 0


def test_a_step_that_is_launched_early_goes_on_without_those_who_left(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any
) -> None:
    engine = make_engine(model, vocabulary, max_num_seqs=4)
    for i in range(3):
        engine.add(f"r{i}", PROMPT[: 3 + i], greedily(20, logprobs=1))
    engine.step()
    told = engine.step(lambda: True)
    assert len(model.steps) == 3, "one more than was told of"
    engine.abort("r1")
    engine.add("late", PROMPT[:3], greedily(20))
    told += engine.step(lambda: True)
    assert len(model.steps) == 3, "nothing is launched when somebody came"
    assert [one.request_id for one in told] == ["r0", "r1", "r2", "r0", "r2"]
    results = run(engine)
    for name, prompt in (("r0", PROMPT[:3]), ("r2", PROMPT[:5]), ("late", PROMPT[:3])):
        expected = greedy(prompt, 20)
        assert results[name, 0].token_ids == expected[-len(results[name, 0].token_ids) :]
    assert len(results["late", 0].token_ids) == 20 and len(results["r0", 0].token_ids) == 17


def test_a_step_that_everybody_left_is_forgotten(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any
) -> None:
    engine = make_engine(model, vocabulary)
    engine.add("x", PROMPT, greedily(20))
    engine.step(lambda: True)
    engine.abort("x")
    assert not engine.has_work
    engine.add("y", PROMPT[:3], greedily(9))
    assert engine.step()[0].token_ids == tuple(greedy(PROMPT[:3], 1)), "nobody waits for it"
    assert run(engine)["y", 0].token_ids == greedy(PROMPT[:3], 9)[1:]
    engine.add("z", PROMPT[:4], greedily(9))
    engine.step(lambda: True)
    engine.close()


def test_a_step_that_follows_an_end_is_not_launched_early(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], greedy: Any
) -> None:
    end = greedy(PROMPT, 9)[-1]
    engine = make_engine(model, vocabulary)
    engine.add("ends", PROMPT, greedily(30, stop_token_ids=(end,)))
    engine.add("stays", PROMPT[:4], greedily(20))
    tokens = 0
    while engine.has_work:
        tokens += sum(len(one.token_ids) for one in engine.step(lambda: True))
    assert 20 < tokens <= 29 and model.computed_tokens == len(PROMPT) + 4 + tokens - 2, "nothing is computed in vain"


def test_nothing_is_launched_that_takes_time(model: Any, vocabulary: Any, make_engine: Callable[..., Engine]) -> None:
    """An eager step is prepared, but the caller would have to wait for its launch."""
    engine = make_engine(model, vocabulary, cuda_graphs=False)
    engine.add("x", PROMPT, greedily(20))
    for _ in range(3):
        engine.step(lambda: True)
    assert len(model.steps) == 3 and engine.stats().prepared_steps == 2
