"""Which steps are prepared while the device computes the step before, and that this changes no output."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from ktqueue.core.request import JobClass, SamplingParams
from ktqueue.engine.batch import Batch
from ktqueue.engine.engine import Engine
from ktqueue.engine.engine_parts import EngineParts
from ktqueue.engine.outputs import EmittedChoice
from ktqueue.engine.runner import Runner
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


def random_sampling(noise: Any, name: Any) -> Any:
    """A random mix of parameters that end, edit, fork or describe a choice."""
    settings = {"temperature": noise.choice([0.0, 0.7, 1.0]), "max_tokens": noise.randint(3, 20), "seed": name}
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
            settings |= more
    if settings["temperature"]:
        settings["n"] = noise.choice([1, 1, 2, 3])
    return SamplingParams(**settings)


def workload(seed: Any) -> Any:
    """What happens before each step: names to abort and requests to add, in bursts. Some requests are resumed."""
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


def outputs_of_steps(engine: Any, turns: Any, compile_grammar: Any, launch_next: Any = lambda: False) -> Any:
    """Run the workload, in which some requests have a grammar. Returns the outputs of each step."""
    outputs = []
    turns = list(turns)
    while turns or engine.has_work:
        aborts, adds = turns.pop(0) if turns else ((), ())
        for name in aborts:
            engine.abort(name)
        for name, prompt, sampling, kind, emitted in adds:
            constrained = len(prompt) % 3 == 0 and not emitted
            matcher = compile_grammar('start: ("[" /[0-9A-F]{2,4}/ ("yes" | "maybe")? "]")+') if constrained else None
            engine.add(name, prompt, sampling, job_class=kind, emitted=emitted, matcher=matcher)
        outputs.append(engine.step(launch_next))
        engine.check()
    stats = engine.stats()
    assert stats.free_pages == stats.total_pages and stats.running == stats.waiting == 0
    return outputs


@pytest.fixture
def make_crowded(make_model: Any, vocabulary: Any, make_engine: Callable[..., Engine]) -> Any:
    """Make an engine for a workload. Its model gives NaN logits for some contexts."""

    def make(seed: Any, pages: Any, **more: Any) -> Any:
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
            **more,
        )

    return make


class PatientSelector:
    """A selector that calls nothing while it waits for the device."""

    def __init__(self, selector: Selector) -> None:
        self.selector = selector

    def select(
        self, logits: Any, rows: Any, sequences: Any, meanwhile: Any = None, masked: Any = None
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
    make_crowded: Any, compile_grammar: Any, monkeypatch: pytest.MonkeyPatch, seed: int, parts: str
) -> None:
    whole = outputs_of_steps(make_crowded(seed, 400), workload(seed), compile_grammar)
    monkeypatch.setattr("ktqueue.engine.engine.SAMPLED_ROWS", 2)
    engine = make_crowded(seed, 400)
    assert outputs_of_steps(engine, workload(seed), compile_grammar) == whole
    assert (engine.stats().prepared_steps > 2) == (parts == "device")


@pytest.mark.parametrize("pages", [400, 18])
@pytest.mark.parametrize("seed", [0, 1, 3])  # those with graphs
def test_steps_that_are_launched_early_give_the_same(
    make_crowded: Any, gather_outputs: Any, compile_grammar: Any, seed: int, pages: int
) -> None:
    """Requests that arrive meanwhile join one step later, so the steps differ, but the answers do not."""
    turns = workload(seed)
    aborted = {name for aborts, _ in turns for name in aborts}
    noise, answers = random.Random(seed), []
    for launch_next in (lambda: False, lambda: True, lambda: noise.random() < 0.5):
        results: dict[Any, Any] = {}
        for outputs in outputs_of_steps(make_crowded(seed, pages), turns, compile_grammar, launch_next):
            gather_outputs(results, outputs)
        answers.append(
            {
                key: (result.token_ids, result.text, result.logprobs, result.finish_reason, result.error)
                for key, result in results.items()
                if key[0] not in aborted
            }
        )
    assert answers[0] == answers[1] == answers[2]
    assert any(error is not None for *_, error in answers[0].values())


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
    model: Any,
    vocabulary: Any,
    make_engine: Callable[..., Engine],
    run: Any,
    greedy: Any,
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
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], greedy: Any
) -> None:
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
