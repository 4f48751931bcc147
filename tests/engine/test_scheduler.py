"""The scheduler under random arrivals and aborts, and a test for each of its rules."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ktqueue.core.request import JobClass, SamplingParams
from ktqueue.core.tenants import NOBODY, Owner
from ktqueue.engine.engine import Engine

BATCH, INTERACTIVE = JobClass.BATCH, JobClass.INTERACTIVE


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def continue_greedily(scores: Any, prompt: Any, count: Any) -> Any:
    context = list(prompt)
    for _ in range(count):
        context.append(int(np.argmax(scores(context))))
    return context[len(prompt) :]


@pytest.mark.parametrize("seed", range(24))
def test_random_requests_get_the_right_tokens(
    make_model: Any,
    vocabulary: Any,
    make_engine: Callable[..., Engine],
    run: Any,
    gather_outputs: Any,
    scores: Any,
    seed: int,
) -> None:
    """With random classes, aborts and small caches, every request that is not aborted gets the right tokens."""
    noise = random.Random(seed)
    clock = Clock()
    seats, budget = noise.randint(2, 9), noise.choice([3, 8, 17, 100])
    pages, page_size = noise.randint(8, 30), noise.choice([1, 2, 4, 8])
    capacity = min(pages * page_size, 60)
    model = make_model()
    engine = make_engine(
        model,
        vocabulary,
        num_pages=pages,
        max_model_len=capacity,
        page_size=page_size,
        clock=clock,
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        enable_prefix_caching=noise.random() < 0.7,
        batch_share=noise.choice([1, 3, 1000]),
    )
    has_owners = seed % 2 == 1
    owners = (Owner("a"), Owner("b", "x", 2), Owner("b", "y", 2))
    asked: dict[str, Any] = {}
    results: dict[tuple[str, int], Any] = {}
    aborted: set[str] = set()
    stems = [[noise.randrange(96) for _ in range(20)] for _ in range(3)]
    todo = noise.randint(10, 25)
    steps = 0
    while todo or engine.has_work:
        if todo and noise.random() < 0.5:
            todo -= 1
            stem = noise.choice(stems)[: noise.randint(0, 20)]
            prompt = (stem + [noise.randrange(96) for _ in range(noise.randint(1, 12))])[: capacity - 1]
            count = noise.randint(1, 14)
            n = noise.choice([1, 1, 1, 2, min(4, seats, budget)])
            temperature = 0.0 if n == 1 else 1.0
            name = f"r{todo}"
            sampling = SamplingParams(temperature=temperature, max_tokens=count, n=n, seed=todo, ignore_eos=True)
            asked[name] = (prompt, sampling, min(count, capacity - len(prompt)))
            owner = owners[noise.choice([0, 0, 0, 1, 2])] if has_owners else NOBODY
            engine.add(name, prompt, sampling, job_class=noise.choice([BATCH, INTERACTIVE]), owner=owner)
        if asked and noise.random() < 0.05:
            name = noise.choice(sorted(asked))
            engine.abort(name)
            aborted.add(name)
        clock.now += noise.random()
        gather_outputs(results, engine.step())
        engine.check()
        steps += 1
        assert steps < 3000, "a request starves"
    stats = engine.stats()
    assert stats.free_pages == stats.total_pages == pages
    assert stats.running == stats.waiting == 0
    assert max(tokens for _, tokens in model.steps) <= budget and max(rows for rows, _ in model.steps) <= seats
    for name, (prompt, sampling, count) in asked.items():
        if name in aborted:
            continue
        alone = make_engine(make_model(), vocabulary)
        alone.add("x", prompt, sampling)
        expected = run(alone)
        for index in range(sampling.n):
            result = results[name, index]
            assert result.error is None and len(result.token_ids) == count
            assert result.token_ids == expected["x", index].token_ids[:count]
            if sampling.n == 1:
                assert result.token_ids == continue_greedily(scores, prompt, count)


def names(outputs: Any) -> Any:
    return {output.request_id for output in outputs if output.token_ids}


def test_a_long_prompt_never_delays_decode_rows(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(model, vocabulary, max_num_batched_tokens=10, num_pages=64)
    for i in range(4):
        engine.add(f"d{i}", [i], SamplingParams(max_tokens=50, ignore_eos=True))
    engine.step()
    engine.add("long", list(range(60)), SamplingParams(max_tokens=50))
    for _ in range(9):
        assert names(engine.step()) == {"d0", "d1", "d2", "d3"}
        assert model.steps[-1] == (5, 10)
    assert names(engine.step()) == {"d0", "d1", "d2", "d3", "long"}


def test_interactive_requests_go_first_and_take_rows_from_batch(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any
) -> None:
    clock = Clock()
    engine = make_engine(model, vocabulary, max_num_seqs=2, clock=clock)
    for i in range(3):
        engine.add(f"b{i}", [i], SamplingParams(max_tokens=30, ignore_eos=True), job_class=BATCH)
    assert names(engine.step()) == {"b0", "b1"}
    clock.now += 1
    engine.add("i0", [7], SamplingParams(max_tokens=5, ignore_eos=True))
    assert names(engine.step()) == {"b0", "i0"}, "the youngest request of the lowest class loses its row"
    assert engine.stats().preemptions == 1
    engine.add("i1", [8], SamplingParams(max_tokens=5, ignore_eos=True))
    engine.add("i2", [9], SamplingParams(max_tokens=5, ignore_eos=True))
    assert names(engine.step()) == {"b0", "i0"}, "no row is taken from the same class, and batch keeps one"
    run(engine)


def test_batch_keeps_its_rows(model: Any, vocabulary: Any, make_engine: Callable[..., Engine]) -> None:
    """With `batch_share` 4, the oldest batch requests keep two of 8 rows, and the next batch requests inherit them."""
    clock = Clock()
    engine = make_engine(model, vocabulary, max_num_seqs=8, num_pages=400, clock=clock, batch_share=4)
    for i in range(8):
        clock.now += 1
        engine.add(f"b{i}", [i], SamplingParams(max_tokens=5 if i < 2 else 90, ignore_eos=True), job_class=BATCH)
    assert len(names(engine.step())) == 8
    for i in range(9):  # more requests than rows
        clock.now += 1
        engine.add(f"i{i}", [i], SamplingParams(max_tokens=90, ignore_eos=True))
    assert names(engine.step()) == {"b0", "b1", *(f"i{i}" for i in range(6))}
    assert engine.stats().preemptions == 6
    for _ in range(3):
        assert names(engine.step()) >= {"b0", "b1"}
    assert names(engine.step()) == {"b2", "b3", *(f"i{i}" for i in range(6))}
    for _ in range(50):
        assert names(engine.step()) == {"b2", "b3", *(f"i{i}" for i in range(6))}


def test_the_earliest_arrival_goes_first_even_if_it_was_added_later(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(model, vocabulary, max_num_seqs=3, batch_share=3)
    for name, arrival in (("b5", 5.0), ("b3", 3.0), ("b4", 4.0)):
        engine.add(name, [1], SamplingParams(max_tokens=50, ignore_eos=True), job_class=BATCH, arrival=arrival)
    assert names(engine.step()) == {"b3", "b4", "b5"}
    engine.add("i", [1], SamplingParams(max_tokens=50, ignore_eos=True), arrival=9.0)
    assert names(engine.step()) == {"b3", "b4", "i"}


def test_nothing_is_preempted_for_a_request_that_still_could_not_run(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(model, vocabulary, max_num_seqs=4, batch_share=4)
    for i in range(4):
        engine.add(f"b{i}", [i], SamplingParams(max_tokens=8, ignore_eos=True), job_class=BATCH)
    engine.step()
    engine.add("wide", [9], SamplingParams(n=4, max_tokens=8, ignore_eos=True))
    assert len(names(engine.step())) == 4
    assert engine.stats().preemptions == 0


@pytest.mark.parametrize("caching", [True, False])
def test_the_youngest_sequence_of_the_lowest_class_is_preempted(
    model: Any,
    vocabulary: Any,
    make_engine: Callable[..., Engine],
    run: Any,
    gather_outputs: Any,
    scores: Any,
    caching: bool,
) -> None:
    """Three sequences of at last 5 pages, and one of 4 in the row that batch keeps, share 13 pages.

    The youngest sequence of the lowest class is preempted, the oldest never.
    """
    clock = Clock()
    engine = make_engine(model, vocabulary, num_pages=13, clock=clock, enable_prefix_caching=caching, max_num_seqs=4)
    prompts = {"kept": [1], "batch": [1, 2, 3], "old": [4, 5, 6], "young": [7, 8, 9]}
    results: dict[tuple[str, int], Any] = {}
    waits = dict.fromkeys(prompts, 0)
    for name, prompt in prompts.items():
        clock.now += 1
        greedy = SamplingParams(temperature=0.0, max_tokens=15 if name == "kept" else 16)
        engine.add(name, prompt, greedy, job_class=BATCH if name in ("kept", "batch") else INTERACTIVE)
    while engine.has_work:
        outputs = engine.step()
        gather_outputs(results, outputs)
        engine.check()
        for name in waits:
            if name not in names(outputs) and not ((name, 0) in results and results[name, 0].ended):
                waits[name] += 1
    assert waits["kept"] == waits["old"] == 0 and waits["young"] <= waits["batch"] and waits["batch"] > 0
    assert engine.stats().preemptions > 0
    for name, prompt in prompts.items():
        assert results[name, 0].token_ids == continue_greedily(scores, prompt, 15 if name == "kept" else 16)


def test_cached_pages_are_not_counted_as_room_twice(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any
) -> None:
    """Of 8 pages 4 run, and 4 idle pages hold the prefix of a prompt of 6 pages. They leave no room for the other 2."""
    engine = make_engine(model, vocabulary, num_pages=8)
    head = list(range(16))
    engine.add("before", [*head, 1], SamplingParams(max_tokens=1))
    run(engine)
    engine.add("running", [40] * 15, SamplingParams(max_tokens=5, ignore_eos=True))
    engine.step()
    engine.add("after", head + [50] * 6, SamplingParams(max_tokens=1))
    engine.step()
    assert engine.stats().waiting == 1 and engine.stats().running == 1
    result = run(engine)["after", 0]
    assert result.usage.cached_tokens >= 12 and len(result.token_ids) == 1


def test_no_pages_are_reserved_for_future_tokens(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine]
) -> None:
    """Eight requests that could grow to 100 tokens each run at once on pages for 64 tokens."""
    engine = make_engine(model, vocabulary, num_pages=16, max_num_seqs=8)
    for i in range(8):
        engine.add(f"r{i}", [i, i], SamplingParams(max_tokens=100))
    assert len(names(engine.step())) == 8
    assert engine.stats().free_pages == 8 and engine.stats().preemptions == 0


def test_a_long_prompt_is_not_overtaken_for_ever_by_short_prompts(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], gather_outputs: Any
) -> None:
    engine = make_engine(model, vocabulary, num_pages=16, max_num_seqs=8, max_num_batched_tokens=16)
    results: dict[Any, Any] = {}
    for step in range(400):
        if step == 20:
            engine.add("big", list(range(60)), SamplingParams(max_tokens=2, ignore_eos=True))
        engine.add(f"s{step}", [step % 90] * 7, SamplingParams(max_tokens=3, ignore_eos=True))
        gather_outputs(results, engine.step())
        if ("big", 0) in results and results["big", 0].ended:
            return
    raise AssertionError("the big prompt starved")


def test_each_choice_takes_a_row(model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any) -> None:
    engine = make_engine(model, vocabulary, max_num_seqs=8)
    assert not engine.has_work
    engine.add("a", [1], SamplingParams(n=3, max_tokens=4, ignore_eos=True))
    assert engine.has_work
    engine.step()
    assert engine.stats().running == 3
    engine.add("b", [1], SamplingParams(n=6, max_tokens=4, ignore_eos=True))
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (3, 6)
    run(engine)


def once(count: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


@pytest.mark.parametrize(
    "job_class, length, sits_out",
    [(BATCH, 4, True), (BATCH, 3, False), (INTERACTIVE, 256, True), (INTERACTIVE, 252, False)],
)
def test_a_prefix_of_requests_that_arrive_together_is_computed_once(
    model: Any,
    vocabulary: Any,
    make_engine: Callable[..., Engine],
    run: Any,
    greedy: Any,
    job_class: JobClass,
    length: int,
    sits_out: bool,
) -> None:
    """The others sit out the step that computes it. Interactive requests do so only if it is long."""
    prefix = [i % 90 for i in range(length)]
    engine = make_engine(
        model, vocabulary, num_pages=2000, max_model_len=300, max_num_seqs=20, max_num_batched_tokens=8000
    )
    prompts = {f"r{i}": [*prefix, i, i + 1, i + 2] for i in range(20)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, once(), job_class=job_class)
    results = run(engine)
    assert model.steps == ([(1, length + 3), (19, 57)] if sits_out else [(20, 20 * (length + 3))])
    for name, prompt in prompts.items():
        assert results[name, 0].token_ids == greedy(prompt, 1)
        assert results[name, 0].usage.cached_tokens == (length if sits_out and name != "r0" else 0)


def test_each_prompt_is_computed_from_its_own_longest_prefix(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any
) -> None:
    """Requests that share some of a long prompt join as soon as its next chunk has nothing more for them."""
    engine = make_engine(model, vocabulary, num_pages=2000, max_num_batched_tokens=30, max_num_seqs=8)
    long = [i % 90 for i in range(80)]
    prompts = {"long": long, "some": [*long[:20], 1], "half": [*long[:41], 2], "most": [*long[:79], 3]}
    for name, prompt in prompts.items():
        engine.add(name, prompt, once(), job_class=BATCH)
    results = run(engine)
    assert model.computed_tokens == 80 + 1 + 2 + 4
    assert all(results[name, 0].token_ids == greedy(prompt, 1) for name, prompt in prompts.items())


def test_a_request_that_sits_out_keeps_its_place(
    make_model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any
) -> None:
    """A later request takes neither its row nor its pages, and no long prompt gets in between."""
    prefix = list(range(40))
    for settings, length, together in (
        ({"max_num_seqs": 2}, 5, False),
        ({"max_num_seqs": 3}, 5, True),
        ({"num_pages": 13}, 5, False),  # of which the requests need 11, 1 and 2
        ({"num_pages": 14}, 5, True),
        ({"max_num_batched_tokens": 47}, 100, False),
        ({"max_num_batched_tokens": 48}, 5, True),
    ):
        engine = make_engine(make_model(), vocabulary, **settings)
        engine.add("first", [*prefix, 1, 2, 3], once(9), job_class=BATCH)
        engine.add("second", [*prefix, 4, 5, 6], once(9), job_class=BATCH)
        engine.add("later", [50] * length, once(9), job_class=BATCH)
        assert names(engine.step()) == ({"first", "later"} if together else {"first"}), settings
        engine.check()
        assert names(engine.step()) >= {"first", "second"}, settings
        run(engine)


def test_prompts_of_a_batch_fill_steps(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any
) -> None:
    """Groups of five share a prefix of ten pages. Each is computed once, and steps are full nevertheless."""
    noise = random.Random(0)
    engine = make_engine(model, vocabulary, num_pages=8000, max_num_seqs=300, max_num_batched_tokens=512)
    tokens = 0
    for group in range(60):
        prefix = [noise.randrange(96) for _ in range(40)]
        tokens += 40
        for line in range(5):
            tail = [group, line, *(noise.randrange(96) for _ in range(noise.randrange(20)))]
            tokens += len(tail)
            engine.add(f"{group}-{line}", [*prefix, *tail], once(), job_class=BATCH)
    run(engine)
    assert model.computed_tokens == tokens
    assert min(tokens for _, tokens in model.steps[:-2]) > 512 - 62, "the longest prompt has 62 tokens"
