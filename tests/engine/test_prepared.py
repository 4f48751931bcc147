"""Steps that are prepared while the device is at the one before: when they are, and that nobody can tell."""

import random

import pytest

from ktqueue.core.request import JobClass, SamplingParams
from ktqueue.engine.outputs import EmittedChoice

PROMPT = [5, 9, 2, 44, 17, 3, 80, 21, 9]


@pytest.fixture
def parts():
    return "device"


def greedily(count, **more):
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **more)


def prepared(engine, steps=1):
    """How many of the next steps were prepared."""
    before = engine.stats().prepared_steps
    for _ in range(steps):
        engine.step()
    return engine.stats().prepared_steps - before


def random_sampling(noise, name):
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


def lives(engine, seed, model):
    """Every step's outputs over a random workload: bursts, prompts in chunks, aborts, faults, resumed choices."""
    noise = random.Random(seed)
    bad = noise.randrange(96)
    model.poison = lambda context: len(context) > 9 and context[-1] == context[-2] == bad
    stems = [[noise.randrange(96) for _ in range(25)] for _ in range(3)]
    told, todo = [], 20
    while todo or engine.has_work:
        while todo and noise.random() < 0.25:
            todo -= 1
            prompt = noise.choice(stems)[: noise.randint(0, 25)] + [noise.randrange(96) for _ in range(3)]
            sampling = random_sampling(noise, todo)
            emitted = ()
            if noise.random() < 0.2 and sampling.max_tokens > 4:
                emitted = [EmittedChoice(token_ids=(1, 2, 3)) for _ in range(noise.randint(1, sampling.n))]
            engine.add(
                str(todo),
                prompt,
                sampling,
                job_class=noise.choice([JobClass.BATCH, JobClass.INTERACTIVE, JobClass.INTERACTIVE]),
                emitted=emitted,
            )
        if noise.random() < 0.04:
            engine.abort(str(noise.randint(todo, 20)))
        told.append(engine.step())
        engine.check()
    stats = engine.stats()
    assert stats.free_pages == stats.total_pages and stats.running == stats.waiting == 0
    return told, stats


@pytest.mark.parametrize("pages", [400, 18])
@pytest.mark.parametrize("seed", range(5))
def test_nobody_can_tell(make_model, vocabulary, make_engine, monkeypatch, seed, pages):
    """Step by step the same tokens, text, log probabilities and ends, in the same order."""
    answers = []
    for ahead in (True, False):
        model = make_model()
        engine = make_engine(
            model,
            vocabulary,
            num_pages=pages,
            max_model_len=60,
            max_num_seqs=7,
            max_num_batched_tokens=16,
            cuda_graphs=seed % 3 < 2,
            enable_prefix_caching=seed % 2 == 0,
        )
        if not ahead:
            monkeypatch.setattr(engine, "_prepare", lambda: None)
        told, stats = lives(engine, seed, model)
        answers.append((told, stats.preemptions, model.steps, stats.prefix_hits))
        assert (stats.prepared_steps > 3) == ahead
        assert stats.preemptions > 0 or pages == 400
    assert answers[0] == answers[1]


def test_all_steps_that_only_decode_are_prepared(model, vocabulary, make_engine, monkeypatch, run, greedy):
    """Also that behind a prefill, and those that take new pages, be they free or kept for later; none in vain."""
    engine = make_engine(model, vocabulary, num_pages=24, max_num_seqs=4, max_num_batched_tokens=16)
    made = []
    prepare = engine._runner.prepare
    monkeypatch.setattr(engine._runner, "prepare", lambda batch: (made.append(batch), prepare(batch)))
    for turn in range(3):
        for i in range(3):
            engine.add(f"r{i}", [turn, i, 7], greedily(20))
        results = run(engine)
        assert all(results[f"r{i}", 0].token_ids == greedy([turn, i, 7], 20) for i in range(3))
    stats = engine.stats()
    assert stats.steps == 60 and stats.prepared_steps == stats.replayed_steps == len(made) == 57


def test_who_comes_or_goes_changes_the_next_step(model, vocabulary, make_engine, run, greedy):
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


def test_a_stop_string_ends_a_row_that_was_prepared(model, vocabulary, make_engine, run, greedy):
    text = "".join(vocabulary.token_bytes(token).decode() for token in greedy(PROMPT, 9))
    engine = make_engine(model, vocabulary)
    engine.add("ends", PROMPT, greedily(30, stop=(text[6:9],)))
    engine.add("stays", PROMPT[:4], greedily(12))
    results = run(engine)
    assert results["ends", 0].text == text[:6] and len(results["ends", 0].token_ids) == 9
    assert results["stays", 0].token_ids == greedy(PROMPT[:4], 12)
    assert engine.stats().prepared_steps == 12 - 1 - 1  # not the prompts', not the one behind the stop


def test_who_waits_for_a_seat_holds_nothing_up(model, vocabulary, make_engine, run):
    engine = make_engine(model, vocabulary, max_num_seqs=2)
    for i in range(4):
        engine.add(f"r{i}", [i], greedily(9))
    engine.step()
    assert prepared(engine, 5) == 5
    run(engine)


def test_what_needs_more_than_a_free_page_is_not_prepared(model, vocabulary, make_engine, run, greedy):
    """Two rows have all pages; then one has to give way, which only the scheduler itself decides."""
    engine = make_engine(model, vocabulary, num_pages=6, enable_prefix_caching=False)
    for i in range(2):
        engine.add(f"r{i}", [i, 1, 2, 3], greedily(16))
    results = run(engine)
    assert engine.stats().preemptions > 0
    assert all(results[f"r{i}", 0].token_ids == greedy([i, 1, 2, 3], 16) for i in range(2))


@pytest.mark.parametrize("parts", ["host"])
def test_the_host_s_parts_prepare_nothing(model, vocabulary, make_engine, run, parts):
    engine = make_engine(model, vocabulary)
    engine.add("x", PROMPT, greedily(9))
    run(engine)
    assert engine.stats().prepared_steps == 0
