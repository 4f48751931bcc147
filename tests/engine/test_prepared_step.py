"""Which steps are prepared while the device computes the step before, and that this changes no output."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from engine_workload import outputs_of_steps, workload

from ktqueue.core.request import SamplingParams
from ktqueue.engine.batch import Batch
from ktqueue.engine.engine import Engine
from ktqueue.engine.engine_parts import EngineParts
from ktqueue.engine.runner import Runner
from ktqueue.engine.shared_steps import SharedSteps
from ktqueue.engine.token_selector import Selector, TokenSelection

PROMPT = [5, 9, 2, 44, 17, 3, 80, 21, 9]


@pytest.fixture
def parts() -> Any:
    return "device"


def greedily(count: Any, **more: Any) -> Any:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **more)


def prepared(engine: Any, steps: Any = 1) -> Any:
    """Run some steps. Returns how many of them were prepared."""
    before = engine.stats().prepared_steps
    for _ in range(steps):
        engine.step()
    return engine.stats().prepared_steps - before


class PatientSelector:
    """A selector that calls nothing while it waits for the device."""

    def __init__(self, selector: Selector) -> None:
        self.selector = selector

    def select(
        self, logits: Any, rows: Any, sequences: Any, meanwhile: Any = None, masked: Any = None, ahead: Any = ()
    ) -> TokenSelection:
        return self.selector.select(logits, rows, sequences, masked=masked)


def without_preparation(parts: EngineParts) -> EngineParts:
    """The parts of an engine that prepares no step."""
    return dataclasses.replace(parts, selector=PatientSelector(parts.selector))


@pytest.mark.parametrize("pages", [400, 18])
@pytest.mark.parametrize("seed", range(4))
def test_preparing_steps_changes_no_output(make_crowded: Any, compile_grammar: Any, seed: int, pages: int) -> None:
    """Each step gives the same tokens, text, log probabilities and ends, in the same order."""
    answers = []
    for ahead in (True, False):
        engine = make_crowded(seed, pages, **({} if ahead else {"change_parts": without_preparation}))
        outputs = outputs_of_steps(engine, workload(seed), compile_grammar)
        stats = engine.stats()
        answers.append((outputs, stats.steps, stats.preemptions, stats.prefix_hits))
        assert (stats.prepared_steps > 2) == ahead
        assert stats.preemptions > 0 or pages == 400
    assert answers[0] == answers[1]


@pytest.mark.parametrize("parts", ["host", "device"])
@pytest.mark.parametrize("seed", range(3))
def test_rows_that_are_sampled_in_parts_give_the_same(
    make_crowded: Any, compile_grammar: Any, gather_outputs: Any, monkeypatch: pytest.MonkeyPatch, seed: int, parts: str
) -> None:
    whole = outputs_of_steps(make_crowded(seed, 400), workload(seed), compile_grammar)
    monkeypatch.setattr("ktqueue.engine.step_sampler.SAMPLED_ROWS", 2)
    engine = make_crowded(seed, 400)
    assert outputs_of_steps(engine, workload(seed), compile_grammar) == whole
    assert (engine.stats().prepared_steps > 2) == (parts == "device")
    results: list[dict[Any, Any]] = [{}, {}]
    launched = outputs_of_steps(make_crowded(seed, 400), workload(seed), compile_grammar, lambda: True)
    for found, steps in zip(results, (whole, launched), strict=True):
        for outputs in steps:
            gather_outputs(found, outputs)
    aborted = {name for aborts, _ in workload(seed) for name in aborts}
    for key, result in results[0].items():
        assert key[0] in aborted or result.token_ids == results[1][key].token_ids


class CountingRunner:
    """A runner that counts the batches that it prepares."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.execute, self.wait, self.learn = runner.execute, runner.wait, runner.learn
        self.prepared = 0

    @property
    def replayed(self) -> int:
        return self.runner.replayed

    def prepare(self, batch: Batch) -> bool:
        self.prepared += 1
        return self.runner.prepare(batch)


def test_all_steps_that_only_decode_are_prepared(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any
) -> None:
    """Also the step after a prefill, and steps that take new pages, free or cached. No prepared step is wasted."""
    runners: list[CountingRunner] = []

    def count_prepared(parts: EngineParts) -> EngineParts:
        runners.append(CountingRunner(parts.runner))
        return dataclasses.replace(parts, runner=runners[0])

    engine = make_engine(
        model, vocabulary, num_pages=24, max_num_seqs=4, max_num_batched_tokens=16, change_parts=count_prepared
    )
    for turn in range(3):
        for i in range(3):
            engine.add(f"r{i}", [turn, i, 7], greedily(20))
        results = run(engine)
        assert all(results[f"r{i}", 0].token_ids == greedy([turn, i, 7], 20) for i in range(3))
    stats = engine.stats()
    assert stats.steps == 60 and stats.prepared_steps == stats.replayed_steps == runners[0].prepared == 57


def test_a_new_or_aborted_request_changes_the_next_step(
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
    assert engine.stats().prepared_steps == 12 - 1 - 1  # neither the prompts' step nor the step after the stop


def test_a_step_without_the_rows_that_reach_their_last_token_is_prepared(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any
) -> None:
    engine = make_engine(model, vocabulary)
    for count in (5, 9, 12):
        engine.add(f"r{count}", PROMPT[:count], greedily(count))
    results = run(engine)
    assert all(results[f"r{count}", 0].token_ids == greedy(PROMPT[:count], count) for count in (5, 9, 12))
    assert engine.stats().steps == 12 and engine.stats().prepared_steps == 11


def test_steps_are_prepared_while_requests_wait_for_a_row(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any
) -> None:
    engine = make_engine(model, vocabulary, max_num_seqs=2)
    for i in range(4):
        engine.add(f"r{i}", [i], greedily(9))
    engine.step()
    assert prepared(engine, 5) == 5
    run(engine)


def test_a_step_that_needs_a_preemption_is_not_prepared(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any
) -> None:
    """Two rows have all pages. Then a row has to be preempted, and only `schedule` may decide which."""
    engine = make_engine(model, vocabulary, num_pages=6, enable_prefix_caching=False)
    for i in range(2):
        engine.add(f"r{i}", [i, 1, 2, 3], greedily(16))
    results = run(engine)
    assert engine.stats().preemptions > 0
    assert all(results[f"r{i}", 0].token_ids == greedy([i, 1, 2, 3], 16) for i in range(2))


@pytest.mark.parametrize("parts", ["host"])
def test_an_engine_on_the_cpu_prepares_nothing(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, parts: str
) -> None:
    engine = make_engine(model, vocabulary)
    engine.add("x", PROMPT, greedily(9))
    run(engine)
    assert engine.stats().prepared_steps == 0


def test_a_step_that_is_launched_early_ignores_aborted_requests(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any
) -> None:
    engine = make_engine(model, vocabulary, max_num_seqs=4)
    for i in range(3):
        engine.add(f"r{i}", PROMPT[: 3 + i], greedily(20, logprobs=1))
    engine.step()
    outputs = engine.step(lambda: True)
    assert len(model.steps) == 3, "one step more than the caller has outputs of"
    engine.abort("r1")
    engine.add("late", PROMPT[:3], greedily(20))
    outputs += engine.step(lambda: True)
    assert len(model.steps) == 3, "nothing is launched after a request was added"
    assert [output.request_id for output in outputs] == ["r0", "r1", "r2", "r0", "r2"]
    results = run(engine)
    for name, prompt in (("r0", PROMPT[:3]), ("r2", PROMPT[:5]), ("late", PROMPT[:3])):
        expected = greedy(prompt, 20)
        assert results[name, 0].token_ids == expected[-len(results[name, 0].token_ids) :]
    assert len(results["late", 0].token_ids) == 20 and len(results["r0", 0].token_ids) == 17


def test_a_launched_step_is_dropped_if_all_its_requests_are_aborted(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any
) -> None:
    engine = make_engine(model, vocabulary)
    engine.add("x", PROMPT, greedily(20))
    engine.step(lambda: True)
    engine.abort("x")
    assert not engine.has_work
    engine.add("y", PROMPT[:3], greedily(9))
    assert engine.step()[0].token_ids == tuple(greedy(PROMPT[:3], 1)), "the new request waits for the dropped step"
    assert run(engine)["y", 0].token_ids == greedy(PROMPT[:3], 9)[1:]
    engine.add("z", PROMPT[:4], greedily(9))
    engine.step(lambda: True)
    engine.close()


def test_a_step_that_follows_an_end_is_not_launched_early(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], greedy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharedSteps, "may_launch_ahead", lambda *_: False)
    end = greedy(PROMPT, 9)[-1]
    engine = make_engine(model, vocabulary)
    engine.add("ends", PROMPT, greedily(30, stop_token_ids=(end,)))
    engine.add("stays", PROMPT[:4], greedily(20))
    tokens = 0
    while engine.has_work:
        tokens += sum(len(output.token_ids) for output in engine.step(lambda: True))
    assert 20 < tokens <= 29 and model.computed_tokens == len(PROMPT) + 4 + tokens - 2, "no token is computed in vain"


def test_a_step_whose_launch_takes_time_is_not_launched_early(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine]
) -> None:
    """An eager step is prepared, but the caller would have to wait for its launch."""
    engine = make_engine(model, vocabulary, cuda_graphs=False)
    engine.add("x", PROMPT, greedily(20))
    for _ in range(3):
        engine.step(lambda: True)
    assert len(model.steps) == 3 and engine.stats().prepared_steps == 2
