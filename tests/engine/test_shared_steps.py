"""What steps cost, and how the batch class shares them with interactive sequences."""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from ktqueue.core.request import JobClass, SamplingParams
from ktqueue.engine.engine import Engine
from ktqueue.engine.shared_steps import PREFILL_SPACING, RECENT_SECONDS, SharedSteps
from ktqueue.engine.step_costs import StepCosts

BATCH = JobClass.BATCH


def hybrid(tokens: float) -> float:
    """Seconds of a step with experts on the CPU, about as measured: 10 ms for one token, 300 ms for 1,024."""
    return 0.010 * min(tokens, 8) + 0.00022 * max(0.0, tokens - 8)


def learnt(cost: Callable[[float], float] = hybrid, most: int = 8192, upto: int = 1024) -> StepCosts:
    costs = StepCosts(most)
    tokens = 1
    while tokens <= upto:
        costs.observe(tokens, cost(tokens))
        tokens *= 2
    return costs


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_costs_are_estimated_between_and_beyond_the_sizes_that_were_observed() -> None:
    costs = learnt()
    assert costs.seconds(1) == pytest.approx(0.010)
    assert costs.seconds(700) == pytest.approx(hybrid(700), rel=0.02)
    assert costs.seconds(2048) == pytest.approx(2 * hybrid(1024))
    assert costs.most_tokens(0.150) == pytest.approx(326, abs=8)
    assert costs.most_tokens(0.005) == 0
    assert costs.most_tokens(1e9) == 8192


def test_without_observations_every_step_is_free() -> None:
    costs = StepCosts(512)
    assert (costs.seconds(100), costs.most_tokens(0.001), costs.best_tokens()) == (0.0, 512, 512)


def test_one_slow_step_changes_little() -> None:
    costs = learnt()
    before = costs.seconds(64)
    for seconds in (before, before, before, 9.0):
        costs.observe(64, seconds)
    assert costs.seconds(64) == pytest.approx(before)


def test_rows_are_wanted_as_long_as_they_raise_the_tokens_of_a_second() -> None:
    assert learnt().best_tokens() == 8192, "the largest step that was observed is the fastest"
    flat = learnt(lambda tokens: 0.001 * max(tokens, 64))
    assert flat.best_tokens() == 64, "more rows take proportionally longer"


def test_a_size_that_was_slow_for_a_moment_is_tried_again() -> None:
    clock = Clock()
    costs = StepCosts(8192, clock)

    def observe(tokens: int, seconds: float) -> None:
        for _ in range(5):
            costs.observe(tokens, seconds)

    for tokens in (64, 128, 256, 512):
        observe(tokens, 0.1 if tokens == 64 else 1.0)
    assert costs.best_tokens() == 64
    for _ in range(70):
        clock.now += 1.0
        costs.observe(64, 0.1)
    assert costs.best_tokens() == 128, "nobody knows whether it is still slow"
    observe(128, 0.4)
    assert costs.best_tokens() == 64, "it is"
    clock.now += 61.0
    observe(128, 0.11)
    assert costs.best_tokens() == 256
    observe(256, 0.12)
    observe(512, 0.13)
    assert costs.best_tokens() == 8192


@pytest.mark.parametrize("seed", range(20))
def test_estimates_stay_within_what_was_observed(seed: int) -> None:
    noise = random.Random(seed)
    costs = StepCosts(4096)
    seen = [(noise.randint(1, 4096), noise.uniform(0.001, 1.0)) for _ in range(noise.randint(1, 60))]
    for tokens, seconds in seen:
        costs.observe(tokens, seconds)
    sizes, times = [point[0] for point in costs.points], [point[1] for point in costs.points]
    assert sizes == sorted(sizes)
    for size in range(1, 4097, 37):
        estimate = costs.seconds(size)
        assert min(times) - 1e-9 <= estimate <= max(times) * max(1.0, size / sizes[-1]) + 1e-9
        assert 0 <= costs.most_tokens(estimate) <= 4096
    assert 1 <= costs.best_tokens() <= 4096


def shares(shared: SharedSteps, tokens: int, steps: int = 400) -> tuple[float, list[bool]]:
    """Run steps, the small ones of `tokens` tokens. Returns the time share of shared steps, and which these are."""
    seconds = {True: 0.0, False: 0.0}
    taken = []
    for _ in range(steps):
        is_shared = shared.is_due(tokens)
        size = shared.most_tokens(1) if is_shared else tokens
        shared.record(size, interactive=True, is_shared=is_shared)
        seconds[is_shared] += hybrid(size)
        taken.append(is_shared)
    return seconds[True] / sum(seconds.values()), taken


@pytest.mark.parametrize("interactive_share", [0.0, 0.15, 0.5])
def test_small_steps_get_their_share_of_the_time(interactive_share: float) -> None:
    shared = SharedSteps(learnt(), 0.25, interactive_share, clock=Clock())
    of_shared, taken = shares(shared, 1)
    assert of_shared == pytest.approx(1 - interactive_share, abs=0.04)
    assert any(taken) and (all(taken) == (interactive_share == 0.0))


def test_a_prompt_that_fills_a_shared_step_is_computed_in_a_step_of_its_own() -> None:
    of_shared, taken = shares(SharedSteps(learnt(), 0.25, 0.15, clock=Clock()), 2048)
    assert taken == [bool(place % 2) for place in range(400)] and 0.2 < of_shared < 0.4


def test_a_shared_step_comes_after_24_small_steps_at_the_latest() -> None:
    shared = SharedSteps(learnt(lambda tokens: 0.0001 if tokens < 64 else 0.2), 0.25, 0.5, clock=Clock())
    taken = shares(shared, 1)[1]
    assert [place for place, is_shared in enumerate(taken) if is_shared][:3] == [24, 49, 74]


def test_steps_stay_short_after_an_interactive_request() -> None:
    clock = Clock()
    shared = SharedSteps(learnt(), 0.25, 0.15, clock=clock)
    assert shared.most_tokens(0) == 8192, "nobody waits"
    shared.record(1, interactive=True, is_shared=False)
    assert shared.most_tokens(1) == pytest.approx(780, abs=10)
    assert shared.most_tokens(0) == shared.most_tokens(1), "an interactive request may arrive again soon"
    assert shared.free_tokens(1) == 0, "a second row would double the time of a small step"
    assert shared.free_tokens(512) == pytest.approx(80, abs=10)
    clock.now += RECENT_SECONDS
    assert shared.most_tokens(0) == 8192


def test_a_slow_machine_still_gives_the_batch_class_a_row() -> None:
    shared = SharedSteps(learnt(lambda tokens: 2.0 * tokens), 0.25, 0.15, clock=Clock())
    assert shared.most_tokens(1) == 2
    shared.record(1, interactive=True, is_shared=False)
    assert shared.most_tokens(0) == 2


@pytest.mark.parametrize(("prompt", "longest"), [(0.05, 0.2), (0.15, 0.3), (0.9, 0.4)])
def test_the_longest_step_follows_from_that_of_a_short_prompt(prompt: float, longest: float) -> None:
    shared = SharedSteps(learnt(lambda tokens: prompt * tokens / 128), None, 0.05, clock=Clock())
    assert shared.longest_step == pytest.approx(longest)
    shared.record(1, interactive=True, is_shared=False)
    assert shared.most_tokens(1) == pytest.approx(128 * longest / prompt, rel=0.02)


def test_old_costs_of_larger_steps_are_measured_again() -> None:
    """Steps of more than 256 tokens took a second each, and have become as fast as the others."""
    costs = learnt(lambda tokens: 0.0005 * tokens if tokens <= 256 else 1.0)
    shared = SharedSteps(costs, 0.2, 0.0, clock=Clock())
    shared.record(1, interactive=True, is_shared=False)
    assert shared.most_tokens(1) < 320
    for _ in range(400):
        tokens = shared.most_tokens(1)
        shared.record(tokens, interactive=True, is_shared=True)
        costs.observe(tokens, 0.0005 * tokens)
    assert 380 < shared.most_tokens(1) < 405


def test_steps_that_take_longer_than_estimated_are_made_smaller() -> None:
    clock = Clock()
    shared = SharedSteps(learnt(), 0.2, 0.0, clock=clock)
    for _ in range(10):
        tokens = shared.most_tokens(1)
        shared.record(tokens, interactive=True, is_shared=True)
        clock.now += 1.4 * hybrid(tokens)
    assert 1.4 * hybrid(shared.most_tokens(1)) == pytest.approx(0.2, rel=0.03)
    clock.now += 60.0
    shared.record(1, interactive=False, is_shared=True)
    assert 1.4 * hybrid(shared.most_tokens(1)) == pytest.approx(0.2, rel=0.03), "one pause changes little"


@pytest.fixture(params=["host", "device"])
def parts(request: pytest.FixtureRequest) -> Any:
    return request.param


def started(engine: Engine, costs: StepCosts) -> None:
    """Replace what the engine has learnt. It goes on learning nothing."""
    engine.costs.points, engine.costs._middles, engine.costs._observed = costs.points, costs._middles, costs._observed
    engine.costs.observe = lambda tokens, seconds: None  # type: ignore[method-assign]


def test_an_interactive_request_decodes_as_if_alone_while_a_batch_goes_on(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any, parts: str
) -> None:
    """Steps take as long as with experts on the CPU. All tokens are right, and prepared steps are the planned ones."""
    engine = make_engine(
        model,
        vocabulary,
        num_pages=800,
        max_num_seqs=25,
        max_num_batched_tokens=128,
        interactive_step_ms=20,
        interactive_share=0.9,
        cuda_graphs=parts == "device",
    )
    started(engine, learnt(most=128, upto=128))
    for i in range(24):
        long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        engine.add(f"b{i}", [i, 1], long, job_class=BATCH)
    engine.step()
    assert model.steps[-1][0] == 24, "without interactive requests all rows run"
    engine.add("chat", [7, 8, 9], SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
    rows: list[int] = []
    answer: list[int] = []
    while len(answer) < 64:
        for output in engine.step(lambda: True):
            answer += output.token_ids if output.request_id == "chat" else ()
        rows.append(model.steps[-1][0])
        engine.check()
    assert answer == greedy([7, 8, 9], 64)
    assert 3 <= sum(count > 1 for count in rows) <= 8 and len(rows) <= 64 + 2
    assert all(count <= 2 for count in rows), "20 ms are two tokens"
    stats = engine.stats()
    assert stats.rows_left_out >= 23 and stats.preemptions == 0
    if parts == "device":
        assert stats.prepared_steps > 50
    results = run(engine)
    assert all(len(results[f"b{i}", 0].token_ids) > 0 for i in range(24))


@pytest.mark.parametrize(
    ("reason", "settings"),
    [
        ("", {}),
        ("rows", {"max_num_seqs": 4}),
        ("costs", {"auto_rows": True}),
        ("pages", {"num_pages": 40}),
        ("interactive", {"interactive_step_ms": 20}),
    ],
)
def test_an_engine_says_what_keeps_batch_sequences_from_more_rows(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, reason: str, settings: dict[str, Any]
) -> None:
    defaults = {"num_pages": 800, "max_num_seqs": 64, "max_num_batched_tokens": 128}
    engine = make_engine(model, vocabulary, **(defaults | settings))
    started(engine, learnt(lambda tokens: 0.01 * max(4, tokens), most=128, upto=128))
    assert engine.stats().rows_held_by == ""
    if reason == "interactive":
        engine.add("chat", [7, 8, 9], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
        engine.step()
    for i in range(10):
        long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        engine.add(f"b{i}", list(range(i, i + 20)), long, job_class=BATCH)
    for _ in range(4):
        engine.step()
    assert engine.stats().rows_held_by == reason
    run(engine)
    assert engine.stats().rows_held_by == "", "nothing waits any more"


def streamed(tokens: float) -> float:
    """Seconds of a step whose experts are copied to a GPU from 32 tokens on, whatever their number."""
    return 0.001 * tokens if tokens < 32 else 0.1 + 0.0001 * tokens


@pytest.mark.parametrize(("cost", "fewer"), [(streamed, True), (lambda tokens: 0.001 * tokens, False)])
def test_batch_prompts_wait_for_each_other_where_a_full_step_is_faster(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], greedy: Any, cost: Any, fewer: bool
) -> None:
    """16 rows end one after the other, and the next prompts of 16 tokens take their places two by two."""
    engine = make_engine(model, vocabulary, num_pages=800, max_num_seqs=16, max_num_batched_tokens=256)
    started(engine, learnt(cost, most=256, upto=256))
    results: dict[str, list[int]] = {}
    for i in range(60):
        prompt = [i] * 16
        engine.add(f"b{i}", prompt, SamplingParams(temperature=0.0, max_tokens=20 + i), job_class=BATCH)
    while engine.has_work:
        for output in engine.step():
            results.setdefault(output.request_id, []).extend(output.token_ids)
        engine.check()
    assert all(results[f"b{i}"] == greedy([i] * 16, 20 + i) for i in range(60))
    prefills = [tokens - rows for rows, tokens in model.steps if tokens > rows]
    assert (len(prefills) < 35) == fewer


@pytest.mark.parametrize(("longest_ms", "spacing"), [(100, 1), (90, PREFILL_SPACING)])
def test_batch_prompts_fill_steps_of_their_own_beside_interactive_requests(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], greedy: Any, longest_ms: int, spacing: int
) -> None:
    """A step of 256 tokens takes 126 ms, a quarter longer than one of 61 tokens, so prompts of 16 tokens fill it."""
    settings = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "interactive_step_ms": longest_ms}
    engine = make_engine(model, vocabulary, num_pages=4000, interactive_share=0.0, **settings)
    started(engine, learnt(lambda tokens: 0.001 * tokens if tokens < 64 else 0.1 + 0.0001 * tokens, most=256, upto=256))
    engine.add("chat", [7, 8, 9], SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True))
    engine.step()
    for i in range(120):
        sampling = SamplingParams(temperature=0.0, max_tokens=20 + i % 7, ignore_eos=True)
        engine.add(f"b{i}", [i % 96] * 15 + [i % 7], sampling, job_class=BATCH)
    results: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            results.setdefault(output.request_id, []).extend(output.token_ids)
        engine.check()
    assert all(results[f"b{i}"] == greedy([i % 96] * 15 + [i % 7], 20 + i % 7) for i in range(120))
    assert len(results["chat"]) == 119, "the first token came before"
    prefills = [place for place, (rows, tokens) in enumerate(model.steps) if tokens - rows > 61]
    assert 6 <= len(prefills) <= 12 and all(later - earlier > spacing for earlier, later in pairwise(prefills))
    others = [tokens for place, (_, tokens) in enumerate(model.steps[:100]) if place not in prefills]
    assert max(others) <= 64, "other steps stay short"


def test_interactive_requests_alone_are_not_held_back(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any
) -> None:
    engine = make_engine(model, vocabulary, max_num_batched_tokens=128, num_pages=400, interactive_step_ms=20)
    started(engine, learnt(most=128, upto=128))
    for i in range(30):
        engine.add(f"r{i}", [i, 1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    assert model.steps == [(30, 120)], "20 ms are two tokens, but no batch waits"
    run(engine)


@pytest.mark.parametrize("seed", range(8))
def test_shared_steps_change_no_token(
    make_model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, seed: int, parts: str
) -> None:
    """Random costs, classes and small caches: the same tokens as if every step were shared, and nothing starves."""
    answers = []
    for interactive_step_ms in (0.0, random.Random(seed).choice([0.5, 20, 100])):
        noise = random.Random(seed)
        prices = [noise.choice([0.01, 0.1, 0.3]) for _ in range(7)]
        engine = make_engine(
            make_model(),
            vocabulary,
            num_pages=noise.randint(20, 60),
            max_model_len=60,
            max_num_seqs=noise.randint(2, 9),
            max_num_batched_tokens=noise.choice([9, 16, 64]),
            batch_share=noise.choice([1, 3, 8]),
            interactive_step_ms=interactive_step_ms,
            interactive_share=noise.choice([0.0, 0.15, 0.9]),
        )
        costs = StepCosts(64)
        for place, seconds in enumerate(prices):
            costs.observe(1 << place, seconds)
        started(engine, costs)
        results: dict[str, list[int]] = {}
        todo, steps = 25, 0
        while todo or engine.has_work:
            if todo and noise.random() < 0.4:
                todo -= 1
                prompt = [random.Random(f"{seed}:{todo}").randrange(96) for _ in range(1 + todo)]
                sampling = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
                job_class = BATCH if todo % 3 else JobClass.INTERACTIVE
                engine.add(f"r{todo}", prompt, sampling, job_class=job_class, arrival=float(30 - todo))
            for output in engine.step(lambda: True):
                results.setdefault(output.request_id, []).extend(output.token_ids)
            engine.check()
            steps += 1
            assert steps < 5000, "a request starves"
        answers.append(results)
    assert answers[0] == answers[1] and len(answers[0]) == 25
